"""The configuration fields of puzzle runs."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from models_torch.ranges import Range, check_ranges
from train_jax.errors import UserError
from train_jax.task import TaskConfig

Cycles = Annotated[int, Range(1, 4096)]


@dataclasses.dataclass(frozen=True)
class PuzzleConfig(TaskConfig):
    """Data and schedules of a puzzle run."""

    kind: str = ""
    """Kind of puzzle of your own, package.module:Class, for data sets that no built-in kind recognises."""
    data_weights: str = ""
    """Share of each data set in a batch, for several data sets (3,1: three quarters and one quarter); by default one
    pass over each data set takes the same number of steps."""
    augment: bool = False
    """Transform every training example by a random symmetry, for Sudokus and mazes; replaces stored augmentations.
    Evaluation is never augmented."""
    curriculum_epochs: Annotated[float, Range(0, 1e12)] = 0
    """Epochs during which H-cycles and L-cycles increase linearly to those of `arch`; 0: constant."""
    curriculum_start: tuple[Cycles, Cycles] = (1, 2)
    """H-cycles and L-cycles at the start of the curriculum."""
    halt_exploration_end: Annotated[float, Range(0, 1)] | None = None
    """Halting exploration at the last step; it changes linearly, starting from `arch.halt_exploration_prob`."""

    def __post_init__(self):
        try:
            check_ranges(self)
        except ValueError as error:
            raise UserError(str(error)) from None
