"""ARC puzzles: grids of ten colours, up to 30x30, their symmetries, and their tokens on a 30x30 canvas.

A grid can be placed anywhere on the canvas. The row below it and the column to its right contain an end token next to
each of its border cells, as far as the canvas extends; everything else is padding.

A "turn" is one of the eight rotations and reflections. Colour 0 is the background and does not change. The name of an
augmented puzzle is `NAME|||tT|||PERMUTATION`: turn `T` is applied first, then colour c becomes the c-th digit of the
permutation. This is the format of the published scoring."""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8, UInt64

from train_jax.errors import UserError
from train_jax.puzzles.symmetries import TURNS, first_of_each, mix, turned

SIDE = 30
"""Number of rows and columns of the canvas, which are the maximum for a grid."""
CELLS = SIDE * SIDE
COLOURS = 10

PAD_TOKEN = 0
END_TOKEN = 1
FIRST_COLOUR_TOKEN = 2
VOCAB_SIZE = FIRST_COLOUR_TOKEN + COLOURS

ColourGrid = UInt8[np.ndarray, "rows cols"]

UNKNOWN: ColourGrid = np.zeros((1, 1), np.uint8)
"""Placeholder for the output of a test example whose solution is not public; compare with `is`."""


class Example(NamedTuple):
    input: ColourGrid
    output: ColourGrid


@dataclass(frozen=True, eq=False)
class Puzzle:
    """An ARC task: its name, and its examples in the sections "train" (demonstrations) and "test"."""

    name: str
    sections: dict[str, list[Example]]
    """Examples of each section in the order of the file, which determines their order in a data set."""

    @property
    def examples(self) -> list[Example]:
        return [example for section in self.sections.values() for example in section]


def sizes_of(
    tokens: Integer[np.ndarray, "n 900"],
) -> tuple[Integer[np.ndarray, "n"], Integer[np.ndarray, "n"]]:
    """Returns the rows and columns of the largest rectangle of colours in the upper left corner; 0 and 0 without one.

    End tokens are not read, so a prediction with misplaced end tokens still has a size. Among rectangles of equal
    area the one with the fewest rows is chosen, as in the published scoring.
    """
    is_colour = ((tokens >= FIRST_COLOUR_TOKEN) & (tokens < VOCAB_SIZE)).reshape(-1, SIDE, SIDE)
    reach = np.where(is_colour.all(axis=2), SIDE, is_colour.argmin(axis=2))
    cols = np.minimum.accumulate(reach, axis=1)
    best = (cols * np.arange(1, SIDE + 1)).argmax(axis=1)
    cols = np.take_along_axis(cols, best[:, None], axis=1)[:, 0]
    return np.where(cols > 0, best + 1, 0), cols


SEPARATOR = "|||"
AUGMENTED = re.compile(r"(.+)\|\|\|t([0-7])\|\|\|([0-9]{10})")
DRAWN_AT_ONCE = 256
DRAWN_PER_WANTED = 5
"""Symmetries drawn for every requested one, before `draw` returns fewer; as in the published builder."""

OUTSIDE = 255
"""The value of cells outside the grid in the result of `undo`."""


class Symmetries(NamedTuple):
    """One symmetry for each puzzle of a group; the first is the identity, for the original."""

    turns: UInt8[np.ndarray, "n"]
    colours: UInt8[np.ndarray, "n 10"]
    """Colours, such that colour c becomes `colours[:, c]`."""


ORIGINAL = Symmetries(np.zeros(1, np.uint8), np.arange(COLOURS, dtype=np.uint8)[None])


def undo(
    tokens: UInt8[np.ndarray, "n 900"],
    rows: Integer[np.ndarray, "n"],
    cols: Integer[np.ndarray, "n"],
    symmetries: Symmetries,
) -> tuple[UInt8[np.ndarray, "n 900"], Integer[np.ndarray, "n"], Integer[np.ndarray, "n"]]:
    """Inverts each row's symmetry for grids in the upper left corner; returns colours (not tokens), rows and columns.

    Cells outside the grid are `OUTSIDE`, so two grids are equal exactly when their rows are.
    """
    transposed, rows_reversed, cols_reversed = TURNS[symmetries.turns].T
    row_step = np.where(rows_reversed, -SIDE, SIDE)
    col_step = np.where(cols_reversed, -1, 1)
    start = np.where(rows_reversed, rows - 1, 0) * SIDE + np.where(cols_reversed, cols - 1, 0)
    down = np.where(transposed, col_step, row_step)
    right = np.where(transposed, row_step, col_step)
    rows, cols = np.where(transposed, cols, rows), np.where(transposed, rows, cols)

    line = np.arange(SIDE)
    source = (start[:, None] + down[:, None] * line)[:, :, None] + (right[:, None] * line)[:, None, :]
    inside = (line < rows[:, None])[:, :, None] & (line < cols[:, None])[:, None, :]
    source += (np.arange(len(tokens)) * CELLS)[:, None, None]
    was = np.full((len(tokens), 256), OUTSIDE, np.uint8)
    new_tokens = symmetries.colours + np.intp(FIRST_COLOUR_TOKEN)
    np.put_along_axis(was, new_tokens, np.arange(COLOURS, dtype=np.uint8)[None], axis=1)
    chosen = tokens.ravel().take(np.where(inside, source, 0))
    colours = was.ravel().take(chosen + (np.arange(len(tokens)) * was.shape[1])[:, None, None])
    return np.where(inside, colours, np.uint8(OUTSIDE)).reshape(-1, CELLS), rows, cols


def names_of(name: str, symmetries: Symmetries) -> list[str]:
    """Returns the names of a group's puzzles; the first is the name of the original."""
    digits = [colours.tobytes().decode() for colours in symmetries.colours + np.uint8(ord("0"))]
    augmented = zip(symmetries.turns[1:], digits[1:], strict=True)
    return [name, *(f"{name}{SEPARATOR}t{turn}{SEPARATOR}{permutation}" for turn, permutation in augmented)]


def parse_names(names: Sequence[str]) -> tuple[list[str], Symmetries]:
    """Returns the original's name and the symmetry for every name. Raises `UserError` for an invalid name."""
    originals = []
    turns = []
    permutations = []
    for name in names:
        found = AUGMENTED.fullmatch(name)
        original, turn, permutation = found.groups() if found else (name, "0", "0123456789")
        if SEPARATOR in original or len(set(permutation)) != COLOURS:
            raise UserError(
                f"puzzle identifier {name[:80]!r} is invalid, expected NAME or NAME|||t0|||0123456789; use the "
                "identifiers.json of an ARC data set"
            )
        originals.append(original)
        turns.append(int(turn))
        permutations.append(permutation)
    colours = np.frombuffer("".join(permutations).encode(), np.uint8) - np.uint8(ord("0"))
    return originals, Symmetries(np.array(turns, np.uint8), colours.reshape(-1, COLOURS))


def draw(puzzle: Puzzle, num_aug: int, rng: np.random.Generator) -> Symmetries:
    """Draws up to `num_aug` symmetries uniformly, after the identity, such that no two give the same puzzle.

    Two puzzles are the same if they have the same examples in any order. A symmetric puzzle has fewer different
    augmentations. With a smaller `num_aug` the result is a prefix of the one with a larger `num_aug`.
    """
    if num_aug == 0:
        return ORIGINAL
    sums = _sums(puzzle)
    kept = ORIGINAL
    marks = _fingerprints(sums, ORIGINAL)
    for _ in range(-(-DRAWN_PER_WANTED * num_aug // DRAWN_AT_ONCE)):
        turns = rng.integers(len(TURNS), size=DRAWN_AT_ONCE, dtype=np.uint8)
        colours = np.tile(np.arange(COLOURS, dtype=np.uint8), (DRAWN_AT_ONCE, 1))
        colours[:, 1:] = rng.permuted(colours[:, 1:], axis=1)
        candidates = Symmetries(turns, colours)
        new_marks = _fingerprints(sums, candidates)
        fresh = first_of_each(new_marks, known=marks)
        marks = np.concatenate([marks, new_marks[fresh]])
        kept = Symmetries(*(np.concatenate([old, new[fresh]]) for old, new in zip(kept, candidates, strict=True)))
        if len(marks) > num_aug:
            break
    return Symmetries(*(array[: num_aug + 1] for array in kept))


@lru_cache(maxsize=32)
def _cell_numbers(rows: int, cols: int) -> UInt64[np.ndarray, "2 cells turns 10"]:
    """Returns a random number for every colour of every cell after a turn, for inputs and outputs (Zobrist hashing).

    Every cell of a grid contributes to its hash, so the hash depends on the shape.
    """
    rng = np.random.Generator(np.random.Philox(key=0))
    canvas = rng.integers(2**64, size=(2, SIDE, SIDE, COLOURS), dtype=np.uint64)
    numbers = np.empty((2, rows * cols, len(TURNS), COLOURS), np.uint64)
    for turn in range(len(TURNS)):
        came_from = turned(np.arange(rows * cols).reshape(rows, cols), turn)
        numbers[:, came_from, turn] = canvas[:, : came_from.shape[0], : came_from.shape[1]]
    return numbers


def _sums(puzzle: Puzzle) -> UInt64[np.ndarray, "turns examples 10 10"]:
    """Returns, at `[turn, example, old, new]`, the contribution of the cells of colour `old` that become `new`.

    The hash of an augmented example is then the sum of ten table entries, whatever the size of its grids.
    """
    examples = puzzle.examples
    sums = np.zeros((len(TURNS), len(examples), COLOURS, COLOURS), np.uint64)
    for number, example in enumerate(examples):
        for kind, grid in enumerate(example):
            numbers = _cell_numbers(*grid.shape)[kind]
            cells = grid.ravel()
            for colour in np.flatnonzero(np.bincount(cells)):
                sums[:, number, colour] += numbers[cells == colour].sum(axis=0)
    return sums


def _fingerprints(sums: UInt64[np.ndarray, "turns examples 10 10"], symmetries: Symmetries) -> UInt64[np.ndarray, "n"]:
    """Returns a hash for every symmetry: equal for equal puzzles, and equal by chance with probability 2**-64."""
    of_example = np.zeros((len(symmetries.turns), sums.shape[1]), np.uint64)
    for colour in range(COLOURS):
        of_example += sums[symmetries.turns, :, colour, symmetries.colours[:, colour]]
    return mix(mix(of_example).sum(axis=1))


def invariant(example: Example) -> Hashable:
    """Returns a key that is equal for equivalent examples and seldom for others; cheaper than `canonical`."""
    counts = [np.bincount(grid.ravel(), minlength=COLOURS).tolist() for grid in example]
    black, *others = zip(*counts, strict=True)
    return tuple(sorted(example.input.shape)), tuple(sorted(example.output.shape)), black, *sorted(others)


def canonical(example: Example) -> bytes:
    """Returns a key that is equal for two examples exactly when a symmetry maps one to the other."""
    forms = []
    for turn in range(len(TURNS)):
        grids = [turned(grid, turn) for grid in example]
        cells = np.concatenate([grid.ravel() for grid in grids])
        present, first = np.unique(cells[cells > 0], return_index=True)
        renamed = np.zeros(COLOURS, np.uint8)
        renamed[present[np.argsort(first)]] = np.arange(1, len(present) + 1)
        forms.append(bytes([*grids[0].shape, *grids[1].shape]) + renamed[cells].tobytes())
    return min(forms)


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


def placements(grids: Sequence[ColourGrid]) -> UInt8[np.ndarray, "grids 31 31 30 30"]:
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


def render(
    grids: Sequence[ColourGrid], symmetries: Symmetries, places: Places
) -> UInt8[np.ndarray, "puzzles*grids 900"]:
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


def canvas_of(grid: ColourGrid) -> UInt8[np.ndarray, "900"]:
    """Renders one grid in the upper left corner, where the grids of test examples are placed."""
    return render([grid], ORIGINAL, Places(*np.zeros((2, 1, 1), np.intp)))[0]


def grid_on(canvas: Integer[np.ndarray, "900"]) -> ColourGrid:
    """Returns the bounding box of the coloured cells, or `UNKNOWN` if the canvas has none."""
    canvas = canvas.reshape(SIDE, SIDE)
    rows, cols = (np.flatnonzero((canvas >= FIRST_COLOUR_TOKEN).any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return UNKNOWN
    grid = canvas[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1].astype(np.uint8)
    return np.maximum(grid, FIRST_COLOUR_TOKEN) - np.uint8(FIRST_COLOUR_TOKEN)
