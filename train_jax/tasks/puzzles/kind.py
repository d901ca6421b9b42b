"""The protocol of a kind of puzzle: one object that recognises, parses, transforms, draws and checks its puzzles.

A grid is a vector of values. Their meaning depends on the kind: the digits of a Sudoku, the tokens of a maze or of an
ARC canvas.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np
from jaxtyping import Bool, Integer, UInt8, UInt64

from train_jax.errors import UserError
from train_jax.run.untrusted import DamagedError, read_whole
from train_jax.tasks.puzzles.metadata import Metadata

Grid = Integer[np.ndarray, "cells"]
Mask = Bool[np.ndarray, "cells"]
Grids = Integer[np.ndarray, "n cells"]
Masks = Bool[np.ndarray, "n cells"]

Tokens = UInt8[np.ndarray, "n seq"]
Words = UInt64[np.ndarray, "2 n"]
"""128 random bits for every example."""
Transform = Callable[[Tokens, Tokens, Words], tuple[Tokens, Tokens]]
"""Transforms inputs and labels; the random words of an example select its symmetry."""

MAX_TEXT_BYTES = 2**20


@dataclass(frozen=True)
class PuzzleInput:
    """A puzzle as tokens, with its solution if it is known."""

    name: str
    kind: "Kind"
    tokens: Integer[np.ndarray, "seq"]
    solution: Integer[np.ndarray, "seq"] | None
    unique: bool = True
    """Whether the puzzle has exactly one solution."""
    puzzle_identifier: int | None = None


class Examples(NamedTuple):
    """The examples of a split, the argument of `Kind.inspect`."""

    inputs: Integer[np.ndarray, "examples seq"]
    """Memory-mapped, like the labels."""
    labels: Integer[np.ndarray, "examples seq"]
    originals: Integer[np.ndarray, "groups"]
    """The first example of every group."""
    sample: Integer[np.ndarray, "sample"]
    """A subset of the originals, for slow checks."""


class Kind(Protocol):
    """One kind of puzzle, of one size. Two objects are equal if kind and size are equal."""

    # Data sets of this kind.

    @property
    def key(self) -> str:
        """The name in `recipe.json` and in the `dataset.json` of a run, such as `sudoku-9x9`."""
        ...

    @classmethod
    def from_key(cls, key: str) -> Self | None:
        """Returns the kind with this key; None for a key of another kind."""
        ...

    @classmethod
    def recognise(cls, data: Metadata) -> Self | None:
        """Returns the kind of a data set by its sizes; None if they are not those of this kind.

        Called only for data sets without a `recipe.json` that names the kind.
        """
        ...

    @property
    def name(self) -> str:
        """The name in messages, such as `9x9 Sudoku`."""
        ...

    @property
    def seq_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def has_named_puzzles(self) -> bool:
        """Whether every puzzle has its own name in `identifiers.json`."""
        ...

    @property
    def unknown_solution(self) -> Integer[np.ndarray, "seq"] | None:
        """The label of a puzzle whose solution is not public; None if all are. It may be a solution, too, so it stands
        for unknown ones only where a split has no other label."""
        ...

    # Puzzles from users.

    def parse(self, text: str) -> PuzzleInput:
        """Parses a puzzle. Raises `UserError` if the text is not a puzzle of this kind and size with a solution."""
        ...

    def read(self, path: Path, *, data_dir: str, index: int = 0) -> PuzzleInput:
        """Reads a puzzle from a file; `index` selects one of several, `data_dir` is the data set with their names.

        Raises `UserError` like `parse`, and if the file cannot be read.
        """
        ...

    # Symmetries, and checks of whole data sets.

    @property
    def transform(self) -> Transform | None:
        """The transformation for augmentation per batch; None if only stored augmentations are supported."""
        ...

    def fingerprints(self, inputs: Tokens, labels: Tokens) -> Iterable[Hashable]:
        """Returns a value for every example, equal for equivalent examples."""
        ...

    def inspect(self, examples: Examples) -> dict[str, str]:
        """Returns facts about a split by name: properties of its puzzles and the number of invalid ones."""
        ...

    def summary(self, inputs: Integer[np.ndarray, "n seq"]) -> str:
        """Describes these puzzles in a few words, such as `50 of 81 cells empty`; may be empty."""
        ...

    # Drawing.

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def box(self) -> tuple[int, int] | None:
        """Rows and columns of a box with thick borders; None if there are no boxes."""
        ...

    @property
    def fills_inputs(self) -> bool:
        """Whether an answer is the input with cells filled in, so that the two can be compared cell by cell."""
        ...

    def fitted(self, canvases: Sequence[Integer[np.ndarray, "..."]]) -> "Kind":
        """Returns the same kind, with the smallest size that contains these sequences of tokens."""
        ...

    def visible_answers(
        self, answers: Integer[np.ndarray, "steps seq"], solution: Integer[np.ndarray, "seq"]
    ) -> Integer[np.ndarray, "steps seq"]:
        """Removes the tokens that are neither trained nor scored from the answers."""
        ...

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        """Converts tokens of a data set or a model to values."""
        ...

    def given_cells(self, inputs: Grid) -> Mask:
        """Returns the cells that are drawn as given."""
        ...

    def character(self, value: int) -> str:
        """Returns the character of a value; a blank if its colour is enough."""
        ...

    def colour(self, value: int) -> str:
        """Returns a name in `theme.CELLS`; "" for the colour of the background."""
        ...

    # Checking answers.

    @property
    def success_message(self) -> str:
        """The text shown for an answer without mistakes."""
        ...

    @property
    def alternative_solution(self) -> str:
        """The text shown for an answer that breaks no rule but differs from the solution."""
        ...

    def mistakes(self, inputs: Grid, answer: Grid, solution: Grid | None) -> list[str] | None:
        """Returns the mistakes in words; an empty list if the answer is correct, None if that is unknown."""
        ...

    def scored_cells(self, solutions: Integer[np.ndarray, "*n cells"]) -> Bool[np.ndarray, "*n cells"]:
        """Returns the cells in which an answer must agree with the solution."""
        ...

    def unknown_cells(self, inputs: Grids, solutions: Grids) -> Masks:
        """Returns the scored cells that the input does not give."""
        ...

    def difficulties(self, inputs: Grids, solutions: Grids, *, thorough: bool) -> dict[str, Integer[np.ndarray, "n"]]:
        """Returns measures of difficulty by name; with `thorough`, slow ones too."""
        ...

    def broken_rules(self, inputs: Grids, answers: Grids, solutions: Grids) -> dict[str, Bool[np.ndarray, "n"]]:
        """Returns, for each rule (in words), which answers break it."""
        ...


def wrong_cells(answer: Grid, solution: Grid | None) -> list[str]:
    """Returns the number of cells that differ from the solution, in words."""
    wrong = 0 if solution is None else int((answer != solution).sum())
    return [f"{wrong} of {len(answer)} cells wrong"] if wrong else []


def read_text(path: Path) -> str:
    """Reads a file with one puzzle as text. Raises `UserError` if it cannot be read or is not UTF-8."""
    try:
        return read_whole(path, largest_bytes=MAX_TEXT_BYTES).decode("utf-8")
    except (FileNotFoundError, DamagedError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} cannot be read ({reason}); give a text file with one puzzle") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give a text file with one puzzle") from None


def number_range(numbers: Integer[np.ndarray, "n"]) -> str:
    """Returns the smallest and the largest number in words."""
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
