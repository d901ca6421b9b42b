"""`trm solve`: what the terminal shows of a model at work, and one line for every mistake."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import write_source
from support.untrained_run import write_run

from train_jax import load_run
from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.run.folder import RunFolder
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices
from train_jax.stages.build_data import ArcData, MazeData, SudokuData
from train_jax.stages.build_data import main as build_data
from train_jax.stages.solve import Solve, main
from train_jax.tasks.puzzles.arc.kind import ArcKind
from train_jax.tasks.puzzles.evaluation import Evaluator
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.maze.grid import text_of
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.metadata import read_identifiers
from train_jax.tasks.puzzles.solving import solve
from train_jax.tasks.puzzles.sudoku.grid import grids_of


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "set"
    build_data(SudokuData(output_dir=directory, size=4, num_train=20, num_test=6))
    return directory


def run_of(path: Path, data_dir: Path, steps: int = 3) -> str:
    return write_run(path, data_dir, act_steps=steps, step=7, zero_params=True)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, data_dir) -> str:
    return run_of(tmp_path_factory.mktemp("runs") / "run", data_dir)


def test_a_puzzle_is_answered_as_in_evaluation_with_the_averaged_weights(run_dir, data_dir):
    run, test = restore(run_dir), load_split(data_dir, "test")
    max_steps = run.config.arch.halt_max_steps
    evaluator = Evaluator(run.objective, test, Devices(1), max_steps=max_steps, batch_size=6)
    expected = evaluator(run.state)
    answers = solve(run, test.inputs[3])
    assert answers.tokens.shape == (max_steps, 1, 16)
    np.testing.assert_array_equal(answers.tokens[:, 0], expected.predictions[:, 3])
    np.testing.assert_allclose(answers.q_halt_logits[:, 0], expected.q_halt_logits[:, 3], rtol=1e-5)
    assert answers.answers.any()  # the raw weights, all 0, say token 0 everywhere


def test_a_loaded_run_predicts_a_batch_and_refuses_what_it_cannot_read(run_dir, data_dir):
    model, inputs = load_run(run_dir), load_split(data_dir, "test").inputs
    prediction = model.predict(inputs)
    assert model.step == 7 and prediction.answers.shape == inputs.shape
    assert ((prediction.halting_probability > 0) & (prediction.halting_probability < 1)).all()
    np.testing.assert_array_equal(prediction.answers[3], solve(restore(run_dir), inputs[3]).answers[0])
    for wrong in (inputs[:, :9], inputs[:0], inputs + 99, inputs / 2):
        with pytest.raises(UserError, match=r"^inputs "):
            model.predict(wrong)
    with pytest.raises(UserError, match=r"^puzzle_identifiers are int64 from 5 to 5; use 0 to 0$"):
        model.predict(inputs[:1], np.array([5]))


def test_a_puzzle_of_the_test_set_and_one_given_are_shown(run_dir, data_dir, capsys):
    main(Solve(run_dir))
    shown = capsys.readouterr().out
    assert shown.startswith(f"puzzle 0 of the test set in {data_dir}; {run_dir} at step 7, averaged weights\n\ninput")
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
        ([run_dir, "--puzzle", "." * 36], "the Sudoku is 6x6, expected 4x4 as in training; give a Sudoku of 16"),
        ([run_dir, "--puzzle", "11" + "." * 14], "digit 1 more than once in row 1"),
        ([run_dir, "--puzzle", "123. ...4 .... ...."], "the 4x4 Sudoku given has no solution; correct the givens"),
        ([run_dir, "--index", "6"], f"--index 6: the test set in {data_dir} has puzzles 0 to 5"),
        ([run_dir, "--index", "-1"], "--index is -1; use at least 0"),
        ([run_dir, "--data-dir", "gone"], "; or give --puzzle TEXT or --file FILE, or another --data-dir"),
        (
            [run_dir, "--puzzle", "." * 16, "--index", "1"],
            "--puzzle and --index both select a puzzle; give only one of them",
        ),
    ):
        assert trm(["solve", *arguments]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("trm: ") and message in error


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


@pytest.mark.slow
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
    puzzle = MazeKind(5).parse(MAZE)
    assert puzzle.solution is not None
    assert text_of(puzzle.solution).splitlines() == ["So#  ", "#o# #", "#ooo#", "# #o#", "# #oG"]


@pytest.fixture(scope="module")
def arc_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("arc")
    build_data(ArcData(str(write_source(folder / "source")), output_dir=folder / "data", num_aug=1))
    return folder / "data"


@pytest.fixture(scope="module")
def arc_run(tmp_path_factory, arc_data) -> str:
    return run_of(tmp_path_factory.mktemp("runs") / "arc", arc_data, steps=2)


@pytest.mark.slow
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
    assert "it is unknown whether the answer is correct" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
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
        (
            maze_run,
            ["--file", written("binary", b"\xff\xfe\x00")],
            "is not UTF-8 text; give a text file with one puzzle",
        ),
        (
            maze_run,
            ["--file", written("long", "." * 2**21)],
            "cannot be read (2,097,152 bytes, expected at most 1,048,576)",
        ),
        (
            maze_run,
            ["--file", written("six", "\n".join(["S.G###"] + ["######"] * 5))],
            "the maze is 6x6, expected a 5x5 maze",
        ),
        (maze_run, ["--file", written("shut", MAZE.replace("#.G", "##G"))], "no path from start to goal; remove walls"),
        (maze_run, ["--puzzle", "." * 25], "the maze has 1 lines, expected 4 to 50"),
        (maze_run, ["--puzzle", MAZE, "--file", "x"], "--puzzle and --file both select a puzzle"),
        (maze_run, ["--html", "/none/x.html"], "/none is not a folder; give a file in an existing folder"),
        (
            maze_run,
            ["--data-dir", str(arc_data)],
            "contains ARC puzzles, expected 5x5 mazes as in training; give a --data-dir of 5x5 mazes",
        ),
        (run_dir, ["--file", written("sudoku", "12" * 8)], "digit 1 more than once"),
        (arc_run, ["--puzzle", "1" * 16], "trained on ARC puzzles; give --file TASK.json instead of --puzzle"),
        (arc_run, ["--file", written("unknown.json", json.dumps(task))], "puzzle unknown is not in"),
        (arc_run, ["--file", written(f"{known}.json", json.dumps(task)), "--index", "1"], "test examples 0 to 0"),
        (arc_run, ["--file", written("bad.json", "{")], "is not valid JSON"),
        (arc_run, ["--file", written("odd name.json", json.dumps(task))], "'odd name' is not a valid puzzle name"),
        (arc_run, ["--file", written("grid.json", json.dumps({**task, "test": [{"input": [[10]]}]}))], "contains 10"),
    ):
        assert trm(["solve", run, *arguments]) == 2, arguments
        captured = capsys.readouterr()
        error = captured.err.strip().splitlines()[-1]
        assert captured.out == "" and error.startswith("trm: ") and message in error, error


def test_the_animation_is_written_and_nothing_else(maze_run, tmp_path, capsys):
    path = tmp_path / "maze.txt"
    path.write_text(MAZE)
    main(Solve(maze_run, file=path, html=tmp_path / "m.html"))
    assert f"animation: {tmp_path / 'm.html'}\n" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.html", "maze.txt"]
