"""What a kind of puzzle is: one object that recognises, parses, transforms, draws and checks its puzzles.

A grid is a row of values as the kind has them: the digits of a Sudoku, the tokens of a maze or of an ARC canvas.
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
"""Inputs and labels, every example under the symmetry that its words select."""

MAX_TEXT_BYTES = 2**20


@dataclass(frozen=True)
class PuzzleInput:
    """A puzzle as a model takes it, with what is known of its solution."""

    name: str
    kind: "Kind"
    tokens: Integer[np.ndarray, "seq"]
    solution: Integer[np.ndarray, "seq"] | None
    unique: bool = True
    """Whether it has one solution."""
    puzzle_identifier: int | None = None


class Examples(NamedTuple):
    """The examples of a split, as `Kind.inspect` gets them."""

    inputs: Integer[np.ndarray, "examples seq"]
    """Memory-mapped, as are the labels."""
    labels: Integer[np.ndarray, "examples seq"]
    originals: Integer[np.ndarray, "groups"]
    """The first example of every group."""
    sample: Integer[np.ndarray, "sample"]
    """Some of the originals, for checks that take long."""


class Kind(Protocol):
    """One kind of puzzle, of one size. Two are equal where they are the same kind of the same size."""

    # What a data set of this kind is, and how its files name it.

    @property
    def key(self) -> str:
        """As `recipe.json` and a run's `dataset.json` name it, such as `sudoku-9x9`."""
        ...

    @classmethod
    def from_key(cls, key: str) -> Self | None:
        """The kind of this key; None for a key of another kind."""
        ...

    @classmethod
    def recognise(cls, data: Metadata) -> Self | None:
        """The kind of a data set that does not name it; None where its sizes are not those of this kind.

        Asked only for data sets without our `recipe.json`.
        """
        ...

    @property
    def name(self) -> str:
        """Such as `9x9 Sudoku`."""
        ...

    @property
    def seq_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def has_named_puzzles(self) -> bool:
        """Whether `identifiers.json` names the puzzles one by one."""
        ...

    # Puzzles from users.

    def parse(self, text: str) -> PuzzleInput:
        """Raises `UserError` for a text that shows no puzzle of this kind and size, or one without a solution."""
        ...

    def read(self, path: Path, *, data_dir: str, index: int = 0) -> PuzzleInput:
        """A puzzle from a file. Where a file holds several, `index` says which; `data_dir` names the puzzles.

        Raises `UserError` as `parse` does, and for a file that cannot be read.
        """
        ...

    # Symmetries, and checks of whole data sets.

    @property
    def transform(self) -> Transform | None:
        """Draws a symmetry of every example; None where augmented examples are stored in the data set only."""
        ...

    def fingerprints(self, inputs: Tokens, labels: Tokens) -> Iterable[Hashable]:
        """A value for every example, equal for examples that a symmetry turns into each other."""
        ...

    def inspect(self, examples: Examples) -> dict[str, str]:
        """Facts about a split, by name: what its puzzles are like, and how many of them break the rules."""
        ...

    def summary(self, inputs: Integer[np.ndarray, "n seq"]) -> str:
        """A few words about these puzzles, such as `50 of 81 cells empty`; may be empty."""
        ...

    # Drawing.

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def box(self) -> tuple[int, int] | None:
        """Rows and columns between thick rules; None where colours tell the cells apart."""
        ...

    @property
    def fills_inputs(self) -> bool:
        """Whether an answer is the input with cells filled in, so that the two are compared cell by cell."""
        ...

    def fitted(self, canvases: Sequence[Integer[np.ndarray, "..."]]) -> "Kind":
        """The same kind, no larger than these sequences of tokens need."""
        ...

    def visible_answers(
        self, answers: Integer[np.ndarray, "steps seq"], solution: Integer[np.ndarray, "seq"]
    ) -> Integer[np.ndarray, "steps seq"]:
        """The answers without tokens that are neither trained nor scored."""
        ...

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        """The tokens of a data set or a model as values."""
        ...

    def given_cells(self, inputs: Grid) -> Mask:
        """The cells that are given and stand out."""
        ...

    def character(self, value: int) -> str:
        """One character; a blank where the colour says it all."""
        ...

    def colour(self, value: int) -> str:
        """A name in `theme.CELLS`; "" for the background's own colour."""
        ...

    # Checking answers.

    @property
    def success_message(self) -> str:
        """What is said of an answer without mistakes."""
        ...

    @property
    def alternative_solution(self) -> str:
        """What an answer is that breaks no rule and still differs from the solution."""
        ...

    def mistakes(self, inputs: Grid, answer: Grid, solution: Grid | None) -> list[str] | None:
        """Why the answer is not right, in words; empty where it is, None where that is not known."""
        ...

    def scored_cells(self, solutions: Integer[np.ndarray, "*n cells"]) -> Bool[np.ndarray, "*n cells"]:
        """The cells in which an answer has to agree with the solution."""
        ...

    def unknown_cells(self, inputs: Grids, solutions: Grids) -> Masks:
        """Of these, the ones that the input does not give."""
        ...

    def difficulties(self, inputs: Grids, solutions: Grids, *, thorough: bool) -> dict[str, Integer[np.ndarray, "n"]]:
        """How hard the puzzles are, by one measure or several, each under its name; `thorough`: slow ones too."""
        ...

    def broken_rules(self, inputs: Grids, answers: Grids, solutions: Grids) -> dict[str, Bool[np.ndarray, "n"]]:
        """For each rule that an answer can break, in words, which ones do."""
        ...


def wrong_cells(answer: Grid, solution: Grid | None) -> list[str]:
    """How many cells differ from the solution, in words."""
    wrong = 0 if solution is None else int((answer != solution).sum())
    return [f"{wrong} of {len(answer)} cells wrong"] if wrong else []


def read_text(path: Path) -> str:
    """A file with one puzzle as text. Raises `UserError` for a file that cannot be read or is not UTF-8."""
    try:
        return read_whole(path, largest_bytes=MAX_TEXT_BYTES).decode("utf-8")
    except (FileNotFoundError, DamagedError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} cannot be read ({reason}); give a text file with one puzzle") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text; give a text file with one puzzle") from None


def number_range(numbers: Integer[np.ndarray, "n"]) -> str:
    """Smallest and largest in words."""
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
