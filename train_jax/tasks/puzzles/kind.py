"""What drawing has to know of a kind of puzzle: its cells as characters and colours, and when an answer is right.

A grid is a row of values as the kind has them: the digits of a Sudoku, the tokens of a maze or of an ARC canvas.
"""

from typing import Protocol

import numpy as np
from jaxtyping import Bool, Integer

Grid = Integer[np.ndarray, "cells"]
Mask = Bool[np.ndarray, "cells"]
Grids = Integer[np.ndarray, "n cells"]
Masks = Bool[np.ndarray, "n cells"]


class Kind(Protocol):
    """One kind of puzzle, of one size."""

    @property
    def name(self) -> str:
        """Such as `9x9 Sudoku`."""
        ...

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
        """Whether an answer is the question with cells filled in, so that the two are compared cell by cell."""
        ...

    @property
    def success_message(self) -> str:
        """What is said of an answer without mistakes."""
        ...

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        """What a data set or a model says, as values."""
        ...

    def given_cells(self, question: Grid) -> Mask:
        """The cells that are given and stand out."""
        ...

    def character(self, value: int) -> str:
        """One character; a blank where the colour says it all."""
        ...

    def colour(self, value: int) -> str:
        """A name in `theme.CELLS`; "" for the paper's own colour."""
        ...

    def mistakes(self, question: Grid, answer: Grid, solution: Grid | None) -> list[str] | None:
        """Why the answer is not right, in words; empty where it is, None where that cannot be told."""
        ...

    @property
    def alternative_solution(self) -> str:
        """What an answer is that breaks no rule and still differs from the solution."""
        ...

    def scored_cells(self, solutions: Integer[np.ndarray, "*n cells"]) -> Bool[np.ndarray, "*n cells"]:
        """The cells in which an answer has to agree with the solution."""
        ...

    def unknown_cells(self, questions: Grids, solutions: Grids) -> Masks:
        """Of these, the ones that the question does not tell."""
        ...

    def difficulties(
        self, questions: Grids, solutions: Grids, *, thorough: bool
    ) -> dict[str, Integer[np.ndarray, "n"]]:
        """How hard the questions are, by one measure or several, each under its name; `thorough`: slow ones too."""
        ...

    def broken_rules(self, questions: Grids, answers: Grids, solutions: Grids) -> dict[str, Bool[np.ndarray, "n"]]:
        """For each rule that an answer can break, in words, which ones do."""
        ...


def wrong_cells(answer: Grid, solution: Grid | None) -> list[str]:
    """How many cells differ from the solution, in words."""
    wrong = 0 if solution is None else int((answer != solution).sum())
    return [f"{wrong} of {len(answer)} cells wrong"] if wrong else []
