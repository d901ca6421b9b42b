"""The eight rotations and reflections of a square grid ("turns"), numbered as in the published code."""

from functools import lru_cache

import numpy as np
from jaxtyping import Integer, Shaped

TURNS = np.array(
    [(0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)], bool
)  # fmt: skip
"""For each turn: whether the grid is transposed, whether its rows are then reversed, whether its columns are."""


def turned(grid: Shaped[np.ndarray, "... rows cols"], turn: int) -> Shaped[np.ndarray, "..."]:
    """Returns a view of one or more grids under a turn."""
    transposed, rows_reversed, cols_reversed = TURNS[turn]
    grid = grid.swapaxes(-1, -2) if transposed else grid
    return grid[..., :: -1 if rows_reversed else 1, :: -1 if cols_reversed else 1]


@lru_cache
def cell_orders(size: int) -> Integer[np.ndarray, "8 cells"]:
    """Returns index arrays: `grid[cell_orders(size)[turn]]` is a flat square grid under that turn."""
    cells = np.arange(size**2).reshape(size, size)
    return np.stack([turned(cells, turn).ravel() for turn in range(len(TURNS))])
