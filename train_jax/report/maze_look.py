"""Mazes as they are drawn and judged."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer

from train_jax.puzzles.maze import CHARACTERS, GOAL, OPEN, PATH, START, WALL, are_mazes
from train_jax.puzzles.maze_check import are_shortest_paths, search
from train_jax.report.looks import Grid, Mask, wrong_cells

COLOURS = {WALL: "wall", PATH: "path", START: "end", GOAL: "end"}


@dataclass(frozen=True)
class MazeLook:
    """Values are tokens."""

    size: int
    box = None
    fills_question = True
    praise = "a shortest path from start to goal"

    @property
    def name(self) -> str:
        return f"{self.size}x{self.size} maze"

    @property
    def rows(self) -> int:
        return self.size

    @property
    def cols(self) -> int:
        return self.size

    def values(self, tokens: Integer[np.ndarray, "*batch seq"]) -> Integer[np.ndarray, "*batch cells"]:
        return np.asarray(tokens)[..., : self.size**2].astype(np.uint8)

    def fixed(self, question: Grid) -> Mask:
        return (question == START) | (question == GOAL)

    def character(self, value: int) -> str:
        return CHARACTERS[value] if value < len(CHARACTERS) else "?"

    def colour(self, value: int) -> str:
        return COLOURS.get(value, "")

    def objections(self, question: Grid, answer: Grid, solution: Grid | None) -> list[str]:
        """By the rules: another shortest path than the one known is right too."""
        if not are_mazes(question[None])[0]:
            return ["the question is no maze", *wrong_cells(answer, solution)]
        found = search(question[None])
        if are_shortest_paths(question[None], answer[None], found)[0]:
            return []
        reasons = wrong_cells(answer, solution)
        overwritten = int(((answer != question) & (question != OPEN)).sum())
        if overwritten:
            reasons.append(f"{overwritten} walls or ends overwritten")
        marked = (answer == PATH) & (question == OPEN)
        along = search(np.where(marked | self.fixed(question), np.where(marked, OPEN, question), WALL)[None])
        steps, cells = int(along.steps[0]), int(marked.sum())
        if not cells:
            reasons.append("no path marked")
        elif steps < 0:
            reasons.append(f"the {cells} cells marked do not join start and goal")
        elif cells > steps - 1:
            reasons.append(f"{cells - steps + 1} of the {cells} cells marked are not on the way")
        if steps > found.steps[0]:
            reasons.append(f"a path of {steps} steps where {found.steps[0]} do")
        return reasons
