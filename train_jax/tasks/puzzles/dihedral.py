"""The eight ways to turn a square grid, by the numbers that the published code gives them."""

from functools import lru_cache

import numpy as np
from jaxtyping import Integer, Shaped

TURNS = np.array(
    [(0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)], bool
)  # fmt: skip
"""By number: whether the grid is transposed, then its rows reversed, then its columns reversed."""


def turned(grid: Shaped[np.ndarray, "... rows cols"], turn: int) -> Shaped[np.ndarray, "..."]:
    """A view of a grid, or of many, under a turn."""
    transposed, rows_reversed, cols_reversed = TURNS[turn]
    grid = grid.swapaxes(-1, -2) if transposed else grid
    return grid[..., :: -1 if rows_reversed else 1, :: -1 if cols_reversed else 1]


@lru_cache
def cell_orders(size: int) -> Integer[np.ndarray, "8 cells"]:
    """`grid[cell_orders(size)[turn]]` is a square grid, given cell by cell, under that turn."""
    cells = np.arange(size**2).reshape(size, size)
    return np.stack([turned(cells, turn).ravel() for turn in range(len(TURNS))])
