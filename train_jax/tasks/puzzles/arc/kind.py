"""ARC grids as they are drawn and judged."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Integer

from train_jax.tasks.puzzles.arc.grid import FIRST_COLOUR_TOKEN, PAD_TOKEN, SIDE, VOCAB_SIZE, sizes_of
from train_jax.tasks.puzzles.kind import Grid, Grids, Mask, Masks


@dataclass(frozen=True)
class ArcKind:
    """Values are tokens of the upper left part of the canvas."""

    rows: int = SIDE
    cols: int = SIDE
    box = None
    fills_inputs = False
    success_message = "every cell as in the solution"
    alternative_solution = "right as it is read in voting, with a cell wrong outside the grid"

    @property
    def name(self) -> str:
        return "ARC puzzle"

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        tokens = np.asarray(tokens).astype(np.uint8)
        canvas = tokens.reshape(*tokens.shape[:-1], SIDE, SIDE)[..., : self.rows, : self.cols]
        return canvas.reshape(*tokens.shape[:-1], -1)

    def given_cells(self, question: Grid) -> Mask:
        return np.zeros(len(question), bool)

    def character(self, value: int) -> str:
        is_colour = FIRST_COLOUR_TOKEN <= value < VOCAB_SIZE
        return str(value - FIRST_COLOUR_TOKEN) if is_colour else " " if value == PAD_TOKEN else "."

    def colour(self, value: int) -> str:
        return f"arc{value - FIRST_COLOUR_TOKEN}" if FIRST_COLOUR_TOKEN <= value < VOCAB_SIZE else ""

    def mistakes(self, question: Grid, answer: Grid, solution: Grid | None) -> list[str] | None:
        """Read as in voting: the largest rectangle of colours in the corner is the answer."""
        if solution is None:
            return None
        sizes = [self._size(grid) for grid in (answer, solution)]
        if sizes[0] != sizes[1]:
            told = [f"{rows}x{cols}" for rows, cols in sizes]
            return [f"a grid of {told[0]} where {told[1]} is right"]
        rows, cols = sizes[1]
        cut = [grid.reshape(self.rows, self.cols)[:rows, :cols] for grid in (answer, solution)]
        wrong = int((cut[0] != cut[1]).sum())
        return [f"{wrong} of {rows * cols} cells wrong"] if wrong else []

    def scored_cells(self, solutions: Integer[np.ndarray, "*n cells"]) -> Bool[np.ndarray, "*n cells"]:
        """The grid and the end tokens around it; what a model writes farther out is never read."""
        return solutions != PAD_TOKEN

    def unknown_cells(self, questions: Grids, solutions: Grids) -> Masks:
        return solutions != PAD_TOKEN

    def difficulties(
        self, questions: Grids, solutions: Grids, *, thorough: bool
    ) -> dict[str, Integer[np.ndarray, "n"]]:
        return {"cells of the solution": (solutions >= FIRST_COLOUR_TOKEN).sum(axis=1)}

    def broken_rules(self, questions: Grids, answers: Grids, solutions: Grids) -> dict[str, Bool[np.ndarray, "n"]]:
        """Of whole canvases."""
        found, wanted = sizes_of(answers), sizes_of(solutions)
        same_rows, same_cols = (one == other for one, other in zip(found, wanted, strict=True))
        coloured = solutions >= FIRST_COLOUR_TOKEN
        return {
            "no grid that can be read": found[0] == 0,
            "too few or too many rows": ~same_rows & (found[0] > 0),
            "too few or too many columns": ~same_cols & (found[0] > 0),
            "the right size, cells of another colour": same_rows
            & same_cols
            & ((answers != solutions) & coloured).any(axis=1),
        }

    def _size(self, grid: Grid) -> tuple[int, int]:
        canvas = np.full((SIDE, SIDE), PAD_TOKEN, np.uint8)
        canvas[: self.rows, : self.cols] = grid.reshape(self.rows, self.cols)
        rows, cols = sizes_of(canvas.reshape(1, -1))
        return int(rows[0]), int(cols[0])


def arc_kind_of(canvases: Sequence[Integer[np.ndarray, "n 900"]]) -> ArcKind:
    """As much of the canvas as these need."""
    used = np.concatenate([np.atleast_2d(canvas) for canvas in canvases]) != PAD_TOKEN
    used = used.any(axis=0).reshape(SIDE, SIDE)
    if not used.any():
        return ArcKind(1, 1)
    return ArcKind(*(int(np.flatnonzero(used.any(axis=axis))[-1]) + 1 for axis in (1, 0)))


def as_read(
    answers: Integer[np.ndarray, "steps 900"], solution: Integer[np.ndarray, "900"]
) -> Integer[np.ndarray, "steps 900"]:
    """Without what lies outside the solution and outside the rectangle that is the answer: nothing trains it."""
    rows, cols = sizes_of(answers)
    row, col = np.divmod(np.arange(SIDE * SIDE), SIDE)
    read = (row < rows[:, None]) & (col < cols[:, None])
    return np.where(read | (solution != PAD_TOKEN), answers, PAD_TOKEN)
