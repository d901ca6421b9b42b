"""The kinds of Sudokus, one per size: how they are recognised, parsed, transformed, drawn and checked."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
from jaxtyping import Integer, UInt64

from train_jax.errors import UserError
from train_jax.puzzles.kind import (
    Checking,
    Drawing,
    Examples,
    Grid,
    Kind,
    Mask,
    PuzzleInput,
    Symmetry,
    Tokens,
    Transform,
    number_range,
    wrong_cells,
)
from train_jax.puzzles.sudoku.grid import (
    GEOMETRIES,
    Geometry,
    contradiction_in,
    grids_of,
    is_solution,
    parse,
    tokens_of,
)
from train_jax.puzzles.sudoku.solver import describe_guesses, solve
from train_jax.puzzles.sudoku.symmetry import fingerprints, symmetries_of, transform_tokens

MOST_GUESSES = 100_000
"""Guesses of the search for the solution of a given puzzle, about two seconds; a solution beyond them is unknown. Some
puzzles with few givens and no solution would take minutes."""


@dataclass(frozen=True)
class SudokuKind(Kind):
    """The kind of Sudokus of one geometry. Its values are digits, 0 for an empty cell."""

    geometry: Geometry

    @classmethod
    def every_size(cls) -> Iterable[Self]:
        return map(cls, GEOMETRIES.values())

    @property
    def key(self) -> str:
        return f"sudoku-{self.geometry}"

    @property
    def name(self) -> str:
        return f"{self.geometry} Sudoku"

    @property
    def seq_len(self) -> int:
        return self.geometry.cells

    @property
    def vocab_size(self) -> int:
        return self.geometry.vocab_size

    @property
    def drawing(self) -> Drawing:
        size = self.geometry.size
        return SudokuDrawing(size, size, (self.geometry.box_rows, self.geometry.box_cols))

    @property
    def checking(self) -> Checking:
        return SudokuChecking(self.geometry)

    def parse(self, text: str) -> PuzzleInput:
        grid, geometry = parse(text, trained=self.geometry)
        if geometry != self.geometry:
            raise UserError(
                f"the Sudoku is {geometry}, expected {self.geometry} as in training; give a Sudoku of "
                f"{self.geometry.cells} cells"
            )

        solutions = solve(grid[None], geometry, most_guesses=MOST_GUESSES)
        found = int(solutions.counts[0])
        is_known = bool(solutions.guesses[0] < MOST_GUESSES)
        if is_known and not found:
            raise UserError(f"the {geometry} Sudoku given has no solution; correct the givens")
        solution = tokens_of(solutions.grids[0]) if is_known and found == 1 else None
        return PuzzleInput(f"{geometry} Sudoku given", self, tokens_of(grid), solution, unique=found < 2)

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        return grids_of(tokens)

    @property
    def transform(self) -> Transform:
        return partial(transform_tokens, geometry=self.geometry)

    @property
    def symmetries(self) -> Symmetry:
        return partial(symmetries_of, geometry=self.geometry)

    def fingerprints(self, inputs: Tokens, labels: Tokens) -> UInt64[np.ndarray, "n"]:
        return fingerprints(grids_of(inputs), self.geometry)

    def inspect(self, examples: Examples) -> dict[str, str]:

        puzzles, answers = (grids_of(tokens[examples.originals]) for tokens in (examples.inputs, examples.labels))
        right = is_solution(answers, self.geometry) & ((puzzles == 0) | (puzzles == answers)).all(axis=1)
        solutions = solve(grids_of(examples.inputs[examples.sample]), self.geometry)
        unique = solutions.counts == 1
        of_sample = f"of {len(examples.sample):,} checked"
        difficulty = "not known"
        if unique.any():
            difficulty = f"{describe_guesses(solutions.guesses[unique])}, of {unique.sum():,} checked"
        return {
            "empty cells": number_range((puzzles == 0).sum(axis=1)),
            "labels that are not a solution": f"{(~right).sum():,}",
            "puzzles without exactly one solution": f"{(~unique).sum():,} {of_sample}",
            "difficulty": difficulty,
        }


class SudokuDrawing(Drawing):
    def given_cells(self, inputs: Grid) -> Mask:
        return inputs > 0

    def character(self, value: int) -> str:
        return str(value) if value else "."


@dataclass(frozen=True)
class SudokuChecking(Checking):
    geometry: Geometry
    success_message = "every given kept, every row, column and box complete"

    def mistakes(self, inputs: Grid, answer: Grid, solution: Grid | None) -> list[str]:
        """Checks the rules of the puzzle: a solution other than the given one is correct too."""
        overwritten = int((answer != inputs)[inputs > 0].sum())
        in_range = np.where(answer <= self.geometry.size, answer, 0).astype(np.uint8)
        if not overwritten and is_solution(in_range[None], self.geometry)[0]:
            return []
        reasons = wrong_cells(answer, solution)
        if overwritten:
            reasons.append(f"{overwritten} of the givens overwritten")
        if not answer.all():
            reasons.append(f"{(answer == 0).sum()} cells left empty")
        contradiction = contradiction_in(in_range, self.geometry)
        return [*reasons, contradiction] if contradiction else reasons
