"""What an ARC puzzle is: grids of ten colours, up to 30x30, and how they lie as tokens on a 30x30 canvas.

A grid lies anywhere on the canvas. The row below it and the column to its right hold an end token next to each of its
cells, where the canvas still has room; everything else is padding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8

SIDE = 30
"""Rows and columns of the canvas, and the most that a grid may have."""
CELLS = SIDE * SIDE
COLOURS = 10

PAD_TOKEN, END_TOKEN, FIRST_COLOUR_TOKEN = 0, 1, 2
VOCAB_SIZE = FIRST_COLOUR_TOKEN + COLOURS

Grid = UInt8[np.ndarray, "rows cols"]

UNKNOWN: Grid = np.zeros((1, 1), np.uint8)
"""Stands for the output of a test example whose solution is not public; compare with `is`."""


class Example(NamedTuple):
    input: Grid
    output: Grid


@dataclass(frozen=True, eq=False)
class Puzzle:
    """A task: what it is called, and its examples under "train" (demonstrations) and "test"."""

    name: str
    sections: dict[str, list[Example]]
    """In the order of the file, which decides the order of the examples in a data set."""

    @property
    def examples(self) -> list[Example]:
        return [example for section in self.sections.values() for example in section]


def sizes_of(
    tokens: Integer[np.ndarray, "n 900"],
) -> tuple[Integer[np.ndarray, "n"], Integer[np.ndarray, "n"]]:
    """Rows and columns of the largest rectangle of colours in the upper left corner; 0 and 0 where there is none.

    So a prediction is read whose end tokens are not in line. Of equally large ones the flattest counts, as published.
    """
    is_colour = ((tokens >= FIRST_COLOUR_TOKEN) & (tokens < VOCAB_SIZE)).reshape(-1, SIDE, SIDE)
    reach = np.where(is_colour.all(axis=2), SIDE, is_colour.argmin(axis=2))
    cols = np.minimum.accumulate(reach, axis=1)
    best = (cols * np.arange(1, SIDE + 1)).argmax(axis=1)
    cols = np.take_along_axis(cols, best[:, None], axis=1)[:, 0]
    return np.where(cols > 0, best + 1, 0), cols
