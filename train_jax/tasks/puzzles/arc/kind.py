"""The kind of ARC puzzles: how they are recognised, read, drawn and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Bool, Integer

from train_jax.errors import UserError
from train_jax.tasks.puzzles.arc.canvas import canvas_of, grid_on
from train_jax.tasks.puzzles.arc.grid import (
    CELLS,
    FIRST_COLOUR_TOKEN,
    PAD_TOKEN,
    SIDE,
    UNKNOWN,
    VOCAB_SIZE,
    Example,
    sizes_of,
)
from train_jax.tasks.puzzles.arc.json import read_task
from train_jax.tasks.puzzles.arc.symmetry import canonical
from train_jax.tasks.puzzles.kind import Examples, Grid, Grids, Mask, Masks, PuzzleInput, Tokens
from train_jax.tasks.puzzles.location import read_identifiers
from train_jax.tasks.puzzles.metadata import Metadata


@dataclass(frozen=True)
class ArcKind:
    """The kind of ARC puzzles. Its values are the tokens of the first `rows` rows and `cols` columns of the canvas."""

    rows: int = SIDE
    cols: int = SIDE
    box = None
    key = "arc"
    name = "ARC puzzle"
    seq_len = CELLS
    vocab_size = VOCAB_SIZE
    has_named_puzzles = True
    transform = None
    unknown_solution = canvas_of(UNKNOWN)
    fills_inputs = False
    success_message = "every cell equals the solution"
    alternative_solution = "correct in voting, with wrong cells outside the grid"

    @classmethod
    def from_key(cls, key: str) -> Self | None:
        return cls() if key == cls.key else None

    @classmethod
    def recognise(cls, data: Metadata) -> Self | None:
        return cls() if (data.seq_len, data.vocab_size) == (cls.seq_len, cls.vocab_size) else None

    def parse(self, text: str) -> PuzzleInput:
        raise UserError("the model was trained on ARC puzzles; give --file TASK.json instead of --puzzle")

    def read(self, path: Path, *, data_dir: str, index: int = 0) -> PuzzleInput:
        puzzle = read_task(path)
        names = read_identifiers(data_dir)
        if puzzle.name not in names:
            raise UserError(
                f"puzzle {puzzle.name} is not in {data_dir}, so the model has no learned embedding of it; give the "
                "file of a puzzle that it was trained on, such as 007bbfb7.json"
            )
        examples = puzzle.sections["test"]
        if not 0 <= index < len(examples):
            raise UserError(f"--index {index}: {path} has test examples 0 to {len(examples) - 1}; use one of these")
        example = examples[index]
        return PuzzleInput(
            f"test example {index} of {path}",
            self,
            canvas_of(example.input),
            None if example.output is UNKNOWN else canvas_of(example.output),
            puzzle_identifier=names.index(puzzle.name),
        )

    def fingerprints(self, inputs: Tokens, labels: Tokens) -> list[bytes]:
        return [canonical(Example(*map(grid_on, pair))) for pair in zip(inputs, labels, strict=True)]

    def inspect(self, examples: Examples) -> dict[str, str]:
        return {}

    def summary(self, inputs: Integer[np.ndarray, "n seq"]) -> str:
        return ""

    def fitted(self, canvases: Sequence[Integer[np.ndarray, "..."]]) -> "ArcKind":
        return arc_kind_of(canvases)

    def visible_answers(
        self, answers: Integer[np.ndarray, "steps seq"], solution: Integer[np.ndarray, "seq"]
    ) -> Integer[np.ndarray, "steps seq"]:
        """Replaces the cells outside both the solution and the rectangle that is read as the answer by padding."""
        rows, cols = sizes_of(answers)
        row, col = np.divmod(np.arange(CELLS), SIDE)
        is_read = (row < rows[:, None]) & (col < cols[:, None])
        return np.where(is_read | (solution != PAD_TOKEN), answers, PAD_TOKEN)

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        tokens = np.asarray(tokens).astype(np.uint8)
        canvas = tokens.reshape(*tokens.shape[:-1], SIDE, SIDE)[..., : self.rows, : self.cols]
        return canvas.reshape(*tokens.shape[:-1], -1)

    def given_cells(self, inputs: Grid) -> Mask:
        return np.zeros(len(inputs), bool)

    def character(self, value: int) -> str:
        is_colour = FIRST_COLOUR_TOKEN <= value < VOCAB_SIZE
        return str(value - FIRST_COLOUR_TOKEN) if is_colour else " " if value == PAD_TOKEN else "."

    def colour(self, value: int) -> str:
        return f"arc{value - FIRST_COLOUR_TOKEN}" if FIRST_COLOUR_TOKEN <= value < VOCAB_SIZE else ""

    def mistakes(self, inputs: Grid, answer: Grid, solution: Grid | None) -> list[str] | None:
        """The answer is the largest rectangle of colours in the upper left corner, as in voting."""
        if solution is None:
            return None
        sizes = [self._size(grid) for grid in (answer, solution)]
        if sizes[0] != sizes[1]:
            shapes = [f"{rows}x{cols}" for rows, cols in sizes]
            return [f"the grid is {shapes[0]}, expected {shapes[1]}"]
        rows, cols = sizes[1]
        cut = [grid.reshape(self.rows, self.cols)[:rows, :cols] for grid in (answer, solution)]
        wrong = int((cut[0] != cut[1]).sum())
        return [f"{wrong} of {rows * cols} cells wrong"] if wrong else []

    def scored_cells(self, solutions: Integer[np.ndarray, "*n cells"]) -> Bool[np.ndarray, "*n cells"]:
        """The cells of the grid and its end tokens; predictions outside are never read."""
        return solutions != PAD_TOKEN

    def unknown_cells(self, inputs: Grids, solutions: Grids) -> Masks:
        return solutions != PAD_TOKEN

    def difficulties(self, inputs: Grids, solutions: Grids, *, thorough: bool) -> dict[str, Integer[np.ndarray, "n"]]:
        return {"cells of the solution": (solutions >= FIRST_COLOUR_TOKEN).sum(axis=1)}

    def broken_rules(self, inputs: Grids, answers: Grids, solutions: Grids) -> dict[str, Bool[np.ndarray, "n"]]:
        """Takes whole canvases, not the part of `rows` x `cols`."""
        (rows, cols), right = sizes_of(answers), sizes_of(solutions)
        same_rows, same_cols = rows == right[0], cols == right[1]
        coloured = solutions >= FIRST_COLOUR_TOKEN
        return {
            "no grid that can be read": rows == 0,
            "too few or too many rows": ~same_rows & (rows > 0),
            "too few or too many columns": ~same_cols & (rows > 0),
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
    """Returns the kind with the smallest `rows` and `cols` that contain every cell of the canvases."""
    used = np.concatenate([np.atleast_2d(canvas) for canvas in canvases]) != PAD_TOKEN
    used = used.any(axis=0).reshape(SIDE, SIDE)
    if not used.any():
        return ArcKind(1, 1)
    return ArcKind(*(int(np.flatnonzero(used.any(axis=axis))[-1]) + 1 for axis in (1, 0)))
