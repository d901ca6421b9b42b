"""The checkpoints of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax

from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.checkpoint import Checkpoints, Resumed, Retention
from train_jax.run.folder import RunFolder
from train_jax.runtime.processes import any_process, is_main_process
from train_jax.trainer.hooks.log_lines import Logging
from train_jax.trainer.session import Hook, Session
from train_jax.trainer.start import Training


class Saving(Hook):
    """Writes the checkpoints of a run, and restores the newest one."""

    def __init__(self, training: Training, folder: RunFolder, logging: Logging):
        config = training.config
        self._training = training
        self._logging = logging
        self._checkpoints = Checkpoints(folder, Retention(config.keep_checkpoints, config.keep_every_steps))
        self._last: float | None = None
        self.lock: contextlib.AbstractContextManager = contextlib.nullcontext()
        """Held while a save begins, so that no other thread begins one that the other processes do not."""

    def restore(self, state: TrainState) -> Resumed | None:
        """Returns what the run continues from, on the host; None if there is no checkpoint. Collective.

        `state` gives structure, shapes and dtypes. Raises `UserError` for a checkpoint of another model.
        """
        return self._checkpoints.restore_newest(state, self._training.devices.row_sharding)

    def after(self, session: Session, metrics: Any) -> None:
        if self.due(session.step, session.clock.now(), metrics):
            # Last, so that everything up to a checkpoint is logged.
            self._logging.flush(session)
            with self.lock, session.pausing("saving"):
                self.start(session)
            session.events.progress()

    def due(self, step: int, now: float, until_ready: Any) -> bool:
        """Returns whether to save after this step; `until_ready` are results of the step. Collective.

        The first process decides by its clock. Log lines then end at the steps where they end without a checkpoint.
        """
        config = self._training.config
        self._last = now if self._last is None else self._last
        if step == self._training.total_steps or step % config.checkpoint_every_steps == 0:
            self._last = now
            return True
        if not config.checkpoint_every_minutes or step % config.log_every_steps:
            return False
        jax.block_until_ready(until_ready)  # virtual devices cannot run another collective beside the step
        due = any_process(is_main_process() and now - self._last >= 60 * config.checkpoint_every_minutes)
        self._last = now if due else self._last
        return due

    def start(self, session: Session) -> None:
        """Starts to save in the background. Collective."""
        training = self._training
        session.tracker.sync()  # a checkpoint has the metrics of all steps before it
        notes = {"train_seconds": session.clock.train_seconds, "data": training.task.fingerprint}
        value = None
        problem = None
        try:
            value = figure_of_best(session.metrics, training.config.keep_best)
        except UserError as error:  # a task may not name its metrics; the checkpoint is saved all the same
            problem = error
        whole = training.placement.to_checkpoint(session.state)
        rows = training.devices.to_rows(session.carry)
        self._checkpoints.save(session.step, whole, rows, notes, value)
        if problem is not None:
            self.wait()
            raise problem

    def wait(self) -> None:
        """Blocks until everything that is being saved is on disk."""
        self._checkpoints.wait()

    def end(self, session: Session) -> None:
        with session.clock.doing("saving"):
            self.wait()

    def close(self) -> None:
        self._checkpoints.close()


def figure_of_best(metrics: Mapping[str, float], name: str) -> float | None:
    """Returns the value that selects the best checkpoint, higher is better; None if there are no metrics.

    `name` is that of a metric, with a minus in front if lower is better. Raises `UserError` for an unknown one.
    """
    if not name or not metrics:
        return None
    if name.removeprefix("-") not in metrics:
        raise UserError(f"keep_best is {name}, which no evaluation has; use one of {', '.join(metrics)}")
    value = metrics[name.removeprefix("-")]
    return -value if name.startswith("-") else value
