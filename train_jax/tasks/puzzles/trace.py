"""One puzzle as a model worked on it: the input, the answer after each ACT step, and where that is wrong."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.tasks.puzzles.kind import Kind


class Stretch(NamedTuple):
    """ACT steps after which the grid was the same, counted from 1, both ends included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"ACT step {self.first}" if self.first == self.last else f"ACT steps {self.first}-{self.last}"


@dataclass(frozen=True)
class Trace:
    """Grids are values as `kind` has them; ACT steps count from 1, and step 0 is the input."""

    kind: Kind
    inputs: Integer[np.ndarray, "cells"]
    answers: Integer[np.ndarray, "steps cells"]
    q_halt_logits: Float[np.ndarray, "steps"]
    solution: Integer[np.ndarray, "cells"] | None = None
    """None where it is not known."""

    @property
    def given_cells(self) -> Bool[np.ndarray, "cells"]:
        return self.kind.given_cells(self.inputs)

    @property
    def act_steps(self) -> int:
        return len(self.answers)

    def grid(self, step: int) -> Integer[np.ndarray, "cells"]:
        return self.answers[step - 1] if step else self.inputs

    def changed(self, step: int) -> Bool[np.ndarray, "cells"]:
        """Cells that differ from the step before; none at the first step where an answer is not the input filled in."""
        if step == 0 or (step == 1 and not self.kind.fills_inputs):
            return np.zeros(len(self.inputs), bool)
        return self.grid(step) != self.grid(step - 1)

    def wrong(self, step: int) -> Bool[np.ndarray, "cells"]:
        """Cells that should be as in the solution and are not; none where that is not known."""
        if self.solution is None or step == 0:
            return np.zeros(len(self.inputs), bool)
        return (self.grid(step) != self.solution) & self.kind.scored_cells(self.solution)

    def mistakes(self, step: int) -> list[str] | None:
        """Why the grid is not right; empty where it is, None where that is not known."""
        return self.kind.mistakes(self.inputs, self.grid(step), self.solution)

    def solved(self, step: int) -> bool:
        """Whether the grid is right by the rules, or as the solution where there are none."""
        return self.mistakes(step) == []

    @property
    def stretches(self) -> list[Stretch]:
        """All ACT steps, those together that follow each other without a change."""
        starts = [1, *(step for step in range(2, self.act_steps + 1) if self.changed(step).any())]
        return [Stretch(a, b - 1) for a, b in zip(starts, [*starts[1:], self.act_steps + 1], strict=True)]


def halting_probability(logit: float) -> float:
    return float(1 / (1 + np.exp(-np.float64(logit))))
