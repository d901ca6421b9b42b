"""The text of a trace that `trm solve` prints, and the checks of an answer by each kind."""

import numpy as np
import pytest

from train_jax.errors import UserError
from train_jax.report.terminal import trace_text, verdict
from train_jax.tasks.puzzles.arc.grid import canvas_of
from train_jax.tasks.puzzles.arc.kind import ArcKind
from train_jax.tasks.puzzles.kinds import Trace
from train_jax.tasks.puzzles.maze.grid import OPEN, PATH
from train_jax.tasks.puzzles.maze.grid import parse as parse_maze
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.metadata import Metadata
from train_jax.tasks.puzzles.solving import known_kind
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES
from train_jax.tasks.puzzles.sudoku.kind import SudokuKind

MAZE = """
S.#..
#.#.#
#...#
#.#.#
#.#.G
""".strip()
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


def test_without_a_solution_nothing_is_marked_as_wrong():
    text = trace_text(trace_of(SWAPPED, solution=None), width=80, styled=False)
    assert "!" not in text and "wrong" not in text


def test_the_last_line_names_the_mistakes_of_an_answer():
    assert verdict(trace_of(SWAPPED, SOLUTION, SOLUTION)) == (
        "solved: every given kept, every row, column and box complete, since ACT step 2"
    )
    assert verdict(trace_of(SOLUTION, solution=None), unique=False).endswith("ACT step 1, one of several solutions")
    assert verdict(trace_of(SOLUTION, SWAPPED)) == (
        "not solved: 2 of 16 cells wrong, 1 of the givens overwritten, digit 2 more than once in column 1"
    )
    other = SOLUTION % 4 + 1  # a valid Sudoku, but of other givens
    assert verdict(trace_of(other, solution=None)) == "not solved: 8 of the givens overwritten"
    assert verdict(trace_of(PUZZLE, solution=None)) == "not solved: 8 cells left empty"


def test_puzzles_of_no_known_kind_are_refused():
    words = Metadata(900, 7, 0, None, 0, 1, 1, 1.0, 1, ("all",))
    with pytest.raises(
        UserError, match="sequences of 900 tokens from a vocabulary of 7, but `trm solve` can only show"
    ):
        known_kind(words, "the run was trained on")


def test_the_answer_to_a_puzzle_with_several_solutions_is_not_known():
    assert KIND.parse("." * 16).solution is None and not KIND.parse("." * 16).unique
    unique = KIND.parse("".join(map(str, PUZZLE[:15])) + "1")
    assert unique.unique == (unique.solution is not None)


def test_maze_answers_are_checked_by_the_rules():
    kind = MazeKind(5)
    maze, solution = parse_maze(MAZE), kind.parse(MAZE).solution
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
