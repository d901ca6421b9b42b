"""Symmetries drawn on the fly: a training example's own is a pure function of (seed, step, row of the global batch).

They are the symmetries that a data set's stored copies are made with, each equally likely, of Sudokus and of mazes.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from jaxtyping import Integer, UInt8, UInt64

from train_jax.errors import UserError
from train_jax.tasks.puzzles.dihedral import TURNS, turned
from train_jax.tasks.puzzles.format import Metadata
from train_jax.tasks.puzzles.hashing import mix
from train_jax.tasks.puzzles.maze.grid import maze_size_of
from train_jax.tasks.puzzles.sudoku.grid import Geometry, sudoku_of
from train_jax.tasks.puzzles.sudoku.symmetry import Symmetries, axis_orders, moved

FIRST_DIGIT_TOKEN = 2
"""After padding and the empty cell."""

Tokens = UInt8[np.ndarray, "n cells"]
Words = UInt64[np.ndarray, "2 n"]
"""128 random bits for every row."""
Move = Callable[[Tokens, Tokens, Words], tuple[Tokens, Tokens]]
"""Inputs and labels, each row under the symmetry that its words say."""


def move_for(data: Metadata, name: str = "the data set") -> Move:
    """How examples of this kind are moved. Raises `UserError` for a kind that has no symmetries here."""
    geometry, size = sudoku_of(data), maze_size_of(data)
    if data.ignore_label_id not in (None, 0):
        raise UserError(
            f"--augment: {name} ignores label {data.ignore_label_id}, expected 0, which no symmetry moves; leave it "
            "out or build the data set with `trm build-data`"
        )
    if geometry is not None:
        return lambda inputs, labels, words: _sudokus(inputs, labels, words, geometry)
    if size is not None:
        return lambda inputs, labels, words: _mazes(inputs, labels, words, size)
    raise UserError(
        f"--augment: {name} holds {data.seq_len} tokens of {data.vocab_size} kinds, and only Sudokus and mazes have "
        "symmetries that can be drawn on the fly; leave it out (for ARC there is `trm build-data arc --num-aug`)"
    )


def words_for(seed: int, step: int, rows: slice) -> Words:
    """Random bits for these rows of the global batch of `step`, whatever part of it is asked for."""
    start = np.zeros(1, np.uint64)
    for number in (seed, step):
        start = mix(start ^ np.uint64(number % 2**64))
    counts = np.arange(2 * rows.start, 2 * rows.stop, dtype=np.uint64)
    return mix(mix(start + counts), kind=1).reshape(-1, 2).T


def _below(bits: UInt64[np.ndarray, "n"], end: int) -> Integer[np.ndarray, "n"]:
    """A number below `end` from 32 random bits, by their share of all; no value is off by more than `end / 2**32`."""
    return ((bits * np.uint64(end)) >> np.uint64(32)).astype(np.intp)


def _sudokus(inputs: Tokens, labels: Tokens, words: Words, geometry: Geometry) -> tuple[Tokens, Tokens]:
    lines, names = words
    high, low = np.uint64(32), np.uint64(2**32 - 1)
    row_orders, col_orders = axis_orders(geometry)
    digits = digit_orders(geometry.size)
    symmetries = Symmetries(
        _below(lines >> high, len(row_orders)),
        _below(lines & low, len(col_orders)),
        (names & np.uint64(geometry.has_square_boxes)).astype(bool),
        digits[_below(names >> high, len(digits))],
    )
    return moved(inputs, labels, geometry, symmetries, first_digit=FIRST_DIGIT_TOKEN)


@lru_cache
def digit_orders(size: int) -> UInt8[np.ndarray, "orders size"]:
    """Every order of the digits 1 to `size`: 362 880 of them for 9x9, 3 MB."""
    orders = np.zeros((1, 0), np.uint8)
    for length in range(1, size + 1):
        first = np.arange(length, dtype=np.uint8)[:, None, None]
        rest = orders + (orders >= first)
        orders = np.concatenate([np.broadcast_to(first, (*rest.shape[:2], 1)), rest], axis=2).reshape(-1, length)
    return orders + np.uint8(1)


def _mazes(inputs: Tokens, labels: Tokens, words: Words, size: int) -> tuple[Tokens, Tokens]:
    turns = words[0] >> np.uint64(61)
    new_inputs, new_labels = np.empty_like(inputs), np.empty_like(labels)
    for turn in range(len(TURNS)):
        rows = np.flatnonzero(turns == turn)
        for given, new in ((inputs, new_inputs), (labels, new_labels)):
            new[rows] = turned(given[rows].reshape(-1, size, size), turn).reshape(-1, size**2)
    return new_inputs, new_labels
