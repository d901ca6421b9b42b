"""The symmetries of Sudoku: random equivalent copies, stored or drawn on the fly, and fingerprints they do not change.

The symmetries are: rename the digits; permute the bands, the rows in a band, the stacks, the columns in a stack;
and, where the boxes are square, transpose. A 6x6 grid of 2x3 boxes has no transposition.
"""

from functools import lru_cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer, UInt8, UInt64

from train_jax.tasks.puzzles.hashing import mix
from train_jax.tasks.puzzles.kind import Tokens, Words
from train_jax.tasks.puzzles.sudoku.grid import Geometry

FIRST_DIGIT_TOKEN = 2
"""After padding and the empty cell."""
BLOCK = 4096
REFINEMENT_ROUNDS = 4
"""Enough for every pair of random puzzles met so far; more rounds can only tell more puzzles apart."""


@lru_cache
def line_orders(groups: int, group_size: int) -> Integer[np.ndarray, "orders size"]:
    """Every order of the rows (or columns) that keeps bands (or stacks) together: 1 296 of them for 9x9."""
    inner = list(permutations(range(group_size)))
    orders = [
        [band * group_size + line for band, lines in zip(bands, chosen, strict=True) for line in lines]
        for bands in permutations(range(groups))
        for chosen in product(inner, repeat=groups)
    ]
    return np.array(orders, np.intp)


def axis_orders(geometry: Geometry) -> tuple[Integer[np.ndarray, "orders size"], Integer[np.ndarray, "orders size"]]:
    """Every order of the rows, and every one of the columns."""
    size = geometry.size
    return (
        line_orders(size // geometry.box_rows, geometry.box_rows),
        line_orders(size // geometry.box_cols, geometry.box_cols),
    )


class Symmetries(NamedTuple):
    """One for each of n puzzles."""

    row_order: Integer[np.ndarray, "n"]
    """Of `axis_orders`, by number."""
    col_order: Integer[np.ndarray, "n"]
    transposed: Bool[np.ndarray, "n"]
    digits: UInt8[np.ndarray, "n size"]
    """What 1, 2, … become."""


def augment(
    puzzles: UInt8[np.ndarray, "n cells"],
    solutions: UInt8[np.ndarray, "n cells"],
    geometry: Geometry,
    rng: np.random.Generator,
) -> tuple[UInt8[np.ndarray, "n cells"], UInt8[np.ndarray, "n cells"]]:
    """Every puzzle with its solution under a symmetry of its own, drawn uniformly."""
    new_puzzles, new_solutions = np.empty_like(puzzles), np.empty_like(solutions)
    for start in range(0, len(puzzles), BLOCK):
        block = slice(start, start + BLOCK)
        symmetries = _draw(len(puzzles[block]), geometry, rng)
        new_puzzles[block], new_solutions[block] = apply_symmetries(
            puzzles[block], solutions[block], geometry, symmetries
        )
    return new_puzzles, new_solutions


def _draw(n: int, geometry: Geometry, rng: np.random.Generator) -> Symmetries:
    """The order of draws decides the bytes of every data set with augmentations."""
    row_order, col_order = (rng.integers(len(orders), size=n) for orders in axis_orders(geometry))
    transposed = rng.integers(2, size=n, dtype=bool) if geometry.has_square_boxes else np.zeros(n, bool)
    digits = rng.permuted(np.tile(np.arange(1, geometry.size + 1, dtype=np.uint8), (n, 1)), axis=1)
    return Symmetries(row_order, col_order, transposed, digits)


def apply_symmetries(
    puzzles: UInt8[np.ndarray, "n cells"],
    solutions: UInt8[np.ndarray, "n cells"],
    geometry: Geometry,
    symmetries: Symmetries,
    *,
    first_digit: int = 1,
) -> tuple[UInt8[np.ndarray, "n cells"], UInt8[np.ndarray, "n cells"]]:
    """Every puzzle with its solution under its symmetry.

    `first_digit`: the value that digit 1 has in these arrays; values below stay what they are, wherever they stand.
    """
    n, size = len(puzzles), geometry.size
    rows, cols = (
        orders[which] for orders, which in zip(axis_orders(geometry), (symmetries[0], symmetries[1]), strict=True)
    )
    first = np.arange(n)[:, None]
    row_stride, col_stride = (np.where(symmetries.transposed[:, None], *pair) for pair in ((1, size), (size, 1)))
    source = (rows * row_stride + first * geometry.cells)[:, :, None] + (cols * col_stride)[:, None, :]
    # Values fit four bits, so one look-up moves a cell of both.
    both = ((solutions << np.uint8(4)) | puzzles).ravel().take(source.reshape(n, geometry.cells))
    renamed = np.zeros((n, 16), np.uint8)
    renamed[:, :first_digit] = np.arange(first_digit)
    renamed[:, first_digit : first_digit + size] = symmetries.digits + np.uint8(first_digit - 1)
    at = first * 16
    return renamed.ravel().take((both & np.uint8(15)) + at), renamed.ravel().take((both >> np.uint8(4)) + at)


def transform_tokens(inputs: Tokens, labels: Tokens, words: Words, *, geometry: Geometry) -> tuple[Tokens, Tokens]:
    """Every example of a batch under a symmetry that its words select, all of them equally likely."""
    of_lines, of_digits = words
    high, low = np.uint64(32), np.uint64(2**32 - 1)
    row_orders, col_orders = axis_orders(geometry)
    digits = digit_orders(geometry.size)
    symmetries = Symmetries(
        _below(of_lines >> high, len(row_orders)),
        _below(of_lines & low, len(col_orders)),
        (of_digits & np.uint64(geometry.has_square_boxes)).astype(bool),
        digits[_below(of_digits >> high, len(digits))],
    )
    return apply_symmetries(inputs, labels, geometry, symmetries, first_digit=FIRST_DIGIT_TOKEN)


def _below(bits: UInt64[np.ndarray, "n"], end: int) -> Integer[np.ndarray, "n"]:
    """A number below `end` from 32 random bits, by their share of all; no value is off by more than `end / 2**32`."""
    return ((bits * np.uint64(end)) >> np.uint64(32)).astype(np.intp)


@lru_cache
def digit_orders(size: int) -> UInt8[np.ndarray, "orders size"]:
    """Every order of the digits 1 to `size`: 362 880 of them for 9x9, 3 MB."""
    orders = np.zeros((1, 0), np.uint8)
    for length in range(1, size + 1):
        first = np.arange(length, dtype=np.uint8)[:, None, None]
        rest = orders + (orders >= first)
        orders = np.concatenate([np.broadcast_to(first, (*rest.shape[:2], 1)), rest], axis=2).reshape(-1, length)
    return orders + np.uint8(1)


def fingerprints(puzzles: UInt8[np.ndarray, "n cells"], geometry: Geometry) -> UInt64[np.ndarray, "n"]:
    """A number for every puzzle that is equal for puzzles which a symmetry turns into each other.

    Colour refinement on the puzzle's incidences: every cell starts with the colour "given" or "empty"; a round gives
    every row, column, box and digit the hash of the sum of its cells' colours, then every cell the hash of its own
    colour and of those it lies on. Sums do not see the order, so no symmetry changes the sum of all cells at the end.
    Rows and columns are hashed alike, for the sake of transposition; where it is no symmetry they still differ by how
    many cells they share with a box.

    Different fingerprints therefore prove that two puzzles are not equivalent. Equal ones nearly always mean that
    they are (a 64-bit collision, or two puzzles that refinement cannot tell apart, would be the exception); who keeps
    train and test apart treats them as the same puzzle, which errs on the safe side.
    """
    blocks = [puzzles[start : start + BLOCK] for start in range(0, len(puzzles), BLOCK)]
    return np.concatenate([np.empty(0, np.uint64), *(_fingerprint_block(block, geometry) for block in blocks)])


def _fingerprint_block(puzzles, geometry: Geometry) -> UInt64[np.ndarray, "n"]:
    size, n = geometry.size, len(puzzles)
    digits = np.ascontiguousarray(puzzles.T)
    colours = mix((digits > 0).astype(np.uint64))
    holds = [(digits == digit).astype(np.uint64) for digit in range(1, size + 1)]
    for _ in range(REFINEMENT_ROUNDS):
        grid = colours.reshape(size, size, n)
        bands = colours.reshape(size // geometry.box_rows, geometry.box_rows, -1, geometry.box_cols, n)
        of_row = mix(grid.sum(axis=1), kind=1)
        of_col = mix(grid.sum(axis=0), kind=1)
        of_box = mix(bands.sum(axis=(1, 3)).reshape(size, n), kind=2)
        colours = colours * np.uint64(5) + of_row[geometry.row_of] + of_col[geometry.col_of]
        colours += of_box[geometry.box_of]
        of_cell = grid.reshape(geometry.cells, n)
        for held in holds:
            colours += held * mix((of_cell * held).sum(axis=0), kind=3)
        colours = mix(colours)
    return mix(colours.sum(axis=0))
