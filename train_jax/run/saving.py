"""Moves a run between its devices and its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.checkpoint import Checkpoints, Retention
from train_jax.run.folder import RunFolder
from train_jax.run.resume import check_data
from train_jax.runtime.processes import any_process, is_main_process
from train_jax.runtime.stopwatch import Stopwatch
from train_jax.start import Training


class Saving:
    """The checkpoints of a run with the arrays as its devices hold them."""

    def __init__(self, training: Training, folder: RunFolder, now: Callable[[], float] = time.monotonic):
        config = training.config
        self._now, self._last, self.folder = now, now(), folder
        self._training, self._devices = training, training.devices
        self._checkpoints = Checkpoints(folder, Retention(config.keep_checkpoints, config.keep_every_steps))
        self.first_step = 0
        """The step that `restore` continues from."""
        self.train_seconds = 0.0
        """Seconds of training before it."""
        self.damaged: tuple[str, ...] = ()
        """Why newer checkpoints were not used."""

    def restore(self, state: TrainState, carry: Any) -> tuple[TrainState, Any]:
        """State and carry on the devices: those of the newest checkpoint, the given ones if there is none. Collective.

        Raises `UserError` for a checkpoint of another model or of other data.
        """
        devices = self._devices
        resumed = self._checkpoints.restore_newest(state, devices.to_rows(carry), devices.row_sharding)
        if resumed is not None:
            check_data(self._training.config, resumed.notes["data"], self._training.task.fingerprint, resumed.step)
            self.first_step, self.damaged = resumed.step, resumed.damaged
            self.train_seconds = resumed.notes["train_seconds"]
            state, carry = resumed.state, devices.from_rows(resumed.carry, carry)
        return self._training.placement.place(state), devices.shard(carry)

    def start(
        self, step: int, state: TrainState, carry: Any, clock: Stopwatch, figures: Mapping[str, float] | None = None
    ) -> None:
        """Saves in the background; `figures`: of an evaluation after the same step. Collective."""
        notes = {"train_seconds": clock.seconds, "data": self._training.task.fingerprint}
        value, problem = None, None
        try:
            value = figure_of_best(figures or {}, self._training.config.keep_best)
        except UserError as error:  # of a task that does not name its figures: the checkpoint is saved all the same
            problem = error
        whole = self._training.placement.to_checkpoint(state)
        self._checkpoints.save(step, whole, self._devices.to_rows(carry), notes, value)
        self._last = self._now()
        if problem is not None:
            self.wait()
            raise problem

    def due(self, step: int, last: int, until_ready: Any) -> bool:
        """Whether to save after this step, of `last` steps; `until_ready`: results of the step. Collective.

        The first process decides by its clock. Log lines then end at the steps where they end without a checkpoint.
        """
        config = self._training.config
        if step == last or step % config.checkpoint_every_steps == 0:
            return True
        if not config.checkpoint_every_minutes or step % config.log_every_steps:
            return False
        jax.block_until_ready(until_ready)  # virtual devices cannot run another collective beside the step
        return any_process(is_main_process() and self._now() - self._last >= 60 * config.checkpoint_every_minutes)

    def finish(self, step: int, state: TrainState, carry: Any, clock: Stopwatch) -> None:
        """The same, and blocks until everything is on disk."""
        self.start(step, state, carry, clock)
        self.wait()

    def wait(self) -> None:
        """Blocks until everything that was started is on disk."""
        self._checkpoints.wait()

    def close(self) -> None:
        self._checkpoints.close()


def figure_of_best(figures: Mapping[str, float], name: str) -> float | None:
    """The value by which the best checkpoint is chosen, higher is better; `name`: of a figure, or minus and a name.

    None for no name and for no figures. Raises `UserError` if the evaluation has no such figure.
    """
    if not name or not figures:
        return None
    if name.removeprefix("-") not in figures:
        raise UserError(f"keep_best is {name}, which no evaluation has; use one of {', '.join(figures)}")
    value = figures[name.removeprefix("-")]
    return -value if name.startswith("-") else value
