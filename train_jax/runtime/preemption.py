"""Handles SIGTERM, the notice that a machine will be taken away: saves, and ends the process with its own exit status.

The main thread looks for a notice at every step. It cannot while it compiles or evaluates, which may take minutes. So
another thread waits too, and saves and ends the process if the main thread does not.

One process with a notice stops all processes of a run. They exchange the number of the last step that they have begun,
and begin no further one. The highest of them is the step to stop at: none can finish it without the others, and none
has begun the next one, which would take the memory of the state after it. This takes no longer than the messages do, as
no process waits for its main thread to agree.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from train_jax.errors import PreemptedError
from train_jax.runtime.exits import exit_now
from train_jax.runtime.processes import peers

if TYPE_CHECKING:
    from train_jax.runtime.peers import Peers

PATIENCE_SECONDS = 3.0
"""Seconds for the main thread to reach the end of a step."""
CLOSING_SECONDS = 4.0
"""Seconds for the main thread to end the process after it has saved."""


class Preemption:
    """Watches for SIGTERM inside a `with` block."""

    def __init__(self):
        self.lock = threading.RLock()
        """Held by the main thread while it dispatches a step, which takes the memory of the state, or saves."""
        self._save: Callable[[], None] | None = None
        self._log: Callable[[], None] = lambda: None
        self._step = 0
        self._saved = False
        self._ended = threading.Event()
        self._agreement = _Agreement(peers())

    def before_step(self, step: int, log: Callable[[], None]) -> None:
        """Begins the step with this number; called when there is nothing left to wait for.

        `log`: writes the metrics of the steps before it. Saves and raises `PreemptedError` if the run stops.
        """
        self._log = log
        if not self._agreement.begin(step):
            self._stop()

    def after_step(self, step: int, save: Callable[[], None]) -> None:
        """Sets how to save after `step`; call it with the lock held. `save` blocks until the state is on disk."""
        self._step = step
        self._save = save

    def check(self) -> None:
        """Saves and raises `PreemptedError` at the end of a step if the run stops there."""
        if self._agreement.stops_at(self._step):
            self._stop()

    def _stop(self) -> None:
        with self.lock:
            if self._save is not None:
                self._log()
                self._save()
            self._saved = True
        raise PreemptedError(self._step)

    # ---- the other threads

    def _listen(self, pipe: int) -> None:
        while (byte := os.read(pipe, 1)) != b"\0":
            if byte == bytes([signal.SIGTERM]):  # other signals that Python handles arrive here, too
                self._agreement.propose()

    def _watch(self) -> None:
        stop = self._agreement.result()
        if stop is None or self._ended.wait(PATIENCE_SECONDS):
            return
        while not self._saved:
            # The main thread cannot be interrupted, but it needs the lock for everything that this would disturb.
            with self.lock:
                if not self._saved and self._step >= stop:
                    self._end()
            if self._ended.wait(0.1):
                return
        if not self._ended.wait(CLOSING_SECONDS):
            self._exit(PreemptedError.STATUS, str(PreemptedError(self._step)))

    def _end(self) -> None:
        try:
            if self._save is not None:
                with contextlib.suppress(Exception):  # the weights are more important
                    self._log()
                self._save()
        except BaseException as cause:
            self._exit(1, f"stopped by SIGTERM; saving failed ({cause})")
        self._exit(PreemptedError.STATUS, str(PreemptedError(self._step)))

    def _exit(self, status: int, message: str) -> None:
        sys.stderr.write(f"trm: {message}\n")
        connected = peers()
        if connected is not None:
            connected.leave(CLOSING_SECONDS)
        exit_now(status, "preempted" if status == PreemptedError.STATUS else f"error: {message}")

    @contextlib.contextmanager
    def watching(self) -> Iterator[Preemption]:
        """Watches in the main thread; does nothing in other threads, and in processes that do not know each other."""
        known = jax.process_count() == 1 or peers() is not None
        if not known or threading.current_thread() is not threading.main_thread():
            yield self
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before: Any = signal.signal(signal.SIGTERM, lambda *_: None)
        wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(read,), name="SIGTERM", daemon=True)
        listener.start()
        threading.Thread(target=self._watch, name="preemption", daemon=True).start()
        try:
            yield self
        finally:
            self._ended.set()
            self._agreement.close()
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, before)
            os.write(write, b"\0")
            listener.join()
            os.close(read)
            os.close(write)


class _Agreement:
    """The agreement of all processes on the step at which they stop."""

    def __init__(self, connected: Peers | None):
        self._peers = connected
        self._changed = threading.Condition()
        self._begun = 0
        self._proposed = False
        self._closed = False
        self._stop: int | None = None
        self._votes: dict[int, int] = {}
        if connected is not None:
            connected.listen("preempted", lambda *_: self._vote())
            connected.listen("begun", self._count)

    def propose(self) -> None:
        if self._peers is None:
            self._vote()
        else:
            self._peers.send("preempted")

    def begin(self, step: int) -> bool:
        """Returns True if the step may begin; blocks until that is known."""
        with self._changed:
            self._changed.wait_for(self._known)
            if self._stop is not None and step > self._stop:
                return False
            self._begun = step
            return True

    def stops_at(self, step: int) -> bool:
        with self._changed:
            self._changed.wait_for(self._known)
            return self._stop is not None and step >= self._stop

    def result(self) -> int | None:
        """Returns the step; blocks until it is known, or until `close`, after which it may be None."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._stop is not None)
            return self._stop

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _known(self) -> bool:
        return not self._proposed or self._stop is not None

    def _vote(self) -> None:
        with self._changed:
            if self._proposed:
                return
            self._proposed = True
            begun = self._begun
        if self._peers is None:
            self._count(0, begun)
        else:
            self._peers.send("begun", begun)

    def _count(self, process: int, begun: int) -> None:
        with self._changed:
            self._votes[process] = begun
            if len(self._votes) == (1 if self._peers is None else self._peers.count):
                self._stop = max(self._votes.values())
                if self._peers is not None:
                    self._peers.agreed_to_stop = True
                self._changed.notify_all()
