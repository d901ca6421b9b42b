"""Symmetries of puzzles: 64-bit hashes, the turns of a square, and random symmetries per batch."""

from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Integer, Shaped, UInt64

from train_jax.errors import UserError
from train_jax.puzzles.kind import Transform, Words
from train_jax.puzzles.kinds import describe, kind_of
from train_jax.puzzles.metadata import Metadata


def mix(x: UInt64[np.ndarray, "..."], *, kind: int = 0) -> UInt64[np.ndarray, "..."]:
    """Applies the finaliser of SplitMix64, a bijection of 64-bit integers; every `kind` is a different one.

    References: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = x + np.uint64((0x9E3779B97F4A7C15 * (kind + 1)) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def first_of_each(values: UInt64[np.ndarray, "n"], *, known: UInt64[np.ndarray, "m"]) -> Bool[np.ndarray, "n"]:
    """Returns a mask of the values that are neither in `known` nor equal to an earlier value."""
    keep = np.zeros(len(values), bool)
    keep[np.unique(values, return_index=True)[1]] = True
    return keep & ~np.isin(values, known)


TURNS = np.array(
    [(0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)], bool
)  # fmt: skip
"""Flags of each turn: transpose the grid, then reverse its rows, then reverse its columns."""


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


def transform_for(data: Metadata, name: str = "the data set") -> Transform:
    """Returns the transformation of examples of this kind. Raises `UserError` for a kind without one."""
    if data.ignore_label_id not in (None, 0):
        raise UserError(
            f"--augment: {name} ignores label {data.ignore_label_id}, expected 0, which no symmetry changes; omit "
            "--augment or build the data set with `trm build-data`"
        )
    kind = kind_of(data)
    transform = None if kind is None else kind.transform
    if transform is None:
        raise UserError(
            f"--augment: {name} contains {describe(data)}, expected Sudokus or mazes; omit --augment "
            "(`trm build-data arc --num-aug` stores augmented ARC puzzles)"
        )
    return transform


def words_for(seed: int, step: int, rows: slice) -> Words:
    """Returns random bits for these rows of the global batch of `step`; they do not depend on the other rows."""
    start = np.zeros(1, np.uint64)
    for number in (seed, step):
        start = mix(start ^ np.uint64(number % 2**64))
    counts = np.arange(2 * rows.start, 2 * rows.stop, dtype=np.uint64)
    return mix(mix(start + counts), kind=1).reshape(-1, 2).T
