"""Plots and boards: every value in its place, read without colour, in the colours of a light or dark page."""

import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from train_jax.puzzles.arc.grid import canvas_of
from train_jax.puzzles.arc.kind import ArcKind
from train_jax.puzzles.boards import board, board_at, caption, strip
from train_jax.puzzles.kind import Kind
from train_jax.puzzles.kinds import Trace, trace_of
from train_jax.puzzles.maze.grid import GOAL, OPEN, PATH, START, WALL
from train_jax.puzzles.maze.kind import MazeKind
from train_jax.puzzles.page import chosen_steps
from train_jax.puzzles.sudoku.grid import GEOMETRIES
from train_jax.puzzles.sudoku.kind import SudokuKind
from train_jax.puzzles.terminal import as_text, grid_text
from train_jax.report.plots import Band, Series, plot
from train_jax.report.render import CELLS, number, spelled


def drawn(*series: Series, **options) -> ElementTree.Element:
    return ElementTree.fromstring(plot(series, title="t", x_label="x", **options))


def group(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return next(each for each in root.findall(".//{*}g") if each.get("class") == name)


def ticks(root: ElementTree.Element) -> list[str]:
    """Returns the labels of the y axis, from below."""
    return [each.text or "" for each in root.findall(".//{*}text") if "text-anchor: end" in each.get("style", "")][:-1]


def heights(path: ElementTree.Element) -> list[float]:
    return [float(y) for y in re.findall(r"[ML] [\d.]+ (-?[\d.]+)", path.get("d", ""))]


@pytest.mark.parametrize(
    ("low", "high", "log_y", "expected"),
    [
        (0, 100, False, "0 20 40 60 80 100"),
        (0.0031, 0.0094, False, "2e-3 4e-3 6e-3 8e-3 0.01"),
        (3.0, 3.1, False, "3 3.05 3.1"),
        (5, 5, False, "0 2 4 6 8 10"),
        (0.07, 1.6, True, "0.05 0.1 0.2 0.5 1 2"),
        (1e-9, 1e9, True, "1e-9 1e-6 1e-3 1 1,000 1e6 1e9"),
        (3.0, 3.1, True, "2 5"),
        (5, 5, True, "2 5 10"),
    ],
)
def test_ticks_are_round_and_cover_the_data(low, high, log_y, expected):
    assert ticks(drawn(Series("a", [(1, low), (2, high)]), log_y=log_y)) == expected.split()
    assert [number(x) for x in (0.3, 12_000, 1e-4, 1.2e-3, 2e7)] == ["0.3", "12,000", "1e-4", "1.2e-3", "2e7"]
    assert [spelled(x) for x in (47.2, 224, 7500)] == ["47 s", "3 min 44 s", "2 h 5 min"]


def test_a_band_lies_behind_the_lines_and_inside_the_axes():
    band = Band("<b>", [(0, 1, 4), (10, 2, 6)])
    drawing = plot([Series("a", [(0, 2), (10, 3)])], band=band, title="t", x_label="x")
    assert drawing.index('class="band"') < drawing.rindex("var(--s1)")
    assert "&lt;b&gt;" in drawing and "<b>" not in drawing
    outline = group(ElementTree.fromstring(drawing), "band")
    bottom = float(outline.findall(".//{*}use")[0].get("y", "nan"))
    high_left, low_left, low_right, high_right = (bottom + y for y in heights(outline.findall(".//{*}path")[0])[:4])
    assert 212 >= low_left > low_right > high_left > high_right >= 42


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("values", [[1.0], [0.5, 0.5, 0.5], [0.0, 0.0], [1.0, math.nan, 2.0], [1.0, math.inf, -1.0]])
def test_every_curve_can_be_drawn(values, log_y):
    points = list(enumerate(values, 1))
    drawing = plot([Series("a", points, marks=True)], title="t", x_label="x", log_y=log_y)
    if not drawing:
        assert log_y and max(values) == 0
        return
    root = ElementTree.fromstring(drawing)
    coordinates = [value for each in root.iter() for name, value in each.items() if name in ("x", "y")]
    assert all(math.isfinite(float(value)) for value in coordinates)
    assert "nan" not in drawing and "inf" not in drawing
    finite = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not log_y)]
    titles = [each.findtext("{*}title") for each in group(root, "points-0").findall(".//{*}use")]
    assert titles == [f"a: {number(y)} at {x} x" for x, y in finite]


def marks(root: ElementTree.Element) -> list[float]:
    """Returns the horizontal places of the markers of the first series."""
    return [float(each.get("x", "nan")) for each in group(root, "points-0").findall(".//{*}use")]


def test_a_logarithmic_axis_has_equal_steps_for_equal_ratios():
    first, second, third = marks(drawn(Series("a", [(10, 1), (100, 2), (1000, 3)]), log_x=True))
    assert second - first == pytest.approx(third - second, abs=0.2)
    near = plot([Series("a", [(20, 1), (30, 2)])], title="t", x_label="x", log_x=True)
    assert ">20<" in near and ">30<" in near, "between powers of ten, the values themselves are ticks"


# ---- traces of ACT steps and boards


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
    inputs = traces()["sudoku"].inputs
    answers = np.array([swapped, SUDOKU, SUDOKU, swapped])
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
    shown = ["ACT step 12 wrong", "ACT steps 2\u20133correct", "ACT step 42 wrong"]
    assert captions == ["input", *(f"{each} · halt 0.50" for each in shown), "solution"]
    assert [caption(traces()["sudoku"], step) for step in (0, 2)] == ["input", "ACT step 2, halt 0.62"]
    assert caption(traces()["unknown"], 1) == "ACT step 1, halt 0.12"
    # A valid grid that overwrites a given is no solution of this puzzle.
    inputs = np.roll(SUDOKU, 1) * (np.arange(16) == 5)
    assert Trace(trace.kind, inputs, SUDOKU[None], np.zeros(1)).mistakes(1)


def test_as_much_of_an_arc_canvas_is_compared_and_drawn_as_is_used():
    canvas = np.zeros((30, 30), np.uint8)
    canvas[1:4, 2:9] = 5
    assert ArcKind().fitted([canvas.ravel(), np.zeros((3, 900), np.uint8)]) == ArcKind(4, 9)
    assert ArcKind().fitted([np.zeros(900, np.uint8)]) == ArcKind(1, 1)
    assert ArcKind(4, 9).values(canvas.ravel()[None]).shape == (1, 36)
    solution = canvas_of(np.array([[6, 6, 6], [6, 6, 6]], np.uint8))
    noise = np.where(solution == 0, 7, solution).astype(np.uint8)
    trace = trace_of(ArcKind(), solution, np.array([noise]), np.zeros(1), solution)
    assert (trace.kind.drawing.rows, trace.kind.drawing.cols) == (3, 4)
    assert not trace.wrong(1).any() and trace.mistakes(1) == []
    noise[1] = 9
    assert trace_of(ArcKind(), solution, np.array([noise]), np.zeros(1), solution).wrong(1).sum() == 1


def cells_of_class(drawing: str, kind: str, cell: float) -> int:
    """Returns how many cells the rectangles of a class cover."""
    root = ElementTree.fromstring(drawing)
    widths = [float(each.get("width", "0")) for each in root.iter() if each.get("class") == kind]
    return round(sum(max(1, round(width / cell)) for width in widths))


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


def test_boards_show_every_cell_and_wrong_and_changed_ones_differ_in_more_than_colour():
    """A frame, an underline, dots on a path and a mark in text are seen without colours, and in print."""
    sudoku = traces()["sudoku"]
    maze = traces()["maze"]
    drawn = board_at(maze, 1, label="x", side=132)
    cell = 130 / 5
    assert [cells_of_class(drawn, name, cell) for name in ("wall", "path", "mark")] == [20, 2, 1]
    arc = board(ArcKind(3, 4).drawing, ARC, label="x", side=132)
    assert [cells_of_class(arc, f"arc{i}", 130 / 4) for i in range(10)] == [1, 1, 1, 1, 1, 0, 0, 0, 0, 1]
    drawing = board_at(sudoku, 1, label="x", side=132)
    assert cells_of_class(drawing, "mark", 130 / 4) == sudoku.wrong(1).sum() == 1
    assert cells_of_class(drawing, "changed", 130 / 4) == sudoku.changed(1).sum() - 1 == 7
    assert drawing.count('class="underline"') and not board_at(sudoku, 3, label="x").count('class="underline"')
    assert not board_at(sudoku, 1, label="x", changes=False).count('class="underline"')
    assert board_at(maze, 3, label="x").count("<circle") == (SOLVED == PATH).sum()
    for styled in (False, True):
        text = grid_text(sudoku.kind.drawing, sudoku.grid(1), wrong=sudoku.wrong(1), styled=styled).plain
        assert "| 3!2 | 3 4 |" in text
