"""SIGTERM, the notice that a machine is about to be taken away: save, and end with a status of its own.

The main thread looks for a notice after every step. It cannot while it compiles or evaluates, which may take minutes.
So another thread waits for the signal too, and saves and ends the process if the main thread does not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from train_jax.errors import PreemptedError

PATIENCE_SECONDS = 3.0
"""How long the main thread is given to reach the end of a step."""


class Preemption:
    """Watches for SIGTERM while it is entered.

    With several processes JAX makes all of them stop after the same step, and only the main threads save.
    """

    def __init__(self):
        self.lock = threading.RLock()
        """Held by the main thread while it dispatches a step, which takes the memory of the state, or saves."""
        self._save: Callable[[], None] | None = None
        self._step = 0
        self._noticed, self._left = threading.Event(), threading.Event()

    def after_step(self, step: int, save: Callable[[], None]) -> None:
        """Call it with the lock held. `save` blocks until the state after `step` is on disk, in whichever thread."""
        self._step, self._save = step, save

    def check(self, before_saving: Callable[[], None]) -> None:
        """At the end of a step: saves and raises `PreemptedError` if there was a notice."""
        if jax.process_count() > 1:
            stops = multihost_utils.reached_preemption_sync_point(self._step)
        else:
            stops = self._noticed.is_set()
        if stops and self._save is not None:
            with self.lock:
                self._left.set()
                before_saving()
                self._save()
            raise PreemptedError(self._step)

    def _wait(self, pipe: int) -> None:
        while os.read(pipe, 1) != bytes([signal.SIGTERM]):  # other signals that Python handles arrive here, too
            if self._left.is_set():
                return
        self._noticed.set()
        if self._left.wait(PATIENCE_SECONDS):
            return
        with self.lock:
            if not self._left.is_set():
                self._end()

    def _end(self) -> None:
        """The main thread cannot be interrupted, but it needs the lock for everything that this would disturb."""
        error = PreemptedError(self._step)
        try:
            if self._save is not None:
                self._save()
            status, message = error.STATUS, str(error)
        except BaseException as cause:
            status, message = 1, f"stopped by SIGTERM; saving failed ({cause})"
        sys.stderr.write(f"trm: {message}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Preemption]:
        """In the main thread of the only process; elsewhere it does nothing."""
        if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
            yield self
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before: Any = signal.signal(signal.SIGTERM, lambda *_: None)
        wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._wait, args=(read,), name="preemption", daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            self._left.set()
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, before)
            os.write(write, b"\0")
            watcher.join()
            os.close(read)
            os.close(write)
