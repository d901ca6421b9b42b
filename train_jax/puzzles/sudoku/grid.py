"""Sudokus: geometry, rules, text and tokens.

In this package a grid is an array of `size * size` digits in row-major order, with 0 for an empty cell.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Integer, UInt8

from train_jax.errors import UserError


@dataclass(frozen=True)
class Geometry:
    """The geometry of a Sudoku with boxes of `box_rows` x `box_cols` cells; its size is `box_rows * box_cols`.

    A band is a row of boxes, a stack is a column of boxes.
    """

    box_rows: int
    box_cols: int

    @property
    def size(self) -> int:
        return self.box_rows * self.box_cols

    @property
    def cells(self) -> int:
        return self.size**2

    @property
    def has_square_boxes(self) -> bool:
        """Returns True if transposing a grid gives a Sudoku again."""
        return self.box_rows == self.box_cols

    @property
    def vocab_size(self) -> int:
        """Number of tokens: padding, the empty cell and one token for every digit."""
        return self.size + 2

    @cached_property
    def row_of(self) -> Integer[np.ndarray, "cells"]:
        return np.arange(self.cells) // self.size

    @cached_property
    def col_of(self) -> Integer[np.ndarray, "cells"]:
        return np.arange(self.cells) % self.size

    @cached_property
    def box_of(self) -> Integer[np.ndarray, "cells"]:
        return self.row_of // self.box_rows * self.box_rows + self.col_of // self.box_cols

    @cached_property
    def units(self) -> Integer[np.ndarray, "units size"]:
        """The cells of every row, then of every column, then of every box."""
        kinds = [np.argsort(kind, kind="stable") for kind in (self.row_of, self.col_of, self.box_of)]
        return np.concatenate([kind.reshape(self.size, self.size) for kind in kinds])

    def unit_name(self, unit: int) -> str:
        return f"{('row', 'column', 'box')[unit // self.size]} {unit % self.size + 1}"

    def __str__(self) -> str:
        return f"{self.size}x{self.size}"


GEOMETRIES = {4: Geometry(2, 2), 6: Geometry(2, 3), 9: Geometry(3, 3)}


def geometry_of_size(size: int) -> Geometry:
    """Returns the geometry of a Sudoku of `size` rows. Raises `UserError` for an unsupported size."""
    if size not in GEOMETRIES:
        raise UserError(f"a Sudoku of size {size} is not supported; use one of {', '.join(map(str, GEOMETRIES))}")
    return GEOMETRIES[size]


def is_solution(grids: UInt8[np.ndarray, "n cells"], geometry: Geometry) -> Bool[np.ndarray, "n"]:
    """Returns a mask of the grids that contain every digit once in every row, column and box."""
    bits = np.uint16(1) << grids.T.astype(np.uint16)
    seen = np.zeros((len(geometry.units), len(grids)), np.uint16)
    for cells in geometry.units.T:
        seen |= bits[cells]
    return (seen == (2 << geometry.size) - 2).all(axis=0)


def tokens_of(grids: UInt8[np.ndarray, "n cells"]) -> UInt8[np.ndarray, "n cells"]:
    """Converts digits to tokens: an empty cell is token 1 and digit d is token d + 1; token 0 is padding."""
    return grids + np.uint8(1)


def grids_of(tokens: Integer[np.ndarray, "n cells"]) -> UInt8[np.ndarray, "n cells"]:
    """Converts tokens to digits; padding, which a model may predict, becomes an empty cell."""
    return (np.maximum(tokens, 1) - 1).astype(np.uint8)


def parse(text: str, trained: Geometry | None = None) -> tuple[UInt8[np.ndarray, "cells"], Geometry]:
    """Parses a grid; its size follows from the number of cells. The error about their number names that of `trained`.

    `.` and `0` are empty cells. White space and the lines between boxes are ignored. Raises `UserError` for other
    characters, for an unsupported number of cells, and for givens that contradict each other.
    """
    cells = [character for character in text if not character.isspace() and character not in "|-+,;"]
    for position, character in enumerate(cells):
        if character not in ".0123456789":
            raise UserError(
                f"{character!r} at cell {position + 1} of the Sudoku is neither a digit nor '.'; "
                "write 1 to 9 for a given and '.' or '0' for an empty cell"
            )
    geometry = next((each for each in GEOMETRIES.values() if each.cells == len(cells)), None)
    if geometry is None:
        sizes = ", ".join(f"{each.cells} ({each})" for each in GEOMETRIES.values())
        expected = f"{trained.cells} ({trained}), as in training" if trained else f"one of {sizes}"
        raise UserError(f"the Sudoku has {len(cells)} cells, expected {expected}; write '.' for an empty cell")
    grid = np.array([int(character.replace(".", "0")) for character in cells], np.uint8)
    if grid.max() > geometry.size:
        raise UserError(f"digit {grid.max()} in a {geometry} Sudoku; use digits 1 to {geometry.size}")
    contradiction = contradiction_in(grid, geometry)
    if contradiction:
        raise UserError(f"the Sudoku has {contradiction}, expected every digit at most once; correct the givens")
    return grid, geometry


def contradiction_in(grid: UInt8[np.ndarray, "cells"], geometry: Geometry) -> str | None:
    """Describes the first violated rule, such as `digit 5 more than once in row 3`; None if there is none."""
    for unit, cells in enumerate(geometry.units):
        digits, counts = np.unique(grid[cells], return_counts=True)
        repeated = digits[(counts > 1) & (digits > 0)]
        if len(repeated):
            return f"digit {repeated[0]} more than once in {geometry.unit_name(unit)}"
    return None
