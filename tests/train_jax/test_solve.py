"""`trm solve` shows the answers of a model in the terminal, each kind checks an answer, and a mistake is one line."""

import contextlib
import functools
import json

import numpy as np
import pytest
from support.arc_files import write_source
from support.untrained_run import write_run

from train_jax import load_run
from train_jax.__main__ import main as trm
from train_jax.cli.build_data import main as build_data
from train_jax.errors import UserError
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.arc.grid import canvas_of
from train_jax.puzzles.arc.kind import ArcKind
from train_jax.puzzles.evaluation import Evaluator
from train_jax.puzzles.format import load_split
from train_jax.puzzles.kinds import Trace
from train_jax.puzzles.maze.data import MazeData
from train_jax.puzzles.maze.grid import OPEN, PATH
from train_jax.puzzles.maze.grid import parse as parse_maze
from train_jax.puzzles.maze.kind import MazeKind
from train_jax.puzzles.metadata import Metadata, read_identifiers
from train_jax.puzzles.solving import known_kind, solve
from train_jax.puzzles.stages.solve import Solve, main
from train_jax.puzzles.stepping import StepAnswers, choose_view
from train_jax.puzzles.sudoku.data import SudokuData
from train_jax.puzzles.sudoku.grid import GEOMETRIES, grids_of
from train_jax.puzzles.sudoku.kind import SudokuKind
from train_jax.puzzles.terminal import trace_text, verdict
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices

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


def test_a_loaded_run_answers_as_in_evaluation_with_the_averaged_weights(made):
    sudoku = made("sudoku")
    run = restore(sudoku[0])
    test = load_split(sudoku[1], "test")
    model = load_run(sudoku[0])
    expected = Evaluator(run.objective, test, Devices(1), max_steps=3, batch_size=6)(run.state)
    prediction = model.predict(test.inputs)
    alone = solve(run, test.inputs[3])
    assert model.step == 7 and alone.tokens.shape == (3, 1, 16)
    np.testing.assert_array_equal(prediction.tokens, expected.predictions)
    np.testing.assert_array_equal(alone.tokens[:, 0], expected.predictions[:, 3])
    for logits, those in ((prediction.q_halt_logits, slice(None)), (alone.q_halt_logits, slice(3, 4))):
        np.testing.assert_allclose(logits, expected.q_halt_logits[:, those], rtol=1e-5)
    assert prediction.answers.any()  # the raw weights, all 0, say token 0 everywhere
    assert ((prediction.halting_probability > 0) & (prediction.halting_probability < 1)).all()
    for wrong in (test.inputs[:, :9], test.inputs[:0], test.inputs + 99, test.inputs / 2):
        with pytest.raises(UserError, match=r"^inputs "):
            model.predict(wrong)
    with pytest.raises(UserError, match=r"^puzzle_identifiers are int64 from 5 to 5; use 0 to 0$"):
        model.predict(test.inputs[:1], np.array([5]))


def test_a_puzzle_of_the_test_set_and_one_given_are_shown(made, capsys):
    run_dir, data_dir = made("sudoku")
    main(Solve(run_dir))
    shown = capsys.readouterr().out
    assert shown.startswith(f"puzzle 0 of the test set in {data_dir}; {run_dir} at step 7, averaged weights\n\ninput")
    assert shown.splitlines()[-1].startswith(("solved: ", "not solved: ")) and "wrong" in shown
    grid = grids_of(load_split(data_dir, "test").inputs)[0]
    main(Solve(run_dir, puzzle="".join(map(str, grid))))
    given = capsys.readouterr().out
    assert given.startswith("4x4 Sudoku given; ")
    assert given.splitlines()[1:] == shown.splitlines()[1:]
    main(Solve(run_dir, views=3))
    in_views = capsys.readouterr().out
    assert "averaged weights; view " in in_views and " of 3" in in_views
    assert in_views.splitlines()[-1].startswith(("solved: ", "not solved: "))
    with pytest.raises(UserError, match="--agree compares the answers of several views; add --views"):
        main(Solve(run_dir, agree=True))


def test_the_answer_of_several_views_is_the_surest_one_or_the_first_that_two_share():
    one, two, three = (np.full(4, value) for value in (1, 2, 3))
    answers = [
        StepAnswers(np.stack([one, two, three, two]), np.array([0.0, 2.0, -1.0, 1.0])),
        StepAnswers(np.stack([two, one, one, one]), np.array([1.0, 0.0, -2.0, 3.0])),
    ]
    assert choose_view(answers, agree=False) == (3, 1, False)
    assert choose_view(answers, agree=True) == (1, 0, True)
    without_equal_ones = [StepAnswers(each.tokens[2:], each.q_halt_logits[2:]) for each in answers]
    assert choose_view(without_equal_ones, agree=True) == (1, 1, False)


def test_a_maze_is_shown_from_its_file(made, tmp_path, capsys):
    run_dir, _ = made("maze")
    path = tmp_path / "maze.txt"
    path.write_text(MAZE + "\n")
    main(Solve(run_dir, file=path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"5x5 maze in {path}; {run_dir} at step 7") and lines[3].startswith("S   #")
    assert lines[-1].startswith(("solved: a shortest path", "not solved: "))


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
    puzzles = load_split(data_dir, "test")
    assert given.puzzle_identifier == read_identifiers(data_dir).index(name)
    assert ((puzzles.inputs == given.tokens) & (puzzles.labels == given.solution)).all(axis=1).any()
    for example in task["test"]:
        del example["output"]
    path.write_text(json.dumps(task))
    main(Solve(run_dir, file=path))
    assert "it is unknown whether the answer is correct" in capsys.readouterr().out.splitlines()[-1]


def check_mistakes(capsys, cases):
    for arguments, message in cases:
        assert trm(["solve", *map(str, arguments)]) == 2, arguments
        captured = capsys.readouterr()
        error = captured.err.strip().splitlines()[-1]
        assert captured.out == "" and error.startswith("trm: ") and message in error, error


def test_a_mistake_is_one_line_and_status_2(made, tmp_path, capsys):
    run_dir, data_dir = made("sudoku")
    text = ["--puzzle", "." * 16]
    cases = (
        ([tmp_path / "none"], "no run at "),
        ([run_dir, "--puzzle", "." * 36], "the Sudoku is 6x6, expected 4x4 as in training; give a Sudoku of 16"),
        ([run_dir, "--index", 6], f"--index 6: the test set in {data_dir} has puzzles 0 to 5"),
        ([run_dir, "--data-dir", "gone"], "; or give --puzzle TEXT or --file FILE, or another --data-dir"),
        ([run_dir, *text, "--index", 1], "--puzzle and --index both select a puzzle; give only one"),
        ([run_dir, *text, "--file", "x"], "--puzzle and --file both select a puzzle"),
    )
    check_mistakes(capsys, cases)
    words = Metadata(900, 7, 0, None, 0, 1, 1, 1.0, 1, ("all",))
    with pytest.raises(UserError, match="sequences of 900 tokens from a vocabulary of 7, but `trm solve` can only sho"):
        known_kind(words, "the run was trained on")


# ---- the text of a trace, and the checks of an answer


SOLUTION = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1], np.uint8)

PUZZLE = np.where(np.arange(16) % 2, SOLUTION, 0).astype(np.uint8)
KIND = SudokuKind(GEOMETRIES[4])
SWAPPED = np.concatenate([SOLUTION[1::-1], SOLUTION[2:]])


def trace_of(*answers: np.ndarray, solution: np.ndarray | None = SOLUTION) -> Trace:
    return Trace(KIND, PUZZLE, np.array(answers), np.linspace(-2, 2, len(answers)), solution)


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
    unknown = trace_text(trace_of(SWAPPED, solution=None), width=80, styled=False)
    assert "!" not in unknown and "wrong" not in unknown


def test_the_last_line_names_the_mistakes_of_an_answer():
    solved = "solved: every given kept, every row, column and box complete, since ACT step 2"
    assert verdict(trace_of(SWAPPED, SOLUTION, SOLUTION)) == solved
    assert verdict(trace_of(SOLUTION, solution=None), unique=False).endswith("ACT step 1, one of several solutions")
    several = KIND.parse("." * 16)
    assert several.solution is None and not several.unique
    assert verdict(trace_of(SOLUTION, SWAPPED)) == (
        "not solved: 2 of 16 cells wrong, 1 of the givens overwritten, digit 2 more than once in column 1"
    )
    other = SOLUTION % 4 + 1  # a valid Sudoku, but of other givens
    assert verdict(trace_of(other, solution=None)) == "not solved: 8 of the givens overwritten"
    assert verdict(trace_of(PUZZLE, solution=None)) == "not solved: 8 cells left empty"


def test_maze_answers_are_checked_by_the_rules():
    kind = MazeKind(5)
    maze = parse_maze(MAZE)
    solution = kind.parse(MAZE).solution
    assert solution is not None
    assert kind.checking.mistakes(maze, solution, solution) == []
    assert kind.checking.mistakes(maze, solution, None) == []
    assert kind.checking.mistakes(maze, maze, solution) == ["7 of 25 cells wrong", "no path marked"]
    gap = np.where(np.arange(25) == 12, OPEN, solution)
    assert kind.checking.mistakes(maze, gap, None) == ["the 6 cells marked do not connect start and goal"]
    aside = np.where(np.arange(25) == 16, PATH, solution)
    assert kind.checking.mistakes(maze, aside, None) == ["1 of the 8 cells marked are not on the path"]
    through = np.where(np.isin(np.arange(25), [2, 4]), PATH, solution)
    assert kind.checking.mistakes(maze, through, solution)[:2] == ["2 of 25 cells wrong", "1 walls or ends overwritten"]
    ring = parse_maze("S..\n.#.\n..G\n".replace("\n", "##\n") + "#####\n#####")
    for way in ([1, 2, 7], [5, 10, 11]):
        assert kind.checking.mistakes(ring, np.where(np.isin(np.arange(25), way), PATH, ring), None) == []
    assert kind.checking.mistakes(np.full(25, OPEN), solution, None) == ["the input is not a maze"]
    longer = parse_maze("S...#\n.##.#\nG...#\n#####\n#####")
    around = np.where((longer == OPEN) & (np.arange(25) != 5), PATH, longer)
    assert kind.checking.mistakes(longer, around, None) == ["a path of 8 steps, the shortest has 2"]


def test_arc_answers_are_checked_as_they_are_read_in_voting():
    solution = canvas_of(np.array([[1, 2], [3, 4]], np.uint8))
    kind = ArcKind().fitted([solution])
    values = kind.values(solution)
    assert (kind.drawing.rows, kind.drawing.cols) == (3, 3)
    assert kind.checking.mistakes(values, values, None) is None
    assert kind.checking.mistakes(values, values, values) == []
    other = kind.values(canvas_of(np.array([[1, 2], [3, 5]], np.uint8)))
    assert kind.checking.mistakes(values, other, values) == ["1 of 4 cells wrong"]
    wide = kind.values(canvas_of(np.array([[1, 2, 3]], np.uint8)))
    assert kind.checking.mistakes(values, wide, values) == ["the grid is 1x3, expected 2x2"]
    scribbled = values.copy()
    scribbled[8] = 7  # beyond the grid, where nothing is read
    assert kind.checking.mistakes(values, scribbled, values) == []
