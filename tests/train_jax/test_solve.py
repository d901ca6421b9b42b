"""`trm solve` shows the answers of a model in the terminal; every mistake is one line."""

import contextlib
import functools
import json

import numpy as np
import pytest
from support.arc_files import write_source
from support.untrained_run import write_run

from train_jax import load_run
from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices
from train_jax.stages.build_data import ArcData, MazeData, SudokuData
from train_jax.stages.build_data import main as build_data
from train_jax.stages.solve import Solve, main
from train_jax.tasks.puzzles.arc.kind import ArcKind
from train_jax.tasks.puzzles.evaluation import Evaluator
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.metadata import read_identifiers
from train_jax.tasks.puzzles.solving import solve
from train_jax.tasks.puzzles.sudoku.grid import grids_of

MAZE = """
S.#..
#.#.#
#...#
#.#.#
#.#.G
""".strip()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(kind)`: the folders of an untrained run and of its data set."""

    @functools.cache
    def of(kind):
        folder = tmp_path_factory.mktemp(kind)
        if kind == "arc":
            data = ArcData(str(write_source(folder / "source")), output_dir=folder / "set", num_aug=1)
        elif kind == "maze":
            data = MazeData(output_dir=folder / "set", size=5, num_train=12, num_test=4)
        else:
            data = SudokuData(output_dir=folder / "set", size=4, num_train=20, num_test=6)
        with contextlib.redirect_stdout(None):
            build_data(data)
        return write_run(folder / "run", folder / "set", act_steps=3, step=7, zero_params=True), folder / "set"

    return of


@pytest.fixture(scope="module")
def sudoku(made):
    return made("sudoku")


def test_a_loaded_run_answers_as_in_evaluation_with_the_averaged_weights(sudoku):
    run, test, model = restore(sudoku[0]), load_split(sudoku[1], "test"), load_run(sudoku[0])
    expected = Evaluator(run.objective, test, Devices(1), max_steps=3, batch_size=6)(run.state)
    prediction, alone = model.predict(test.inputs), solve(run, test.inputs[3])
    assert model.step == 7 and alone.tokens.shape == (3, 1, 16)
    np.testing.assert_array_equal(prediction.tokens, expected.predictions)
    np.testing.assert_array_equal(alone.tokens[:, 0], expected.predictions[:, 3])
    for logits, those in ((prediction.q_halt_logits, slice(None)), (alone.q_halt_logits, slice(3, 4))):
        np.testing.assert_allclose(logits, expected.q_halt_logits[:, those], rtol=1e-5)
    assert prediction.answers.any()  # the raw weights, all 0, say token 0 everywhere
    assert ((prediction.halting_probability > 0) & (prediction.halting_probability < 1)).all()


def test_a_loaded_run_refuses_inputs_that_it_cannot_read(sudoku):
    model, inputs = load_run(sudoku[0]), load_split(sudoku[1], "test").inputs
    for wrong in (inputs[:, :9], inputs[:0], inputs + 99, inputs / 2):
        with pytest.raises(UserError, match=r"^inputs "):
            model.predict(wrong)
    with pytest.raises(UserError, match=r"^puzzle_identifiers are int64 from 5 to 5; use 0 to 0$"):
        model.predict(inputs[:1], np.array([5]))


def test_a_puzzle_of_the_test_set_and_one_given_are_shown(sudoku, capsys):
    run_dir, data_dir = sudoku
    main(Solve(run_dir))
    shown = capsys.readouterr().out
    assert shown.startswith(f"puzzle 0 of the test set in {data_dir}; {run_dir} at step 7, averaged weights\n\ninput")
    assert shown.splitlines()[-1].startswith(("solved: ", "not solved: ")) and "wrong" in shown
    grid = grids_of(load_split(data_dir, "test").inputs)[0]
    main(Solve(run_dir, puzzle="".join(map(str, grid))))
    given = capsys.readouterr().out
    assert given.startswith("4x4 Sudoku given; ")
    assert given.splitlines()[1:] == shown.splitlines()[1:]


def test_a_maze_is_shown_from_its_file_with_an_animation(made, tmp_path, capsys):
    run_dir, _ = made("maze")
    path = tmp_path / "maze.txt"
    path.write_text(MAZE + "\n")
    main(Solve(run_dir, file=path, html=tmp_path / "m.html"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"5x5 maze in {path}; {run_dir} at step 7") and lines[3].startswith("S   #")
    assert lines[-2].startswith(("solved: a shortest path", "not solved: "))
    assert lines[-1] == f"animation: {tmp_path / 'm.html'}"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.html", "maze.txt"]


@pytest.mark.slow
def test_an_arc_task_is_shown_from_its_file(made, tmp_path, capsys):
    run_dir, data_dir = made("arc")
    tasks = json.loads((data_dir / "test_puzzles.json").read_text())
    name, task = next((name, task) for name, task in tasks.items() if len(task["test"]) > 1)
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(task))
    main(Solve(run_dir, file=path, index=1))
    shown = capsys.readouterr().out
    assert shown.startswith(f"test example 1 of {path}; {run_dir}")
    assert shown.splitlines()[-1].startswith("not solved: ")
    given = ArcKind().read(path, data_dir=str(data_dir), index=1)
    puzzles, names = load_split(data_dir, "test"), read_identifiers(data_dir)
    assert given.puzzle_identifier == names.index(name)
    rows = np.flatnonzero((puzzles.inputs == given.tokens).all(axis=1) & (puzzles.labels == given.solution).all(axis=1))
    owners = np.searchsorted(puzzles.puzzle_indices, rows, side="right") - 1
    assert given.puzzle_identifier in puzzles.puzzle_identifiers[owners]
    for example in task["test"]:
        del example["output"]
    path.write_text(json.dumps(task))
    main(Solve(run_dir, file=path))
    assert "it is unknown whether the answer is correct" in capsys.readouterr().out.splitlines()[-1]


def assert_one_line(capsys, arguments, message):
    assert trm(["solve", *map(str, arguments)]) == 2, arguments
    captured = capsys.readouterr()
    error = captured.err.strip().splitlines()[-1]
    assert captured.out == "" and error.startswith("trm: ") and message in error, error


def test_a_mistake_is_one_line_and_status_2(sudoku, tmp_path, capsys):
    run_dir, data_dir = sudoku
    for arguments, message in (
        ([tmp_path / "none"], "no run at "),
        ([run_dir, "--puzzle", "." * 36], "the Sudoku is 6x6, expected 4x4 as in training; give a Sudoku of 16"),
        ([run_dir, "--index", 6], f"--index 6: the test set in {data_dir} has puzzles 0 to 5"),
        ([run_dir, "--data-dir", "gone"], "; or give --puzzle TEXT or --file FILE, or another --data-dir"),
        ([run_dir, "--puzzle", "." * 16, "--index", 1], "--puzzle and --index both select a puzzle; give only one"),
        ([run_dir, "--puzzle", "." * 16, "--file", "x"], "--puzzle and --file both select a puzzle"),
        ([run_dir, "--html", "/none/x.html"], "/none is not a folder; give a file in an existing folder"),
    ):
        assert_one_line(capsys, arguments, message)


@pytest.mark.slow
def test_a_mistake_in_a_file_is_one_line_and_status_2(made, sudoku, tmp_path, capsys):
    def written(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["--file", path]

    (maze, _), (arc, arc_data) = made("maze"), made("arc")
    task = json.dumps({"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]]}]})
    known = next(iter(json.loads((arc_data / "test_puzzles.json").read_text())))
    for run, arguments, message in (
        (maze, ["--file", tmp_path / "none.txt"], "cannot be read (No such file or directory)"),
        (maze, written("binary", b"\xff\xfe\x00"), "is not UTF-8 text; give a text file with one puzzle"),
        (maze, written("long", "." * 2**21), "cannot be read (2,097,152 bytes, expected at most 1,048,576)"),
        (maze, written("six", "\n".join(["S.G###"] + ["######"] * 5)), "the maze is 6x6, expected a 5x5 maze"),
        (maze, written("shut", MAZE.replace("#.G", "##G")), "no path from start to goal; remove walls"),
        (maze, ["--data-dir", arc_data], "contains ARC puzzles, expected 5x5 mazes as in training; give a --data-dir"),
        (sudoku[0], written("sudoku", "12" * 8), "digit 1 more than once"),
        (arc, ["--puzzle", "1" * 16], "trained on ARC puzzles; give --file TASK.json instead of --puzzle"),
        (arc, written("unknown.json", task), "puzzle unknown is not in"),
        (arc, [*written(f"{known}.json", task), "--index", 1], "test examples 0 to 0"),
        (arc, written("bad.json", "{"), "is not valid JSON"),
        (arc, written("odd name.json", task), "'odd name' is not a valid puzzle name"),
    ):
        assert_one_line(capsys, [run, *arguments], message)
