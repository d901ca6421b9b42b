"""The fields of a run that only puzzles have."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from models_torch.ranges import Range, check_ranges
from train_jax.errors import UserError
from train_jax.tasks.task import TaskConfig

Cycles = Annotated[int, Range(1, 4096)]


@dataclasses.dataclass(frozen=True)
class PuzzleConfig(TaskConfig):
    """Data and recursion schedules of a puzzle run."""

    kind: str = ""
    """A kind of puzzle from outside the project, package.module:Class, for a data set that none here recognises."""
    data_weights: str = ""
    """Of several data sets, the share of each in a batch (3,1: three quarters and one); by default one pass over each
    takes equally many steps."""
    augment: bool = False
    """Draw a new symmetry for every training example, instead of copies stored in the data set; for Sudokus and mazes.
    Evaluation is never augmented."""
    curriculum_epochs: Annotated[float, Range(0, 1e12)] = 0
    """Passes over the data during which recursion deepens, both cycles linearly, to that of `arch`; 0: constant."""
    curriculum_start: tuple[Cycles, Cycles] = (1, 2)
    """H-cycles and L-cycles that the curriculum starts with."""
    halt_exploration_end: Annotated[float, Range(0, 1)] | None = None
    """The halting exploration changes linearly from `arch.halt_exploration_prob` to this at the last step."""

    def __post_init__(self):
        try:
            check_ranges(self)
        except ValueError as error:
            raise UserError(str(error)) from None
