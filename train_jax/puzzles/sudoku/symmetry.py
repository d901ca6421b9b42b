"""The symmetries of Sudokus: random equivalent puzzles, stored or computed per batch, and invariant fingerprints.

The symmetries are permutations of the digits, of the bands, of the rows in a band, of the stacks and of the columns in
a stack, and the transposition if the boxes are square. A 6x6 grid of 2x3 boxes has no transposition.
"""

from functools import lru_cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer, UInt8, UInt64

from train_jax.puzzles.kind import Symmetries, Tokens, Words
from train_jax.puzzles.sudoku.grid import Geometry
from train_jax.puzzles.symmetries import mix

FIRST_DIGIT_TOKEN = 2
"""The token of digit 1, after padding and the empty cell."""
BLOCK = 4096
REFINEMENT_ROUNDS = 4
"""Rounds that distinguish all random puzzles tested so far; more rounds can only distinguish more puzzles."""


@lru_cache
def line_orders(groups: int, group_size: int) -> Integer[np.ndarray, "orders size"]:
    """Returns every order of the rows (or columns) that keeps bands (or stacks) together; 1 296 orders for 9x9."""
    inner = list(permutations(range(group_size)))
    orders = [
        [band * group_size + line for band, lines in zip(bands, chosen, strict=True) for line in lines]
        for bands in permutations(range(groups))
        for chosen in product(inner, repeat=groups)
    ]
    return np.array(orders, np.intp)


def axis_orders(geometry: Geometry) -> tuple[Integer[np.ndarray, "orders size"], Integer[np.ndarray, "orders size"]]:
    """Returns every order of the rows and every order of the columns."""
    size = geometry.size
    return (
        line_orders(size // geometry.box_rows, geometry.box_rows),
        line_orders(size // geometry.box_cols, geometry.box_cols),
    )


class SudokuSymmetries(NamedTuple):
    """Symmetries, one for each of n puzzles."""

    row_order: Integer[np.ndarray, "n"]
    """Index into the row orders of `axis_orders`, for each puzzle."""
    col_order: Integer[np.ndarray, "n"]
    transposed: Bool[np.ndarray, "n"]
    digits: UInt8[np.ndarray, "n size"]
    """Digits, such that digit d becomes `digits[:, d - 1]`."""


def augment(
    puzzles: UInt8[np.ndarray, "n cells"],
    solutions: UInt8[np.ndarray, "n cells"],
    geometry: Geometry,
    rng: np.random.Generator,
) -> tuple[UInt8[np.ndarray, "n cells"], UInt8[np.ndarray, "n cells"]]:
    """Transforms every puzzle and its solution by a random symmetry, drawn uniformly."""
    new_puzzles = np.empty_like(puzzles)
    new_solutions = np.empty_like(solutions)
    for start in range(0, len(puzzles), BLOCK):
        block = slice(start, start + BLOCK)
        symmetries = _draw(len(puzzles[block]), geometry, rng)
        new_puzzles[block], new_solutions[block] = apply_symmetries(
            puzzles[block], solutions[block], geometry, symmetries
        )
    return new_puzzles, new_solutions


def _draw(n: int, geometry: Geometry, rng: np.random.Generator) -> SudokuSymmetries:
    """Draws `n` symmetries. The order of the draws determines the bytes of every augmented data set."""
    row_order, col_order = (rng.integers(len(orders), size=n) for orders in axis_orders(geometry))
    transposed = rng.integers(2, size=n, dtype=bool) if geometry.has_square_boxes else np.zeros(n, bool)
    digits = rng.permuted(np.tile(np.arange(1, geometry.size + 1, dtype=np.uint8), (n, 1)), axis=1)
    return SudokuSymmetries(row_order, col_order, transposed, digits)


def apply_symmetries(
    puzzles: UInt8[np.ndarray, "n cells"],
    solutions: UInt8[np.ndarray, "n cells"],
    geometry: Geometry,
    symmetries: SudokuSymmetries,
    *,
    first_digit: int = 1,
) -> tuple[UInt8[np.ndarray, "n cells"], UInt8[np.ndarray, "n cells"]]:
    """Transforms every puzzle and its solution by its symmetry.

    `first_digit` is the value of digit 1 in these arrays. Smaller values are moved but not renamed.
    """
    first = np.arange(len(puzzles))[:, None]
    source = source_cells(geometry, symmetries) + first * geometry.cells
    # Values fit into four bits, so one look-up moves a cell of the puzzle and of the solution.
    both = ((solutions << np.uint8(4)) | puzzles).ravel().take(source)
    renamed = renamed_values(geometry, symmetries, first_digit, 16)
    at = first * 16
    return renamed.ravel().take((both & np.uint8(15)) + at), renamed.ravel().take((both >> np.uint8(4)) + at)


def source_cells(geometry: Geometry, symmetries: SudokuSymmetries) -> Integer[np.ndarray, "n cells"]:
    """Returns, for every cell of a transformed puzzle, the cell that it had before."""
    size = geometry.size
    rows, cols = (
        orders[which] for orders, which in zip(axis_orders(geometry), (symmetries[0], symmetries[1]), strict=True)
    )
    row_stride, col_stride = (np.where(symmetries.transposed[:, None], *pair) for pair in ((1, size), (size, 1)))
    return ((rows * row_stride)[:, :, None] + (cols * col_stride)[:, None, :]).reshape(-1, geometry.cells)


def renamed_values(
    geometry: Geometry, symmetries: SudokuSymmetries, first_digit: int, count: int
) -> UInt8[np.ndarray, "n count"]:
    """Returns the new value of each of `count` values; those beyond the digits are 0."""
    renamed = np.zeros((len(symmetries.digits), count), np.uint8)
    renamed[:, :first_digit] = np.arange(first_digit)
    renamed[:, first_digit : first_digit + geometry.size] = symmetries.digits + np.uint8(first_digit - 1)
    return renamed


def transform_tokens(inputs: Tokens, labels: Tokens, words: Words, *, geometry: Geometry) -> tuple[Tokens, Tokens]:
    """Transforms every example of a batch by the symmetry that its random words select, all equally likely."""
    return apply_symmetries(inputs, labels, geometry, _selected(words, geometry), first_digit=FIRST_DIGIT_TOKEN)


def symmetries_of(words: Words, *, geometry: Geometry) -> Symmetries:
    """Returns the symmetries of `transform_tokens`."""
    selected = _selected(words, geometry)
    tokens = renamed_values(geometry, selected, FIRST_DIGIT_TOKEN, geometry.vocab_size)
    return Symmetries(source_cells(geometry, selected), tokens)


def _selected(words: Words, geometry: Geometry) -> SudokuSymmetries:
    of_lines, of_digits = words
    high = np.uint64(32)
    low = np.uint64(2**32 - 1)
    row_orders, col_orders = axis_orders(geometry)
    digits = digit_orders(geometry.size)
    return SudokuSymmetries(
        _below(of_lines >> high, len(row_orders)),
        _below(of_lines & low, len(col_orders)),
        (of_digits & np.uint64(geometry.has_square_boxes)).astype(bool),
        digits[_below(of_digits >> high, len(digits))],
    )


def _below(bits: UInt64[np.ndarray, "n"], end: int) -> Integer[np.ndarray, "n"]:
    """Maps 32 random bits to a number below `end`; the relative error of a probability is at most `end / 2**32`."""
    return ((bits * np.uint64(end)) >> np.uint64(32)).astype(np.intp)


@lru_cache
def digit_orders(size: int) -> UInt8[np.ndarray, "orders size"]:
    """Returns every permutation of the digits 1 to `size`; for 9x9 these are 362 880, which take 3 MB."""
    orders = np.zeros((1, 0), np.uint8)
    for length in range(1, size + 1):
        first = np.arange(length, dtype=np.uint8)[:, None, None]
        rest = orders + (orders >= first)
        orders = np.concatenate([np.broadcast_to(first, (*rest.shape[:2], 1)), rest], axis=2).reshape(-1, length)
    return orders + np.uint8(1)


def fingerprints(puzzles: UInt8[np.ndarray, "n cells"], geometry: Geometry) -> UInt64[np.ndarray, "n"]:
    """Returns a hash for every puzzle that is equal for equivalent puzzles.

    The algorithm is colour refinement. Every cell starts with the colour "given" or "empty". A round computes for every
    row, column, box and digit a hash of the sum of its cells' colours, and then for every cell a hash of its colour and
    of the colours of its row, column, box and digit. Sums do not depend on the order, so the sum over all cells at the
    end is invariant under every symmetry. Rows and columns use the same hash, for the transposition; where the
    transposition is not a symmetry, they still differ in the number of cells that they share with a box.

    Different fingerprints prove that two puzzles are not equivalent. Equal fingerprints nearly always mean that they
    are equivalent; the exceptions are 64-bit collisions and puzzles that colour refinement cannot distinguish. When
    train and test splits are compared, puzzles with equal fingerprints count as equivalent, which is the safe side.
    """
    blocks = [puzzles[start : start + BLOCK] for start in range(0, len(puzzles), BLOCK)]
    return np.concatenate([np.empty(0, np.uint64), *(_fingerprint_block(block, geometry) for block in blocks)])


def _fingerprint_block(puzzles, geometry: Geometry) -> UInt64[np.ndarray, "n"]:
    size = geometry.size
    n = len(puzzles)
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
