"""Sudokus as they are drawn and judged."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Integer

from train_jax.tasks.puzzles.kind import Grid, Grids, Mask, Masks, wrong_cells
from train_jax.tasks.puzzles.sudoku.grid import Geometry, contradiction_in, grids_of, is_solution
from train_jax.tasks.puzzles.sudoku.rating import ratings


@dataclass(frozen=True)
class SudokuKind:
    """Values are digits, 0 for an empty cell."""

    geometry: Geometry
    fills_inputs = True
    success_message = "every given kept, every row, column and box complete"
    alternative_solution = "another solution of the puzzle"

    @property
    def name(self) -> str:
        return f"{self.geometry} Sudoku"

    @property
    def rows(self) -> int:
        return self.geometry.size

    @property
    def cols(self) -> int:
        return self.geometry.size

    @property
    def box(self) -> tuple[int, int]:
        return self.geometry.box_rows, self.geometry.box_cols

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        return grids_of(tokens)

    def given_cells(self, question: Grid) -> Mask:
        return question > 0

    def character(self, value: int) -> str:
        return str(value) if value else "."

    def colour(self, value: int) -> str:
        return ""

    def mistakes(self, question: Grid, answer: Grid, solution: Grid | None) -> list[str]:
        """By the rules: another solution than the one known is right too."""
        overwritten = int((answer != question)[question > 0].sum())
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

    def scored_cells(self, solutions: Integer[np.ndarray, "*n cells"]) -> Bool[np.ndarray, "*n cells"]:
        return np.ones(solutions.shape, bool)

    def unknown_cells(self, questions: Grids, solutions: Grids) -> Masks:
        return questions == 0

    def difficulties(
        self, questions: Grids, solutions: Grids, *, thorough: bool
    ) -> dict[str, Integer[np.ndarray, "n"]]:
        found = {"empty cells": (questions == 0).sum(axis=1)}
        if thorough:
            found["guesses of a solver"] = ratings(questions.astype(np.uint8), self.geometry)
        return found

    def broken_rules(self, questions: Grids, answers: Grids, solutions: Grids) -> dict[str, Bool[np.ndarray, "n"]]:
        size, units = self.geometry.size, self.geometry.units
        kinds = {"row": units[:size], "column": units[size : 2 * size], "box": units[2 * size :]}
        broken = {
            "a given overwritten": ((answers != questions) & (questions > 0)).any(axis=1),
            "a cell left empty": (answers == 0).any(axis=1),
        }
        for kind, cells in kinds.items():
            digits = np.sort(answers[:, cells], axis=2)
            twice = (digits[..., 1:] == digits[..., :-1]) & (digits[..., 1:] > 0)
            broken[f"a {kind} with a digit twice"] = twice.any(axis=(1, 2))
        return broken
