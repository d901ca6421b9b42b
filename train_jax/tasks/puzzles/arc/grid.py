"""ARC puzzles: grids of ten colours, up to 30x30, and their tokens on a 30x30 canvas.

A grid can be placed anywhere on the canvas. The row below it and the column to its right contain an end token next to
each of its border cells, as far as the canvas extends; everything else is padding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8

SIDE = 30
"""Rows and columns of the canvas, and their maximum for a grid."""
CELLS = SIDE * SIDE
COLOURS = 10

PAD_TOKEN, END_TOKEN, FIRST_COLOUR_TOKEN = 0, 1, 2
VOCAB_SIZE = FIRST_COLOUR_TOKEN + COLOURS

Grid = UInt8[np.ndarray, "rows cols"]

UNKNOWN: Grid = np.zeros((1, 1), np.uint8)
"""Placeholder for the output of a test example whose solution is not public; compare with `is`."""


class Example(NamedTuple):
    input: Grid
    output: Grid


@dataclass(frozen=True, eq=False)
class Puzzle:
    """An ARC task: its name, and its examples in the sections "train" (demonstrations) and "test"."""

    name: str
    sections: dict[str, list[Example]]
    """In the order of the file, which determines the order of the examples in a data set."""

    @property
    def examples(self) -> list[Example]:
        return [example for section in self.sections.values() for example in section]


def sizes_of(
    tokens: Integer[np.ndarray, "n 900"],
) -> tuple[Integer[np.ndarray, "n"], Integer[np.ndarray, "n"]]:
    """Returns the rows and columns of the largest rectangle of colours in the upper left corner; 0 and 0 for none.

    End tokens are not read, so a prediction with misplaced end tokens still has a size. Among rectangles of equal
    area the one with the fewest rows is chosen, as in the published scoring.
    """
    is_colour = ((tokens >= FIRST_COLOUR_TOKEN) & (tokens < VOCAB_SIZE)).reshape(-1, SIDE, SIDE)
    reach = np.where(is_colour.all(axis=2), SIDE, is_colour.argmin(axis=2))
    cols = np.minimum.accumulate(reach, axis=1)
    best = (cols * np.arange(1, SIDE + 1)).argmax(axis=1)
    cols = np.take_along_axis(cols, best[:, None], axis=1)[:, 0]
    return np.where(cols > 0, best + 1, 0), cols
