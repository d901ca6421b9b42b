"""Places ARC grids on the 30x30 canvas, renders them as tokens, and reads a grid back from a canvas."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8

from train_jax.tasks.puzzles.arc.grid import (
    CELLS,
    END_TOKEN,
    FIRST_COLOUR_TOKEN,
    PAD_TOKEN,
    SIDE,
    UNKNOWN,
    VOCAB_SIZE,
    Example,
    Grid,
)
from train_jax.tasks.puzzles.arc.symmetry import ORIGINAL, Symmetries
from train_jax.tasks.puzzles.dihedral import TURNS, turned


class Places(NamedTuple):
    """Offsets of the grids from the top left corner of the canvas; input and output of an example share them."""

    top: Integer[np.ndarray, "puzzles examples"]
    left: Integer[np.ndarray, "puzzles examples"]


def place_as_published(examples: Sequence[Example], rng: np.random.RandomState) -> Places:
    """Places the examples like the published builder.

    One random example stays in the upper left corner. The others are placed uniformly where both of their grids fit.
    """
    places = np.zeros((2, 1, len(examples)), np.intp)
    staying = rng.randint(0, len(examples))
    for number, example in enumerate(examples):
        if number != staying:
            for axis in range(2):
                places[axis, 0, number] = rng.randint(0, SIDE - max(grid.shape[axis] for grid in example) + 1)
    return Places(*places)


def place(examples: Sequence[Example], turns: UInt8[np.ndarray, "n"], rng: np.random.Generator) -> Places:
    """Places each of `n` transformed copies of a puzzle by the rule of `place_as_published`."""
    transposed = TURNS[turns, 0]
    largest = np.array([[max(grid.shape[axis] for grid in example) for example in examples] for axis in range(2)])
    moving = np.arange(len(examples)) != rng.integers(len(examples), size=(len(turns), 1))
    sizes = np.where(transposed[None, :, None], largest[::-1, None], largest[:, None])
    return Places(*(rng.integers(SIDE - sizes + 1) * moving))


def placements(grids: Sequence[Grid]) -> UInt8[np.ndarray, "grids 31 31 30 30"]:
    """Returns a view of every canvas: `[i, SIDE - top, SIDE - left]` is the canvas with grid i at (`top`, `left`).

    The grid is complete only if `top + rows <= SIDE` and `left + cols <= SIDE`.
    """
    around = np.full((len(grids), 2 * SIDE, 2 * SIDE), PAD_TOKEN, np.uint8)
    for corner, grid in zip(around[:, SIDE:, SIDE:], grids, strict=True):
        rows, cols = grid.shape
        corner[:rows, :cols] = grid + FIRST_COLOUR_TOKEN
        corner[rows : rows + 1, :cols] = END_TOKEN
        corner[:rows, cols : cols + 1] = END_TOKEN
    return np.lib.stride_tricks.sliding_window_view(around, (SIDE, SIDE), axis=(1, 2))


def render(grids: Sequence[Grid], symmetries: Symmetries, places: Places) -> UInt8[np.ndarray, "puzzles*grids 900"]:
    """Renders every grid under every symmetry at its place, as tokens; the rows of a puzzle are consecutive."""
    count = len(symmetries.turns)
    tokens = np.empty((count, len(grids), CELLS), np.uint8)
    palettes = np.empty((count, VOCAB_SIZE), np.uint8)
    palettes[:, [PAD_TOKEN, END_TOKEN]] = PAD_TOKEN, END_TOKEN
    palettes[:, FIRST_COLOUR_TOKEN:] = symmetries.colours + FIRST_COLOUR_TOKEN
    own_palette = (np.arange(count, dtype=np.int32) * VOCAB_SIZE)[:, None]
    turns, which = np.unique(symmetries.turns, return_inverse=True)
    for number, grid in enumerate(grids):
        canvases = placements([turned(grid, turn) for turn in turns])
        canvas = canvases[which, SIDE - places.top[:, number], SIDE - places.left[:, number]].reshape(count, CELLS)
        # `take` with one flat index is three times as fast as indexing with two arrays.
        palettes.ravel().take(canvas + own_palette, mode="clip", out=tokens[:, number])
    return tokens.reshape(-1, CELLS)


def canvas_of(grid: Grid) -> UInt8[np.ndarray, "900"]:
    """Renders one grid in the upper left corner, where the grids of test examples are placed."""
    return render([grid], ORIGINAL, Places(*np.zeros((2, 1, 1), np.intp)))[0]


def grid_on(canvas: Integer[np.ndarray, "900"]) -> Grid:
    """Returns the bounding box of the coloured cells, or `UNKNOWN` if the canvas has none."""
    canvas = canvas.reshape(SIDE, SIDE)
    rows, cols = (np.flatnonzero((canvas >= FIRST_COLOUR_TOKEN).any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return UNKNOWN
    grid = canvas[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1].astype(np.uint8)
    return np.maximum(grid, FIRST_COLOUR_TOKEN) - np.uint8(FIRST_COLOUR_TOKEN)
