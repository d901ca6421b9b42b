"""Traces of ACT steps, and boards of every kind as SVG and as text."""

import xml.etree.ElementTree as ElementTree

import numpy as np

from train_jax.report.boards import board, board_at, caption, strip
from train_jax.report.puzzle_page import chosen_steps
from train_jax.report.render import CELLS
from train_jax.report.terminal import as_text, grid_text, progress, progress_of
from train_jax.tasks.puzzles.arc.grid import canvas_of
from train_jax.tasks.puzzles.arc.kind import ArcKind
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.kinds import Trace, trace_of
from train_jax.tasks.puzzles.maze.grid import GOAL, OPEN, PATH, START, WALL
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES
from train_jax.tasks.puzzles.sudoku.kind import SudokuKind

SUDOKU = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1], np.uint8)
MAZE = np.full(25, WALL, np.uint8)
MAZE[[0, 1, 2, 7, 12]] = START, OPEN, OPEN, OPEN, GOAL
SOLVED = np.where(MAZE == OPEN, PATH, MAZE)
ARC = np.array([2, 3, 11, 1, 4, 5, 6, 1, 1, 1, 1, 0], np.uint8)


def traces() -> dict[str, Trace]:
    inputs = np.where(np.arange(16) % 2, SUDOKU, 0).astype(np.uint8)
    wrong = np.where(np.arange(16) == 0, 3, SUDOKU).astype(np.uint8)
    logits = np.array([-2.0, 0.5, 2.0])
    gap = np.where(np.arange(25) == 2, OPEN, SOLVED)
    return {
        "sudoku": Trace(SudokuKind(GEOMETRIES[4]), inputs, np.array([wrong, SUDOKU, SUDOKU]), logits, SUDOKU),
        "maze": Trace(MazeKind(5), MAZE, np.array([gap, SOLVED, SOLVED]), logits, SOLVED),
        "unknown": Trace(MazeKind(5), MAZE, np.array([gap, SOLVED]), logits[:2]),
    }


def test_a_trace_tells_what_changed_and_what_is_wrong():
    swapped = SUDOKU.copy()
    swapped[:2] = 2, 0
    inputs, answers = traces()["sudoku"].inputs, np.array([swapped, SUDOKU, SUDOKU, swapped])
    trace = Trace(SudokuKind(GEOMETRIES[4]), inputs, answers, np.zeros(4), SUDOKU)
    assert [tuple(stretch) for stretch in trace.stretches] == [(1, 1), (2, 3), (4, 4)]
    assert trace.changed(1).sum() == 9 and trace.changed(2).sum() == 2 and not trace.changed(3).any()
    assert trace.wrong(1).tolist() == [True, True] + [False] * 14
    assert trace.mistakes(1) and trace.mistakes(2) == []
    assert chosen_steps(trace) == [0, 1, 2, 4]
    drawn = ElementTree.fromstring(str(strip(trace)).replace("<br>", "<br/>"))
    labels = [svg.get("aria-label") for svg in drawn.findall(".//{*}svg")]
    assert labels[:2] == ["input", "ACT step 1, 2 wrong, halt 0.50"] and all(labels)
    captions = ["".join(caption.itertext()) for caption in drawn.iter("figcaption")]
    assert captions == [
        "input",
        "ACT step 12 wrong · halt 0.50",
        "ACT steps 2\u20133correct · halt 0.50",
        "ACT step 42 wrong · halt 0.50",
        "solution",
    ]
    # A valid grid that overwrites a given is no solution of this puzzle.
    inputs = np.roll(SUDOKU, 1) * (np.arange(16) == 5)
    assert Trace(trace.kind, inputs, SUDOKU[None], np.zeros(1)).mistakes(1)


def test_cells_outside_of_an_arc_grid_are_neither_compared_nor_drawn():
    solution = canvas_of(np.array([[6, 6, 6], [6, 6, 6]], np.uint8))
    noise = np.where(solution == 0, 7, solution).astype(np.uint8)
    trace = trace_of(ArcKind(), solution, np.array([noise]), np.zeros(1), solution)
    assert (trace.kind.drawing.rows, trace.kind.drawing.cols) == (3, 4)
    assert not trace.wrong(1).any() and trace.mistakes(1) == []


def test_the_caption_says_what_is_wrong():
    captions = [caption(traces()["sudoku"], step) for step in (0, 1, 2)]
    assert captions == ["input", "ACT step 1, 1 wrong, halt 0.12", "ACT step 2, halt 0.62"]
    assert caption(traces()["unknown"], 1) == "ACT step 1, halt 0.12"


def cells_of_class(drawing: str, kind: str, cell: float) -> int:
    """Returns how many cells the rectangles of a class cover."""
    root = ElementTree.fromstring(drawing)
    widths = [float(each.get("width", "0")) for each in root.iter() if each.get("class") == kind]
    return round(sum(max(1, round(width / cell)) for width in widths))


def test_boards_show_every_wall_path_and_colour():
    trace = traces()["maze"]
    drawing, cell = board_at(trace, 1, label="x", side=132), 130 / 5
    assert cells_of_class(drawing, "wall", cell) == 20
    assert cells_of_class(drawing, "path", cell) == 2
    assert cells_of_class(drawing, "mark", cell) == 1
    arc = board(ArcKind(3, 4).drawing, ARC, label="x", side=132)
    assert [cells_of_class(arc, f"arc{i}", 130 / 4) for i in range(10)] == [1, 1, 1, 1, 1, 0, 0, 0, 0, 1]


def test_text_shows_every_kind_with_and_without_colours():
    drawings: list[tuple[Kind, np.ndarray, list[str]]] = [
        (SudokuKind(GEOMETRIES[4]), SUDOKU, ["+-----+-----+", "| 1 2 | 3 4 |"]),
        (MazeKind(5), SOLVED, ["S o o # # ", "# # o # # "]),
        (ArcKind(3, 4), ARC, ["0 1 9 . ", "2 3 4 . "]),
    ]
    for kind, grid, expected in drawings:
        plain = grid_text(kind.drawing, grid).plain.splitlines()
        assert plain[:2] == expected
        styled = grid_text(kind.drawing, grid, styled=True).plain.splitlines()
        assert [len(line) for line in styled] == [len(line) for line in plain]
    walls = as_text([grid_text(MazeKind(5).drawing, SOLVED, styled=True)], width=80, styled=True).splitlines()[1]
    assert f"\x1b[48;5;{CELLS['wall'].ansi}m" in walls


def test_wrong_and_changed_cells_differ_in_more_than_colour():
    """A frame, an underline, dots on a path and a mark in text are seen without colours, and in print."""
    sudoku, maze = traces()["sudoku"], traces()["maze"]
    drawing = board_at(sudoku, 1, label="x", side=132)
    assert cells_of_class(drawing, "mark", 130 / 4) == sudoku.wrong(1).sum() == 1
    assert drawing.count('class="underline"') and not board_at(sudoku, 3, label="x").count('class="underline"')
    assert not board_at(sudoku, 1, label="x", changes=False).count('class="underline"')
    assert board_at(maze, 3, label="x").count("<circle") == (SOLVED == PATH).sum()
    for styled in (False, True):
        text = grid_text(sudoku.kind.drawing, sudoku.grid(1), wrong=sudoku.wrong(1), styled=styled).plain
        assert "| 3!2 | 3 4 |" in text


def test_as_much_of_an_arc_canvas_is_drawn_as_is_used():
    canvas = np.zeros((30, 30), np.uint8)
    canvas[1:4, 2:9] = 5
    assert ArcKind().fitted([canvas.ravel(), np.zeros((3, 900), np.uint8)]) == ArcKind(4, 9)
    assert ArcKind().fitted([np.zeros(900, np.uint8)]) == ArcKind(1, 1)
    assert ArcKind(4, 9).values(canvas.ravel()[None]).shape == (1, 36)


def test_progress_is_for_terminals(capsys):
    with progress("counting") as advance, progress_of() as advance_of:
        advance(1, 2)
        advance_of("other work", 3, 0)
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""
