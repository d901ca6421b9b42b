"""One Sudoku as a model worked on it: what it was asked, what it answered after each ACT step, where that is wrong."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, UInt8

from train_jax.puzzles.format import Metadata
from train_jax.puzzles.sudoku import GEOMETRIES, Geometry, is_solution


class Stretch(NamedTuple):
    """ACT steps after which the grid was the same, counted from 1, both ends included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"ACT step {self.first}" if self.first == self.last else f"ACT steps {self.first}-{self.last}"


@dataclass(frozen=True)
class Trace:
    """Grids are digits, 0 for an empty cell; ACT steps count from 1, and step 0 is the question."""

    geometry: Geometry
    question: UInt8[np.ndarray, "cells"]
    answers: UInt8[np.ndarray, "steps cells"]
    q_halt_logits: Float[np.ndarray, "steps"]
    solution: UInt8[np.ndarray, "cells"] | None = None
    """None where it is not known."""

    @property
    def givens(self) -> Bool[np.ndarray, "cells"]:
        return self.question > 0

    @property
    def act_steps(self) -> int:
        return len(self.answers)

    def grid(self, step: int) -> UInt8[np.ndarray, "cells"]:
        return self.answers[step - 1] if step else self.question

    def changed(self, step: int) -> Bool[np.ndarray, "cells"]:
        """Cells that differ from the step before."""
        return self.grid(step) != self.grid(step - 1)

    def wrong(self, step: int) -> Bool[np.ndarray, "cells"]:
        """Cells that differ from the solution; none where that is not known."""
        if self.solution is None or step == 0:
            return np.zeros(self.geometry.cells, bool)
        return self.grid(step) != self.solution

    def solved(self, step: int) -> bool:
        """Whether the grid is a solution that keeps every given."""
        grid = self.grid(step)
        return bool(is_solution(grid[None], self.geometry)[0] and (grid == self.question)[self.givens].all())

    @property
    def stretches(self) -> list[Stretch]:
        """All ACT steps, those together that follow each other without a change."""
        starts = [1, *(step for step in range(2, self.act_steps + 1) if self.changed(step).any())]
        return [Stretch(a, b - 1) for a, b in zip(starts, [*starts[1:], self.act_steps + 1], strict=True)]


def halting_probability(logit: float) -> float:
    return float(1 / (1 + np.exp(-np.float64(logit))))


def sudoku_of(data: Metadata) -> Geometry | None:
    """The Sudoku whose grids a data set holds; None if it holds something else."""
    for geometry in GEOMETRIES.values():
        if (data.seq_len, data.vocab_size) == (geometry.cells, geometry.vocab_size):
            return geometry
    return None
