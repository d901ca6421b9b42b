"""`trm solve`: what the terminal shows of a model at work, and one line for every mistake."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from train_jax.__main__ import main as trm
from train_jax.checkpoint import Checkpoints
from train_jax.config import preset
from train_jax.devices import Devices
from train_jax.errors import UserError
from train_jax.evaluate import evaluate
from train_jax.modelling import build_objective
from train_jax.optim import dense_optimizer
from train_jax.puzzles.format import Metadata, load_split
from train_jax.puzzles.sudoku import GEOMETRIES, grids_of
from train_jax.report.terminal import thinking, verdict
from train_jax.report.trace import Trace
from train_jax.restore import restore
from train_jax.run_folder import RunFolder, open_run
from train_jax.stages.build_data import SudokuData
from train_jax.stages.build_data import main as build_data
from train_jax.stages.solve import Solve, check_fits, from_test_set, from_text, main
from train_jax.state import Trainee, new_learner
from train_jax.step import make_eval_step
from train_jax.thinking import think

SOLUTION = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1], np.uint8)
QUESTION = np.where(np.arange(16) % 2, SOLUTION, 0).astype(np.uint8)
SWAPPED = np.concatenate([SOLUTION[1::-1], SOLUTION[2:]])


def trace_of(*answers: np.ndarray, solution: np.ndarray | None = SOLUTION) -> Trace:
    return Trace(GEOMETRIES[4], QUESTION, np.array(answers), np.linspace(-2, 2, len(answers)), solution)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "set"
    build_data(SudokuData(output_dir=directory, size=4, num_train=20, num_test=6))
    return directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, data_dir) -> str:
    """A run as training leaves it, its averaged weights other than its raw ones."""
    path = tmp_path_factory.mktemp("runs") / "run"
    config = preset("tiny")
    arch = dataclasses.replace(config.arch, H_cycles=1, L_cycles=1, halt_max_steps=3)
    config = dataclasses.replace(config, arch=arch, data_dir=str(data_dir), run_dir=str(path))
    folder, data = open_run(config), load_split(data_dir, "train").metadata
    folder.data.write_text(json.dumps(dataclasses.asdict(data)))
    objective = build_objective(config, data, 1)
    learner = new_learner(objective.params, objective.buffers, dense_optimizer(config.optim, 1))
    learner = learner._replace(params={name: array * 0 for name, array in learner.params.items()})
    checkpoints = Checkpoints(folder)
    checkpoints.save(7, Trainee(learner, {}), {"train_seconds": 0.0})
    checkpoints.wait()
    checkpoints.close()
    return str(path)


def test_grids_stand_side_by_side_and_one_that_stays_is_drawn_once():
    text = thinking(trace_of(SWAPPED, SOLUTION, SOLUTION), width=80, styled=False)
    lines = text.splitlines()
    assert lines[0] == "question        ACT step 1      ACT steps 2-3"
    assert lines[2].split("   ") == ["| . 2 | . 4 |", "| 2!1!| 3*4 |", "| 1*2*| 3 4 |"]
    assert "*: changed; !: wrong" in lines
    assert [line.split() for line in lines[-3:]] == [
        ["1", "9", "2", "-2.00", "0.119"],
        ["2", "2", "0", "+0.00", "0.500"],
        ["3", "0", "0", "+2.00", "0.881"],
    ]
    assert "\x1b" not in text
    narrow = thinking(trace_of(SWAPPED, SOLUTION, SOLUTION), width=20, styled=False).splitlines()
    assert max(map(len, narrow[: narrow.index("*: changed; !: wrong")])) <= 20
    assert {"question", "ACT step 1", "ACT steps 2-3"} <= {line.strip() for line in narrow}


def test_on_a_terminal_givens_are_bold_changes_underlined_and_mistakes_red():
    styled = thinking(trace_of(SWAPPED), width=80, styled=True)
    row = styled.splitlines()[2]
    assert row == (
        "| . \x1b[1m2\x1b[0m | . \x1b[1m4\x1b[0m |   "
        "| \x1b[4m\x1b[31m2\x1b[0m \x1b[1m\x1b[4m\x1b[31m1\x1b[0m | \x1b[4m3\x1b[0m \x1b[1m4\x1b[0m |"
    )
    plain = thinking(trace_of(SWAPPED), width=80, styled=False)
    legend = next(i for i, line in enumerate(plain.splitlines()) if line.startswith("*"))
    bare = re.sub(r"\x1b\[\d+m", "", styled).splitlines()[:legend]
    assert bare == [re.sub(r"[*!]", " ", line) for line in plain.splitlines()[:legend]]


def test_an_unknown_solution_marks_nothing_wrong():
    text = thinking(trace_of(SWAPPED, solution=None), width=80, styled=False)
    assert "!" not in text and "wrong" not in text


def test_the_last_line_says_whether_and_why_not():
    assert verdict(trace_of(SWAPPED, SOLUTION, SOLUTION)) == (
        "solved: every given kept, every row, column and box complete, since ACT step 2"
    )
    assert verdict(trace_of(SOLUTION, solution=None), unique=False).endswith("ACT step 1, one of several solutions")
    assert verdict(trace_of(SOLUTION, SWAPPED)) == (
        "not solved: 2 of 16 cells wrong, 1 of the givens overwritten, digit 2 more than once in column 1"
    )
    other = SOLUTION % 4 + 1  # a valid Sudoku, but of other givens
    assert verdict(trace_of(other, solution=None)) == "not solved: 8 of the givens overwritten"
    assert verdict(trace_of(QUESTION, solution=None)) == "not solved: 8 cells left empty"


def test_a_model_thinks_as_in_evaluation_with_its_averaged_weights(run_dir, data_dir):
    run, test, devices = restore(run_dir), load_split(data_dir, "test"), Devices(1)
    step = devices.evaluate(make_eval_step(run.objective, run.config.arch.halt_max_steps))
    expected = evaluate(step, run.learner, test, devices, batch_size=6)
    thoughts = think(run, test.inputs[3])
    assert thoughts.predictions.shape == (run.config.arch.halt_max_steps, 16)
    np.testing.assert_array_equal(thoughts.predictions, expected.predictions[:, 3])
    np.testing.assert_allclose(thoughts.q_halt_logits, expected.q_halt_logits[:, 3], rtol=1e-5)
    assert thoughts.predictions.any()  # the raw weights, all 0, say token 0 everywhere


def test_a_puzzle_of_the_test_set_and_one_given_are_shown(run_dir, data_dir, capsys):
    main(Solve(run_dir))
    shown = capsys.readouterr().out
    assert shown.startswith(
        f"puzzle 0 of the test set in {data_dir}; {run_dir} at step 7, averaged weights\n\nquestion"
    )
    assert shown.splitlines()[-1].startswith(("solved: ", "not solved: "))
    assert "wrong" in shown
    grid = grids_of(load_split(data_dir, "test").inputs)[0]
    main(Solve(run_dir, puzzle="".join(map(str, grid))))
    given = capsys.readouterr().out
    assert given.startswith("4x4 Sudoku given; ")
    assert given.splitlines()[1:] == shown.splitlines()[1:]


def test_a_mistake_is_one_line_and_status_2(run_dir, data_dir, tmp_path, capsys):
    empty = RunFolder(tmp_path / "empty")
    empty.path.mkdir()
    for source in (RunFolder(Path(run_dir)).config, RunFolder(Path(run_dir)).data):
        (empty.path / source.name).write_text(source.read_text())
    for arguments, message in (
        ([str(tmp_path / "none")], "no run at "),
        ([str(empty.path)], "has no checkpoint yet; train it with `trm train`"),
        ([run_dir, "--puzzle", "." * 36], "the Sudoku is 6x6, the model was trained on 4x4; give one of 16 cells"),
        ([run_dir, "--puzzle", "11" + "." * 14], "digit 1 more than once in row 1"),
        ([run_dir, "--puzzle", "123. ...4 .... ...."], "the 4x4 Sudoku given has no solution; correct the givens"),
        ([run_dir, "--index", "6"], f"--index 6: the test set in {data_dir} has puzzles 0 to 5"),
        ([run_dir, "--index", "-1"], f"--index -1: the test set in {data_dir} has puzzles 0 to 5"),
        ([run_dir, "--data-dir", "gone"], "; or give --puzzle STRING, or another --data-dir"),
        ([run_dir, "--puzzle", "." * 16, "--index", "1"], "--puzzle and --index name two puzzles; give one of them"),
    ):
        assert trm(["solve", *arguments]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("trm: ") and message in error


def test_other_puzzles_than_sudokus_are_refused(data_dir):
    maze = Metadata(900, 6, 0, None, 0, 1, 1, 1.0, 1, ("all",))
    with pytest.raises(UserError, match="900 tokens of 6 kinds, which is no Sudoku"):
        check_fits(from_test_set(str(data_dir), 0), maze)


def test_the_answer_to_a_puzzle_with_several_solutions_is_not_known():
    assert from_text("." * 16).solution is None and not from_text("." * 16).unique
    unique = from_text("".join(map(str, QUESTION[:15])) + "1")
    assert unique.unique == (unique.solution is not None)
