"""`trm solve`: what the terminal shows of a model at work, and one line for every mistake."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import write_source

from train_jax.__main__ import main as trm
from train_jax.core.state import Trainee, new_learner
from train_jax.core.step import make_eval_step
from train_jax.errors import UserError
from train_jax.optim.optimizer import dense_optimizer
from train_jax.report.terminal import trace_text, verdict
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.config import preset
from train_jax.run.folder import RunFolder, open_run
from train_jax.run.model import build_objective
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices
from train_jax.stages.build_data import ArcData, MazeData, SudokuData
from train_jax.stages.build_data import main as build_data
from train_jax.stages.solve import Solve, main
from train_jax.tasks.puzzles.arc.canvas import canvas_of
from train_jax.tasks.puzzles.arc.kind import ArcKind, arc_kind_of
from train_jax.tasks.puzzles.evaluation import evaluate
from train_jax.tasks.puzzles.format import Metadata, load_split, read_identifiers
from train_jax.tasks.puzzles.maze.grid import OPEN, PATH, text_of
from train_jax.tasks.puzzles.maze.grid import parse as parse_maze
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.puzzle_input import known_kind
from train_jax.tasks.puzzles.solving import think
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES, grids_of
from train_jax.tasks.puzzles.sudoku.kind import SudokuKind
from train_jax.tasks.puzzles.trace import Trace

SOLUTION = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1], np.uint8)
QUESTION = np.where(np.arange(16) % 2, SOLUTION, 0).astype(np.uint8)
LOOK = SudokuKind(GEOMETRIES[4])
SWAPPED = np.concatenate([SOLUTION[1::-1], SOLUTION[2:]])


def trace_of(*answers: np.ndarray, solution: np.ndarray | None = SOLUTION) -> Trace:
    return Trace(LOOK, QUESTION, np.array(answers), np.linspace(-2, 2, len(answers)), solution)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "set"
    build_data(SudokuData(output_dir=directory, size=4, num_train=20, num_test=6))
    return directory


def run_of(path: Path, data_dir: Path, steps: int = 3) -> str:
    """A run as training leaves it, its averaged weights other than its raw ones."""
    config = preset("tiny")
    arch = dataclasses.replace(config.arch, H_cycles=1, L_cycles=1, halt_max_steps=steps)
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


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, data_dir) -> str:
    return run_of(tmp_path_factory.mktemp("runs") / "run", data_dir)


def test_grids_stand_side_by_side_and_one_that_stays_is_drawn_once():
    text = trace_text(trace_of(SWAPPED, SOLUTION, SOLUTION), width=80, styled=False)
    lines = text.splitlines()
    assert lines[0] == "input           ACT step 1      ACT steps 2-3"
    assert lines[2].split("   ") == ["| . 2 | . 4 |", "| 2!1!| 3*4 |", "| 1*2*| 3 4 |"]
    assert "*: changed; !: wrong" in lines
    assert [line.split() for line in lines[-3:]] == [
        ["1", "9", "2", "-2.00", "0.119"],
        ["2", "2", "0", "+0.00", "0.500"],
        ["3", "0", "0", "+2.00", "0.881"],
    ]
    assert "\x1b" not in text
    narrow = trace_text(trace_of(SWAPPED, SOLUTION, SOLUTION), width=20, styled=False).splitlines()
    assert max(map(len, narrow[: narrow.index("*: changed; !: wrong")])) <= 20
    assert {"input", "ACT step 1", "ACT steps 2-3"} <= {line.strip() for line in narrow}


def test_on_a_terminal_givens_are_bold_changes_underlined_and_mistakes_red():
    styled = trace_text(trace_of(SWAPPED), width=80, styled=True)
    row = styled.splitlines()[2]
    assert row == (
        "| . \x1b[1m2\x1b[0m | . \x1b[1m4\x1b[0m |   "
        "| \x1b[4;31m2\x1b[0m!\x1b[1;4;31m1\x1b[0m!| \x1b[4m3\x1b[0m \x1b[1m4\x1b[0m |"
    )
    plain = trace_text(trace_of(SWAPPED), width=80, styled=False)
    legend = next(i for i, line in enumerate(plain.splitlines()) if line.startswith("*"))
    bare = re.sub(r"\x1b\[[\d;]+m", "", styled).splitlines()[:legend]
    assert bare == [line.replace("*", " ") for line in plain.splitlines()[:legend]]


def test_an_unknown_solution_marks_nothing_wrong():
    text = trace_text(trace_of(SWAPPED, solution=None), width=80, styled=False)
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
        ([run_dir, "--data-dir", "gone"], "; or give --puzzle TEXT or --file FILE, or another --data-dir"),
        ([run_dir, "--puzzle", "." * 16, "--index", "1"], "--puzzle and --index name two puzzles; give one of them"),
    ):
        assert trm(["solve", *arguments]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("trm: ") and message in error


def test_puzzles_of_no_known_kind_are_refused():
    words = Metadata(900, 7, 0, None, 0, 1, 1, 1.0, 1, ("all",))
    with pytest.raises(
        UserError, match="sequences of 900 tokens from a vocabulary of 7, which are no Sudokus, mazes or"
    ):
        known_kind(words, "the run was trained on")


def test_the_answer_to_a_puzzle_with_several_solutions_is_not_known():
    assert LOOK.parse("." * 16).solution is None and not LOOK.parse("." * 16).unique
    unique = LOOK.parse("".join(map(str, QUESTION[:15])) + "1")
    assert unique.unique == (unique.solution is not None)


MAZE = """
S.#..
#.#.#
#...#
#.#.#
#.#.G
""".strip()


@pytest.fixture(scope="module")
def maze_data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "maze"
    build_data(MazeData(output_dir=directory, size=5, num_train=12, num_test=4))
    return directory


@pytest.fixture(scope="module")
def maze_run(tmp_path_factory, maze_data) -> str:
    return run_of(tmp_path_factory.mktemp("runs") / "maze", maze_data)


def test_a_maze_is_shown_from_a_file_and_from_the_test_set(maze_run, tmp_path, capsys):
    path = tmp_path / "maze.txt"
    path.write_text(MAZE + "\n")
    main(Solve(maze_run, file=path))
    shown = capsys.readouterr().out
    assert shown.startswith(f"5x5 maze in {path}; {maze_run} at step 7")
    assert shown.splitlines()[3].startswith("S   #")
    assert shown.splitlines()[-1].startswith(("solved: a shortest path", "not solved: "))
    main(Solve(maze_run, index=2))
    assert capsys.readouterr().out.startswith("puzzle 2 of the test set")
    # The solution is the only shortest path, found without having been given.
    question = MazeKind(5).parse(MAZE)
    assert question.solution is not None
    assert text_of(question.solution).splitlines() == ["So#  ", "#o# #", "#ooo#", "# #o#", "# #oG"]


def test_maze_answers_are_judged_by_the_rules():
    kind = MazeKind(5)
    question, solution = parse_maze(MAZE), kind.parse(MAZE).solution
    assert solution is not None
    assert kind.mistakes(question, solution, solution) == []
    assert kind.mistakes(question, solution, None) == []
    assert kind.mistakes(question, question, solution) == ["7 of 25 cells wrong", "no path marked"]
    gap = np.where(np.arange(25) == 12, OPEN, solution)
    assert kind.mistakes(question, gap, None) == ["the 6 cells marked do not join start and goal"]
    aside = np.where(np.arange(25) == 16, PATH, solution)
    assert kind.mistakes(question, aside, None) == ["1 of the 8 cells marked are not on the way"]
    through = np.where(np.isin(np.arange(25), [2, 4]), PATH, solution)
    assert kind.mistakes(question, through, solution)[:2] == ["2 of 25 cells wrong", "1 walls or ends overwritten"]
    ring = parse_maze("S..\n.#.\n..G\n".replace("\n", "##\n") + "#####\n#####")
    for way in ([1, 2, 7], [5, 10, 11]):
        assert kind.mistakes(ring, np.where(np.isin(np.arange(25), way), PATH, ring), None) == []
    square = parse_maze("S..##\n#..##\n#.G##\n#####\n#####")
    round_about = np.where(np.isin(np.arange(25), [1, 2, 7]), PATH, square)
    assert kind.mistakes(square, round_about, None) == []
    assert kind.mistakes(np.full(25, OPEN), solution, None) == ["the input is not a maze"]


@pytest.fixture(scope="module")
def arc_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("arc")
    build_data(ArcData(str(write_source(folder / "source")), output_dir=folder / "data", num_aug=1))
    return folder / "data"


@pytest.fixture(scope="module")
def arc_run(tmp_path_factory, arc_data) -> str:
    return run_of(tmp_path_factory.mktemp("runs") / "arc", arc_data, steps=2)


def test_an_arc_task_is_shown_from_its_file(arc_run, arc_data, tmp_path, capsys):
    tasks = json.loads((arc_data / "test_puzzles.json").read_text())
    name, task = next((name, task) for name, task in tasks.items() if len(task["test"]) > 1)
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(task))
    main(Solve(arc_run, file=path, index=1))
    shown = capsys.readouterr().out
    assert shown.startswith(f"test example 1 of {path}; {arc_run}")
    assert shown.splitlines()[-1].startswith("not solved: ")
    given = ArcKind().read(path, data_dir=str(arc_data), index=1)
    puzzles, names = load_split(arc_data, "test"), read_identifiers(arc_data)
    assert given.puzzle_identifier == names.index(name)
    rows = np.flatnonzero((puzzles.inputs == given.tokens).all(axis=1) & (puzzles.labels == given.solution).all(axis=1))
    owners = np.searchsorted(puzzles.puzzle_indices, rows, side="right") - 1
    assert given.puzzle_identifier in puzzles.puzzle_identifiers[owners]
    for example in task["test"]:
        del example["output"]
    path.write_text(json.dumps(task))
    main(Solve(arc_run, file=path))
    assert "whether that is right is not known" in capsys.readouterr().out.splitlines()[-1]


def test_arc_answers_are_judged_as_they_are_read_in_voting():
    solution = canvas_of(np.array([[1, 2], [3, 4]], np.uint8))
    kind = arc_kind_of([solution])
    values = kind.values(solution)
    assert (kind.rows, kind.cols) == (3, 3)
    assert kind.mistakes(values, values, None) is None
    assert kind.mistakes(values, values, values) == []
    other = kind.values(canvas_of(np.array([[1, 2], [3, 5]], np.uint8)))
    assert kind.mistakes(values, other, values) == ["1 of 4 cells wrong"]
    wide = kind.values(canvas_of(np.array([[1, 2, 3]], np.uint8)))
    assert kind.mistakes(values, wide, values) == ["a grid of 1x3 where 2x2 is right"]
    scribbled = values.copy()
    scribbled[8] = 7  # beyond the grid, where nothing is read
    assert kind.mistakes(values, scribbled, values) == []


def test_mistakes_about_files_are_one_line_and_status_2(maze_run, arc_run, run_dir, arc_data, tmp_path, capsys):
    def written(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    task = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]]}]}
    known = next(iter(json.loads((arc_data / "test_puzzles.json").read_text())))
    for run, arguments, message in (
        (maze_run, ["--file", str(tmp_path / "none.txt")], "cannot be read (No such file or directory)"),
        (maze_run, ["--file", str(tmp_path)], "cannot be read (Is a directory)"),
        (maze_run, ["--file", written("binary", b"\xff\xfe\x00")], "is no text; give a text file with one puzzle"),
        (
            maze_run,
            ["--file", written("long", "." * 2**21)],
            "cannot be read (2,097,152 bytes, expected at most 1,048,576)",
        ),
        (
            maze_run,
            ["--file", written("six", "\n".join(["S.G###"] + ["######"] * 5))],
            "the maze is 6x6, the model was",
        ),
        (maze_run, ["--file", written("shut", MAZE.replace("#.G", "##G"))], "has no way from start to goal; open one"),
        (maze_run, ["--puzzle", "." * 25], "the maze has 1 lines, expected 4 to 50"),
        (maze_run, ["--puzzle", MAZE, "--file", "x"], "--puzzle and --file name two puzzles"),
        (maze_run, ["--html", "/none/x.html"], "/none is not a folder; give a file in one that is there"),
        (maze_run, ["--gif", "/none/x.gif"], "/none is not a folder"),
        (
            maze_run,
            ["--data-dir", str(arc_data)],
            "holds ARC puzzles; give a --data-dir of 5x5 mazes",
        ),
        (run_dir, ["--file", written("sudoku", "12" * 8)], "digit 1 more than once"),
        (arc_run, ["--puzzle", "1" * 16], "trained on ARC puzzles; give --file TASK.json instead of --puzzle"),
        (arc_run, ["--file", written("unknown.json", json.dumps(task))], "puzzle unknown is none of those in"),
        (arc_run, ["--file", written(f"{known}.json", json.dumps(task)), "--index", "1"], "test examples 0 to 0"),
        (arc_run, ["--file", written("bad.json", "{")], "not JSON that can be read"),
        (arc_run, ["--file", written("odd name.json", json.dumps(task))], "'odd name' is no puzzle name"),
        (arc_run, ["--file", written("grid.json", json.dumps({**task, "test": [{"input": [[10]]}]}))], "holds 10"),
    ):
        assert trm(["solve", run, *arguments]) == 2, arguments
        captured = capsys.readouterr()
        error = captured.err.strip().splitlines()[-1]
        assert captured.out == "" and error.startswith("trm: ") and message in error, error


def test_animations_are_written_whole_and_nothing_else(maze_run, tmp_path, capsys):
    path = tmp_path / "maze.txt"
    path.write_text(MAZE)
    main(Solve(maze_run, file=path, html=tmp_path / "m.html", gif=tmp_path / "m.gif"))
    assert f"animation: {tmp_path / 'm.html'}\nanimation: {tmp_path / 'm.gif'}\n" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.gif", "m.html", "maze.txt"]
    assert (tmp_path / "m.gif").read_bytes()[:6] == b"GIF89a"
