"""A notice that the machine will be taken away."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

from train_jax.runtime.preemption import Preemption
from train_jax.trainer.hooks.log_lines import Logging
from train_jax.trainer.hooks.saving import Saving
from train_jax.trainer.session import Hook, Session


class Preempting(Hook):
    """Saves and ends the process after a notice that the machine will be taken away."""

    def __init__(self, preemption: Preemption, logging: Logging, saving: Saving):
        self._preemption = preemption
        self._logging = logging
        self._saving = saving
        saving.lock = preemption.lock

    @contextlib.contextmanager
    def around(self, session: Session) -> Iterator[None]:
        self._preemption.before_step(session.step, lambda: self._logging.flush(session))
        with self._preemption.lock:
            yield
            self._preemption.after_step(session.step, partial(self._save, copy.copy(session)))

    def _save(self, session: Session) -> None:
        with session.clock.doing("saving"):
            self._saving.start(session)
            self._saving.wait()
        session.events.end("preempted")

    def after(self, session: Session, metrics: Any) -> None:
        self._preemption.check()
