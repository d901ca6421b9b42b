"""The base classes of a kind of puzzle: its data (`Kind`), its drawing (`Drawing`), its rules (`Checking`).

A grid is a vector of values. Their meaning depends on the kind: the digits of a Sudoku, the tokens of a maze or of an
ARC canvas.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Integer, UInt8, UInt64

from train_jax.errors import UserError
from train_jax.puzzles.metadata import Metadata
from train_jax.storage.untrusted import DamagedError, read_whole

Grid = Integer[np.ndarray, "cells"]
Mask = Bool[np.ndarray, "cells"]
Grids = Integer[np.ndarray, "n cells"]

Tokens = UInt8[np.ndarray, "n seq"]
Words = UInt64[np.ndarray, "2 n"]
"""128 random bits for every example."""
Transform = Callable[[Tokens, Tokens, Words], tuple[Tokens, Tokens]]
"""Transforms inputs and labels; the random words of an example select its symmetry."""


class Symmetries(NamedTuple):
    """Symmetries, one for each puzzle, as permutations: cell i of an image has the renamed token of `cells[i]`."""

    cells: Integer[np.ndarray, "*n seq"]
    tokens: Integer[np.ndarray, "*n vocab"]
    """Token t becomes `tokens[t]`."""

    @property
    def inverse(self) -> "Symmetries":
        return Symmetries(*(np.argsort(order, axis=-1).astype(order.dtype) for order in self))

    def image(self, puzzles: Integer[np.ndarray, "*n seq"]) -> Integer[np.ndarray, "*n seq"]:
        """Returns the puzzles, or their answers, under their symmetries."""
        moved = np.take_along_axis(puzzles, self.cells.astype(np.intp), axis=-1)
        return np.take_along_axis(self.tokens, moved.astype(np.intp), axis=-1).astype(puzzles.dtype)


Symmetry = Callable[[Words], Symmetries]
"""Returns the symmetries that random words select; the same ones as in `Transform`."""

MAX_TEXT_BYTES = 2**20


@dataclass(frozen=True)
class PuzzleInput:
    """A puzzle as tokens, with its solution if it is known."""

    name: str
    kind: "Kind"
    tokens: Integer[np.ndarray, "seq"]
    solution: Integer[np.ndarray, "seq"] | None
    unique: bool = True
    """False if the puzzle is known to have several solutions."""
    puzzle_identifier: int | None = None


class Examples(NamedTuple):
    """The examples of a split, the argument of `Kind.inspect`."""

    inputs: Integer[np.ndarray, "examples seq"]
    """Inputs, memory-mapped like the labels."""
    labels: Integer[np.ndarray, "examples seq"]
    originals: Integer[np.ndarray, "groups"]
    """The first example of every group."""
    sample: Integer[np.ndarray, "sample"]
    """A subset of the originals, for slow checks."""


@dataclass(frozen=True)
class Drawing:
    """The way in which the grids of a kind are drawn."""

    rows: int
    cols: int
    box: tuple[int, int] | None = None
    """Rows and columns of a box with thick borders; None if there are no boxes."""
    fills_inputs: bool = True
    """True if an answer is the input with cells filled in, so that the two can be compared cell by cell."""

    def given_cells(self, inputs: Grid) -> Mask:
        """Returns the cells that are drawn as given; by default none."""
        return np.zeros(len(inputs), bool)

    def character(self, value: int) -> str:
        """Returns the character of a value; a blank if its colour is enough."""
        raise NotImplementedError

    def colour(self, value: int) -> str:
        """Returns a name in `CELLS` of `report/render.py`; "", the default, for the colour of the background."""
        return ""


class Checking:
    """The way in which the answers to the puzzles of a kind are checked."""

    success_message = "every cell equals the solution"
    """The text shown for an answer without mistakes."""

    def mistakes(self, inputs: Grid, answer: Grid, solution: Grid | None) -> list[str] | None:
        """Returns the mistakes in words; an empty list if the answer is correct, None if that is unknown.

        By default, an answer is correct if it equals the solution.
        """
        return None if solution is None else wrong_cells(answer, solution)

    def scored_cells(self, solutions: Integer[np.ndarray, "*n cells"]) -> Bool[np.ndarray, "*n cells"]:
        """Returns the cells in which an answer must agree with the solution; by default all."""
        return np.ones(solutions.shape, bool)


class Kind:
    """One kind of puzzle, of one size. Two objects are equal if kind and size are equal.

    A subclass has the attributes without a value, as attributes or as properties, and `every_size`, `parse`, `values`
    and `fingerprints`.
    """

    key: str
    """The name in `recipe.json` and in the `dataset.json` of a run, such as `sudoku-9x9`."""
    name: str
    """The name in messages, such as `9x9 Sudoku`."""
    seq_len: int
    vocab_size: int
    drawing: Drawing
    checking: Checking
    unknown_solution: Integer[np.ndarray, "seq"] | None = None
    """The label of a puzzle whose solution is not public; None if all are. It may be a solution, too, so it stands for
    unknown ones only where a split has no other label."""
    transform: Transform | None = None
    """The transformation for augmentation per batch; None if only stored augmentations are supported."""
    symmetries: Symmetry | None = None
    """The permutations of `transform`, by which answers to its images are brought back; None if it has none."""

    @classmethod
    def every_size(cls) -> Iterable[Self]:
        """Returns the kinds of all sizes."""
        raise NotImplementedError

    @classmethod
    def from_key(cls, key: str) -> Self | None:
        """Returns the kind with this key; None for a key of another kind."""
        return next((kind for kind in cls.every_size() if kind.key == key), None)

    @classmethod
    def recognise(cls, data: Metadata) -> Self | None:
        """Returns the kind of a data set by its sizes; None if they are not those of this kind.

        Called only for data sets without a `recipe.json` that names the kind.
        """
        sizes = data.seq_len, data.vocab_size
        return next((kind for kind in cls.every_size() if (kind.seq_len, kind.vocab_size) == sizes), None)

    def parse(self, text: str) -> PuzzleInput:
        """Parses a puzzle. Raises `UserError` if the text is not a puzzle of this kind and size with a solution."""
        raise NotImplementedError

    def read(self, path: Path, *, data_dir: str, index: int = 0) -> PuzzleInput:
        """Reads a puzzle from a file, by default one puzzle as text; `index` selects one of several, `data_dir` is the
        data set with their names.

        Raises `UserError` like `parse`, and if the file cannot be read.
        """
        return replace(self.parse(_read_text(path)), name=f"{self.name} in {path}")

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        """Converts tokens of a data set or a model to values."""
        raise NotImplementedError

    def fitted(self, canvases: Sequence[Integer[np.ndarray, "..."]]) -> "Kind":
        """Returns the same kind, with the smallest size that contains these sequences of tokens."""
        return self

    def visible_answers(
        self, answers: Integer[np.ndarray, "steps seq"], solution: Integer[np.ndarray, "seq"]
    ) -> Integer[np.ndarray, "steps seq"]:
        """Removes the tokens that are neither trained nor scored from the answers; by default there are none."""
        return answers

    def fingerprints(self, inputs: Tokens, labels: Tokens) -> Iterable[Hashable]:
        """Returns a value for every example, equal for equivalent examples."""
        raise NotImplementedError

    def inspect(self, examples: Examples) -> dict[str, str]:
        """Returns facts about a split by name: properties of its puzzles and the number of invalid ones."""
        return {}


def wrong_cells(answer: Grid, solution: Grid | None) -> list[str]:
    """Returns the number of cells that differ from the solution, in words."""
    wrong = 0 if solution is None else int((answer != solution).sum())
    return [f"{wrong} of {len(answer)} cells wrong"] if wrong else []


def _read_text(path: Path) -> str:
    try:
        return read_whole(path, largest_bytes=MAX_TEXT_BYTES).decode("utf-8")
    except (FileNotFoundError, DamagedError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} cannot be read ({reason}); give a text file with one puzzle") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give a text file with one puzzle") from None


def number_range(numbers: Integer[np.ndarray, "n"]) -> str:
    """Returns the smallest and the largest number in words."""
    low = int(numbers.min())
    high = int(numbers.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
