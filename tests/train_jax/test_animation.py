"""ACT steps as a GIF (against a decoder written from the standard) and as a page; boards of every kind as SVG."""

import re
import struct
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from train_jax.puzzles.maze import GOAL, OPEN, PATH, START, WALL
from train_jax.puzzles.sudoku import GEOMETRIES
from train_jax.report.arc_look import ArcLook, arc_look_of
from train_jax.report.boards import board, board_at
from train_jax.report.gif import gif
from train_jax.report.look import CELLS
from train_jax.report.looks import Look
from train_jax.report.maze_look import MazeLook
from train_jax.report.pixels import CAPTION, COLOUR_OF, MARGIN, animation, caption, frame
from train_jax.report.player import player
from train_jax.report.sudoku_look import SudokuLook
from train_jax.report.terminal import drawn
from train_jax.report.trace import Trace

SUDOKU = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1], np.uint8)
MAZE = np.full(25, WALL, np.uint8)
MAZE[[0, 1, 2, 7, 12]] = START, OPEN, OPEN, OPEN, GOAL
SOLVED = np.where(MAZE == OPEN, PATH, MAZE)
ARC = np.array([2, 3, 11, 1, 4, 5, 6, 1, 1, 1, 1, 0], np.uint8)


def traces() -> dict[str, Trace]:
    question = np.where(np.arange(16) % 2, SUDOKU, 0).astype(np.uint8)
    wrong = np.where(np.arange(16) == 0, 3, SUDOKU).astype(np.uint8)
    logits = np.array([-2.0, 0.5, 2.0])
    gap = np.where(np.arange(25) == 2, OPEN, SOLVED)
    other = np.where(np.arange(12) == 4, 9, ARC)
    return {
        "sudoku": Trace(SudokuLook(GEOMETRIES[4]), question, np.array([wrong, SUDOKU, SUDOKU]), logits, SUDOKU),
        "maze": Trace(MazeLook(5), MAZE, np.array([gap, SOLVED, SOLVED]), logits, SOLVED),
        "arc": Trace(ArcLook(3, 4), ARC[::-1].copy(), np.array([other, ARC, ARC]), logits, ARC),
        "unknown": Trace(MazeLook(5), MAZE, np.array([gap, SOLVED]), logits[:2]),
    }


def decoded(data: bytes) -> tuple[list[np.ndarray], list[tuple[int, int, int]], list[int]]:
    """Frames, palette and delays in hundredths of a second, read as the standard says."""
    assert data[:6] == b"GIF89a"
    width, height, packed = struct.unpack("<HHB", data[6:11])
    assert packed & 0x80
    size = 2 ** ((packed & 7) + 1)
    palette = [tuple(data[13 + 3 * i : 16 + 3 * i]) for i in range(size)]
    at, frames, delays = 13 + 3 * size, [], []
    while data[at] != 0x3B:
        if data[at] == 0x21:
            if data[at + 1] == 0xF9:
                delays.append(struct.unpack("<H", data[at + 4 : at + 6])[0])
            at += 2
            while data[at]:
                at += 1 + data[at]
            at += 1
        else:
            assert data[at] == 0x2C
            assert struct.unpack("<HHHHB", data[at + 1 : at + 10]) == (0, 0, width, height, 0)
            bits, at, blocks = data[at + 10], at + 11, b""
            while data[at]:
                blocks += data[at + 1 : at + 1 + data[at]]
                at += 1 + data[at]
            at += 1
            frames.append(np.frombuffer(unpacked(blocks, bits), np.uint8).reshape(height, width))
    assert at == len(data) - 1
    return frames, palette, delays


def unpacked(data: bytes, bits: int) -> bytes:
    """Lempel-Ziv-Welch with a table of whole strings."""
    stream = int.from_bytes(data, "little")
    clear, end = 1 << bits, (1 << bits) + 1
    out, table, width, before = b"", [], bits + 1, b""
    while True:
        code, stream = stream & (1 << width) - 1, stream >> width
        if code == clear:
            table, width, before = [bytes([i]) for i in range(clear)] + [b"", b""], bits + 1, b""
            continue
        if code == end:
            assert stream < 256
            return out
        assert code < len(table) or (code == len(table) and before)
        entry = table[code] if code < len(table) else before + before[:1]
        out += entry
        if before and len(table) < 4096:
            table.append(before + entry[:1])
            if len(table) == 1 << width and width < 12:
                width += 1
        before = entry


@pytest.mark.parametrize("colours", [2, 3, 4, 7, 20, 256])
@pytest.mark.parametrize("pattern", ["flat", "noise", "stripes"])
def test_a_gif_decodes_to_its_frames(colours, pattern):
    rng = np.random.default_rng(0)
    shape = (61, 47)
    frames = {
        "flat": [np.full(shape, value % colours, np.uint8) for value in (0, 1)],
        "noise": [rng.integers(0, colours, shape).astype(np.uint8) for _ in range(2)],
        "stripes": [np.tile(np.arange(47) % colours, (61, 1)).astype(np.uint8)],
    }[pattern]
    palette = [(i, 255 - i, i // 2) for i in range(colours)]
    found, table, delays = decoded(gif(frames, palette, [100 * (i + 1) for i in range(len(frames))]))
    assert len(found) == len(frames) and all((one == other).all() for one, other in zip(found, frames, strict=True))
    assert table[:colours] == palette
    assert delays == [10 * (i + 1) for i in range(len(frames))]


def test_a_long_noise_fills_the_table_more_than_once():
    rng = np.random.default_rng(1)
    picture = rng.integers(0, 200, (300, 300)).astype(np.uint8)
    found, _, _ = decoded(gif([picture], [(i, i, i) for i in range(200)], [50]))
    assert (found[0] == picture).all()


@pytest.mark.parametrize("name", traces())
def test_every_step_is_a_frame(name):
    trace = traces()[name]
    frames, palette, delays = decoded(animation(trace))
    assert len(frames) == trace.act_steps + 1
    assert delays[-1] > delays[0] > 0
    for step, found in enumerate(frames):
        assert (found == frame(trace, step)).all()
    assert palette[0] == (255, 255, 255)
    assert palette[COLOUR_OF["arc1"]] == tuple(bytes.fromhex(CELLS["arc1"].light[1:]))


def middle(trace: Trace, picture: np.ndarray, cell: int) -> int:
    """The pixel near the upper left of a cell, away from rules, marks and letters."""
    look = trace.look
    side = (picture.shape[0] - 2 * MARGIN - CAPTION) // look.rows
    row, col = divmod(cell, look.cols)
    return int(picture[MARGIN + row * side + 4, MARGIN + col * side + 4])


def test_frames_show_walls_paths_colours_and_what_is_wrong():
    maze = traces()["maze"]
    first, last = frame(maze, 1), frame(maze, 3)
    assert middle(maze, last, 5) == COLOUR_OF["wall"] and middle(maze, last, 2) == COLOUR_OF["path"]
    assert middle(maze, last, 0) == COLOUR_OF["end"] and middle(maze, first, 2) == COLOUR_OF["paper"]
    assert (first == COLOUR_OF["wrong"]).any() and not (last == COLOUR_OF["wrong"]).any()
    arc = traces()["arc"]
    assert middle(arc, frame(arc, 3), 2) == COLOUR_OF["arc9"]
    sudoku = traces()["sudoku"]
    assert middle(sudoku, frame(sudoku, 1), 0) == COLOUR_OF["wrong-tint"]
    assert caption(sudoku, 1) == "STEP 1  1 WRONG  HALT 0.12"
    assert not (frame(traces()["unknown"], 1) == COLOUR_OF["wrong"]).any()


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


@pytest.mark.parametrize("name", traces())
def test_boards_are_drawn_inside_their_frame(name):
    trace = traces()[name]
    for step in range(trace.act_steps + 1):
        root = ElementTree.fromstring(board_at(trace, step, label="x"))
        width, height = float(root.get("width", "0")), float(root.get("height", "0"))
        assert abs(max(width, height) - 132) < 0.1
        for each in root.iter():
            if each.tag.endswith("rect"):
                x, y, w, h = (float(each.get(key, "nan")) for key in ("x", "y", "width", "height"))
                assert x >= 0 and x + w <= width + 0.1 and y >= 0 and y + h <= height + 0.1


def cells_of_class(drawing: str, kind: str, cell: float) -> int:
    """How many cells the rectangles of a class cover."""
    root = ElementTree.fromstring(drawing)
    widths = [float(each.get("width", "0")) for each in root.iter() if each.get("class") == kind]
    return round(sum(max(1, round(width / cell)) for width in widths))


def test_boards_show_every_wall_path_and_colour():
    trace = traces()["maze"]
    drawing, cell = board_at(trace, 1, label="x"), 130 / 5
    assert cells_of_class(drawing, "wall", cell) == 20
    assert cells_of_class(drawing, "path", cell) == 2
    assert cells_of_class(drawing, "mark", cell) == 1
    arc = board(ArcLook(3, 4), ARC, label="x")
    assert [cells_of_class(arc, f"arc{i}", 130 / 4) for i in range(10)] == [1, 1, 1, 1, 1, 0, 0, 0, 0, 1]


def test_text_shows_every_kind_with_and_without_colours():
    looks: list[tuple[Look, np.ndarray, list[str]]] = [
        (SudokuLook(GEOMETRIES[4]), SUDOKU, ["+-----+-----+", "| 1 2 | 3 4 |"]),
        (MazeLook(5), SOLVED, ["S o o # # ", "# # o # # "]),
        (ArcLook(3, 4), ARC, ["0 1 9 . ", "2 3 4 . "]),
    ]
    for look, grid, expected in looks:
        assert drawn(look, grid)[:2] == expected
        styled = drawn(look, grid, styled=True)
        visible = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in styled]
        assert [len(line) for line in visible] == [len(line) for line in drawn(look, grid)]
    assert f"\x1b[48;5;{CELLS['wall'].ansi}m" in drawn(MazeLook(5), SOLVED, styled=True)[1]


def test_as_much_of_an_arc_canvas_is_drawn_as_is_used():
    canvas = np.zeros((30, 30), np.uint8)
    canvas[1:4, 2:9] = 5
    assert arc_look_of([canvas.ravel(), np.zeros((3, 900), np.uint8)]) == ArcLook(4, 9)
    assert arc_look_of([np.zeros(900, np.uint8)]) == ArcLook(1, 1)
    assert ArcLook(4, 9).values(canvas.ravel()[None]).shape == (1, 36)
