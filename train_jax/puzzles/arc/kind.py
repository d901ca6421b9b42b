"""The kind of ARC puzzles: how they are recognised, read, drawn and checked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Bool, Integer

from train_jax.errors import UserError
from train_jax.puzzles.arc.grid import (
    CELLS,
    FIRST_COLOUR_TOKEN,
    SIDE,
    UNKNOWN,
    VOCAB_SIZE,
    Example,
    canonical,
    canvas_of,
    grid_on,
    sizes_of,
)
from train_jax.puzzles.arc.json import read_task
from train_jax.puzzles.building import PAD_TOKEN
from train_jax.puzzles.kind import Checking, Drawing, Grid, Kind, PuzzleInput, Tokens
from train_jax.puzzles.metadata import read_identifiers


@dataclass(frozen=True)
class ArcKind(Kind):
    """The kind of ARC puzzles. Its values are the tokens of the first `rows` rows and `cols` columns of the canvas."""

    rows: int = SIDE
    cols: int = SIDE
    key = "arc"
    name = "ARC puzzle"
    seq_len = CELLS
    vocab_size = VOCAB_SIZE
    unknown_solution = canvas_of(UNKNOWN)

    @classmethod
    def every_size(cls) -> Iterable[Self]:
        return [cls()]

    @property
    def drawing(self) -> Drawing:
        return ArcDrawing(self.rows, self.cols, fills_inputs=False)

    @property
    def checking(self) -> Checking:
        return ArcChecking(self.rows, self.cols)

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

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        tokens = np.asarray(tokens).astype(np.uint8)
        canvas = tokens.reshape(*tokens.shape[:-1], SIDE, SIDE)[..., : self.rows, : self.cols]
        return canvas.reshape(*tokens.shape[:-1], -1)

    def fitted(self, canvases: Sequence[Integer[np.ndarray, "..."]]) -> "ArcKind":
        used = np.concatenate([np.atleast_2d(canvas) for canvas in canvases]) != PAD_TOKEN
        used = used.any(axis=0).reshape(SIDE, SIDE)
        if not used.any():
            return ArcKind(1, 1)
        return ArcKind(*(int(np.flatnonzero(used.any(axis=axis))[-1]) + 1 for axis in (1, 0)))

    def visible_answers(
        self, answers: Integer[np.ndarray, "steps seq"], solution: Integer[np.ndarray, "seq"]
    ) -> Integer[np.ndarray, "steps seq"]:
        """Replaces the cells outside both the solution and the rectangle that is read as the answer by padding."""
        rows, cols = sizes_of(answers)
        row, col = np.divmod(np.arange(CELLS), SIDE)
        is_read = (row < rows[:, None]) & (col < cols[:, None])
        return np.where(is_read | (solution != PAD_TOKEN), answers, PAD_TOKEN)

    def fingerprints(self, inputs: Tokens, labels: Tokens) -> list[bytes]:
        return [canonical(Example(*map(grid_on, pair))) for pair in zip(inputs, labels, strict=True)]


class ArcDrawing(Drawing):
    def character(self, value: int) -> str:
        is_colour = FIRST_COLOUR_TOKEN <= value < VOCAB_SIZE
        return str(value - FIRST_COLOUR_TOKEN) if is_colour else " " if value == PAD_TOKEN else "."

    def colour(self, value: int) -> str:
        return f"arc{value - FIRST_COLOUR_TOKEN}" if FIRST_COLOUR_TOKEN <= value < VOCAB_SIZE else ""


@dataclass(frozen=True)
class ArcChecking(Checking):
    rows: int
    cols: int

    def mistakes(self, inputs: Grid, answer: Grid, solution: Grid | None) -> list[str] | None:
        """Returns the mistakes of the answer, which is the largest rectangle of colours in the upper left corner."""
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
        """Returns the cells of the grid and its end tokens; predictions outside are never read."""
        return solutions != PAD_TOKEN

    def _size(self, grid: Grid) -> tuple[int, int]:
        canvas = np.full((SIDE, SIDE), PAD_TOKEN, np.uint8)
        canvas[: self.rows, : self.cols] = grid.reshape(self.rows, self.cols)
        rows, cols = sizes_of(canvas.reshape(1, -1))
        return int(rows[0]), int(cols[0])
