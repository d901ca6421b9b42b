"""A run in progress, and the base class of the hooks of the training loop."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from train_jax.core.state import TrainState
from train_jax.run.events import Events
from train_jax.run.folder import RunFolder
from train_jax.run.tracking import Tracker
from train_jax.runtime.clock import Clock
from train_jax.runtime.programs import Programs
from train_jax.trainer.start import Training


@dataclasses.dataclass
class Session:
    """The part of a run in one process, from a checkpoint or the first step on. Hooks read and change it."""

    training: Training
    folder: RunFolder
    clock: Clock
    events: Events
    tracker: Tracker
    programs: Programs
    state: TrainState
    """The state on the devices, placed by `training.placement`."""
    carry: Any
    dispatch: range
    """The steps that are dispatched together now, or were last: `dispatch.stop` steps are complete afterwards."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the evaluations after the last step; empty if there were none."""

    @property
    def step(self) -> int:
        """Number of steps that are complete or dispatched."""
        return self.dispatch.stop

    @property
    def total_steps(self) -> int:
        return self.training.total_steps

    @contextlib.contextmanager
    def pausing(self, kind: str) -> Iterator[None]:
        """Waits for the dispatched steps; counts the time of the block as this kind of the clock."""
        jax.block_until_ready(self.state)
        with self.clock.doing(kind):
            yield

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.tracker.say(line)


class Hook:
    """Work between the steps of a run. The loop calls the methods of all hooks in the order of the hooks."""

    def before(self, session: Session, batch: Any) -> None:
        """Called before a dispatch, which donates state, carry and batch."""

    def around(self, session: Session) -> AbstractContextManager:
        """Returns a context around the dispatch of `session.dispatch`, entered when the program is compiled."""
        return contextlib.nullcontext()

    def after(self, session: Session, metrics: Any) -> None:
        """Called after a dispatch; `metrics` are the results of its steps, on the devices."""

    def end(self, session: Session) -> None:
        """Called after the last step of the run."""
