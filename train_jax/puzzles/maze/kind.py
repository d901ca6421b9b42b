"""The kinds of mazes, one per size: how they are recognised, parsed, transformed, drawn and checked."""

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
    number_range,
    wrong_cells,
)
from train_jax.puzzles.maze.grid import (
    CHARACTERS,
    GOAL,
    LARGEST,
    OPEN,
    PATH,
    SMALLEST,
    START,
    VOCAB_SIZE,
    WALL,
    are_mazes,
    are_shortest_paths,
    fingerprints,
    on_shortest_paths,
    parse,
    search,
    size_of,
    symmetries_of,
    transform_tokens,
)
from train_jax.puzzles.metadata import Metadata

COLOURS = {WALL: "wall", PATH: "path", START: "end", GOAL: "end"}
SMALLEST_RECOGNISED = 5
"""A 4x4 maze has the same sequence length and vocabulary size as a 4x4 Sudoku, so only its metadata identifies it."""


@dataclass(frozen=True)
class MazeKind(Kind):
    """The kind of mazes of `size` rows. Its values are tokens."""

    size: int
    vocab_size = VOCAB_SIZE
    transform = staticmethod(transform_tokens)

    @classmethod
    def every_size(cls) -> Iterable[Self]:
        return map(cls, range(SMALLEST, LARGEST + 1))

    @classmethod
    def recognise(cls, data: Metadata) -> Self | None:
        kind = super().recognise(data)
        return None if kind is None or kind.size < SMALLEST_RECOGNISED else kind

    @property
    def key(self) -> str:
        return f"maze-{self.size}"

    @property
    def name(self) -> str:
        return f"{self.size}x{self.size} maze"

    @property
    def seq_len(self) -> int:
        return self.size**2

    @property
    def symmetries(self) -> Symmetry:
        return partial(symmetries_of, size=self.size)

    @property
    def drawing(self) -> Drawing:
        return MazeDrawing(self.size, self.size)

    @property
    def checking(self) -> Checking:
        return MazeChecking()

    def parse(self, text: str) -> PuzzleInput:
        tokens = parse(text)
        size = size_of(len(tokens))
        if size != self.size:
            raise UserError(
                f"the maze is {size}x{size}, expected a {self.name} as in training; give a maze of {self.size} rows"
            )
        paths = search(tokens[None])
        if paths.steps[0] < 0:
            raise UserError(f"the {self.name} given has no path from start to goal; remove walls between them")
        unique = bool(paths.unique[0])
        solution = on_shortest_paths(tokens[None])[0] if unique else None
        return PuzzleInput(f"{self.name} given", self, tokens, solution, unique)

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        return np.asarray(tokens)[..., : self.size**2].astype(np.uint8)

    def fingerprints(self, inputs: Tokens, labels: Tokens) -> UInt64[np.ndarray, "n"]:
        return fingerprints(inputs)

    def inspect(self, examples: Examples) -> dict[str, str]:
        inputs, labels = (tokens[examples.sample].astype(np.uint8) for tokens in (examples.inputs, examples.labels))
        of_sample = f"of {len(inputs):,} checked"
        good = are_mazes(inputs)
        if not good.all():
            return {"inputs that are not mazes": f"{(~good).sum():,} {of_sample}"}
        paths = search(inputs)
        wrong = ~are_shortest_paths(inputs, labels, paths)
        return {
            "steps of the shortest path": number_range(paths.steps),
            "labels that are not a shortest path": f"{wrong.sum():,} {of_sample}",
            "mazes with several shortest paths": f"{(~paths.unique).sum():,} {of_sample}",
        }


class MazeDrawing(Drawing):
    def given_cells(self, inputs: Grid) -> Mask:
        return (inputs == START) | (inputs == GOAL)

    def character(self, value: int) -> str:
        return CHARACTERS[value] if value < len(CHARACTERS) else "?"

    def colour(self, value: int) -> str:
        return COLOURS.get(value, "")


class MazeChecking(Checking):
    success_message = "a shortest path from start to goal"

    def mistakes(self, inputs: Grid, answer: Grid, solution: Grid | None) -> list[str]:
        """Checks the rules of the puzzle: a shortest path other than that of the solution is correct too."""
        if not are_mazes(inputs[None])[0]:
            return ["the input is not a maze", *wrong_cells(answer, solution)]
        paths = search(inputs[None])
        if are_shortest_paths(inputs[None], answer[None], paths)[0]:
            return []
        reasons = wrong_cells(answer, solution)
        overwritten = int(((answer != inputs) & (inputs != OPEN)).sum())
        if overwritten:
            reasons.append(f"{overwritten} walls or ends overwritten")
        marked = (answer == PATH) & (inputs == OPEN)
        steps = _steps_along(inputs, marked)
        cells = int(marked.sum())
        if not cells:
            reasons.append("no path marked")
        elif steps < 0:
            reasons.append(f"the {cells} cells marked do not connect start and goal")
        elif cells > steps - 1:
            reasons.append(f"{cells - steps + 1} of the {cells} cells marked are not on the path")
        if steps > paths.steps[0]:
            reasons.append(f"a path of {steps} steps, the shortest has {paths.steps[0]}")
        return reasons


def _steps_along(inputs: Grid, marked: Mask) -> int:
    """Returns the length of a shortest path over marked cells only; -1 if there is none."""
    ends = (inputs == START) | (inputs == GOAL)
    return int(search(np.where(marked, OPEN, np.where(ends, inputs, WALL)).astype(np.uint8)[None]).steps[0])
