"""ACT steps as an animated page; boards of every kind as SVG."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from train_jax.report.boards import board, board_at, caption, player
from train_jax.report.render import CELLS
from train_jax.report.terminal import as_text, grid_text, progress, progress_of
from train_jax.tasks.puzzles.arc.kind import ArcKind
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.kinds import Trace
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
    other = np.where(np.arange(12) == 4, 9, ARC)
    return {
        "sudoku": Trace(SudokuKind(GEOMETRIES[4]), inputs, np.array([wrong, SUDOKU, SUDOKU]), logits, SUDOKU),
        "maze": Trace(MazeKind(5), MAZE, np.array([gap, SOLVED, SOLVED]), logits, SOLVED),
        "arc": Trace(ArcKind(3, 4), ARC[::-1].copy(), np.array([other, ARC, ARC]), logits, ARC),
        "unknown": Trace(MazeKind(5), MAZE, np.array([gap, SOLVED]), logits[:2]),
    }


@pytest.mark.parametrize("name", traces())
def test_the_page_plays_every_step_without_a_script(name):
    trace = traces()[name]
    page = player(trace, title="<b>a & b</b>", verdict="done <i>")
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    body = page[page.index("<body>") :].replace("</html>", "").replace("<br>", "<br/>")
    root = ElementTree.fromstring(body)
    shown = [each for each in root.iter("figure") if each.get("style")]
    assert len(shown) == trace.act_steps + 1
    delays = [float(re.findall(r"delay: (-[\d.]+)s", each.get("style") or "")[0]) for each in shown]
    assert np.allclose(np.diff(delays), 0.6) and delays[0] == -float(re.findall(r"--whole: ([\d.]+)s", page)[0])
    assert root.findtext(".//h1") == "<b>a & b</b>" and root.findtext(".//p") == "done <i>"
    assert shown[1].findtext("figcaption") == caption(trace, 1)


def test_the_caption_says_what_is_wrong():
    assert [caption(traces()["sudoku"], step) for step in (0, 1, 2)] == [
        "input", "ACT step 1, 1 wrong, halt 0.12", "ACT step 2, halt 0.62",
    ]  # fmt: skip
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
