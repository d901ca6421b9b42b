"""The input, the answer after each ACT step, and the mistakes of a model on one puzzle."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.tasks.puzzles.kind import Kind


class Stretch(NamedTuple):
    """Consecutive ACT steps, from `first` to `last` inclusive, that have the same grid. Steps count from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"ACT step {self.first}" if self.first == self.last else f"ACT steps {self.first}-{self.last}"


@dataclass(frozen=True)
class Trace:
    """The answers to one puzzle, as values of its kind. ACT steps count from 1, and step 0 is the input."""

    kind: Kind
    inputs: Integer[np.ndarray, "cells"]
    answers: Integer[np.ndarray, "steps cells"]
    q_halt_logits: Float[np.ndarray, "steps"]
    solution: Integer[np.ndarray, "cells"] | None = None
    """None if it is unknown."""

    @property
    def given_cells(self) -> Bool[np.ndarray, "cells"]:
        return self.kind.given_cells(self.inputs)

    @property
    def act_steps(self) -> int:
        return len(self.answers)

    def grid(self, step: int) -> Integer[np.ndarray, "cells"]:
        return self.answers[step - 1] if step else self.inputs

    def changed(self, step: int) -> Bool[np.ndarray, "cells"]:
        """Returns the cells that differ from the step before; none at step 1 unless `kind.fills_inputs`."""
        if step == 0 or (step == 1 and not self.kind.fills_inputs):
            return np.zeros(len(self.inputs), bool)
        return self.grid(step) != self.grid(step - 1)

    def wrong(self, step: int) -> Bool[np.ndarray, "cells"]:
        """Returns the scored cells that differ from the solution; none if it is unknown."""
        if self.solution is None or step == 0:
            return np.zeros(len(self.inputs), bool)
        return (self.grid(step) != self.solution) & self.kind.scored_cells(self.solution)

    def mistakes(self, step: int) -> list[str] | None:
        """Returns the mistakes in words; an empty list if the grid is correct, None if that is unknown."""
        return self.kind.mistakes(self.inputs, self.grid(step), self.solution)

    def solved(self, step: int) -> bool:
        """Returns whether the grid has no mistakes."""
        return self.mistakes(step) == []

    @property
    def stretches(self) -> list[Stretch]:
        """All ACT steps, grouped into runs without a change."""
        starts = [1, *(step for step in range(2, self.act_steps + 1) if self.changed(step).any())]
        return [Stretch(a, b - 1) for a, b in zip(starts, [*starts[1:], self.act_steps + 1], strict=True)]


def halting_probability(logit: float) -> float:
    return float(1 / (1 + np.exp(-np.float64(logit))))
