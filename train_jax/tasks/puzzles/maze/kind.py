"""Mazes as they are drawn and judged."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Integer

from train_jax.tasks.puzzles.kind import Grid, Grids, Mask, Masks, wrong_cells
from train_jax.tasks.puzzles.maze.check import are_shortest_paths, search
from train_jax.tasks.puzzles.maze.grid import CHARACTERS, GOAL, OPEN, PATH, START, WALL, are_mazes

COLOURS = {WALL: "wall", PATH: "path", START: "end", GOAL: "end"}


@dataclass(frozen=True)
class MazeKind:
    """Values are tokens."""

    size: int
    box = None
    fills_inputs = True
    success_message = "a shortest path from start to goal"
    alternative_solution = "another shortest path"

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

    def given_cells(self, question: Grid) -> Mask:
        return (question == START) | (question == GOAL)

    def character(self, value: int) -> str:
        return CHARACTERS[value] if value < len(CHARACTERS) else "?"

    def colour(self, value: int) -> str:
        return COLOURS.get(value, "")

    def mistakes(self, question: Grid, answer: Grid, solution: Grid | None) -> list[str]:
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
        marked = _marked(question, answer)
        steps, cells = int(_steps_along(question[None], marked[None])[0]), int(marked.sum())
        if not cells:
            reasons.append("no path marked")
        elif steps < 0:
            reasons.append(f"the {cells} cells marked do not join start and goal")
        elif cells > steps - 1:
            reasons.append(f"{cells - steps + 1} of the {cells} cells marked are not on the way")
        if steps > found.steps[0]:
            reasons.append(f"a path of {steps} steps where {found.steps[0]} do")
        return reasons

    def scored_cells(self, solutions: Integer[np.ndarray, "*n cells"]) -> Bool[np.ndarray, "*n cells"]:
        return np.ones(solutions.shape, bool)

    def unknown_cells(self, questions: Grids, solutions: Grids) -> Masks:
        return questions == OPEN

    def difficulties(
        self, questions: Grids, solutions: Grids, *, thorough: bool
    ) -> dict[str, Integer[np.ndarray, "n"]]:
        return {"steps of the path": (solutions == PATH).sum(axis=1) + 1}

    def broken_rules(self, questions: Grids, answers: Grids, solutions: Grids) -> dict[str, Bool[np.ndarray, "n"]]:
        real = are_mazes(questions)
        marked = _marked(questions, answers) & real[:, None]
        cells = marked.sum(axis=1)
        steps, shortest = np.zeros(len(questions), int), np.zeros(len(questions), int)
        steps[real] = _steps_along(questions[real], marked[real])
        shortest[real] = search(questions[real]).steps
        joined = steps > 0
        return {
            "a wall, the start or the goal overwritten": ((answers != questions) & (questions != OPEN)).any(axis=1)
            | ~np.isin(answers, [WALL, OPEN, START, GOAL, PATH]).all(axis=1),
            "no path marked": real & (cells == 0),
            "start and goal not joined": real & ~joined & (cells > 0),
            "cells marked that are not on the way": joined & (cells > steps - 1),
            "a longer path than needed": joined & (steps > shortest),
        }


def _marked(question: Integer[np.ndarray, "*n cells"], answer: Integer[np.ndarray, "*n cells"]) -> np.ndarray:
    return (answer == PATH) & (question == OPEN)


def _steps_along(questions: Grids, marked: Masks) -> Integer[np.ndarray, "n"]:
    """Of a shortest path over marked cells alone; -1 where there is none."""
    ends = (questions == START) | (questions == GOAL)
    return search(np.where(marked, OPEN, np.where(ends, questions, WALL)).astype(np.uint8)).steps
