"""The clock of a run: what the main thread of a process spends its wall time on, without gaps.

Goodput, `train_seconds` and the seconds per step are all read from it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

KINDS: tuple[str, ...] = ("steps", "start", "restore", "compile", "data", "evaluation", "saving", "profile", "end")
"""Kinds of wall time. `start`: until the first step, with imports; `data`: until a batch is ready; `saving`: until the
next step may run; `profile`: what the profiler itself takes; `end`: after the last step."""
TRAINING = ("steps", "compile", "data")
"""The kinds that count as training time."""


class Clock:
    """Divides the wall time from `since`, in seconds of the epoch, among `KINDS`: at any moment it is one of them."""

    def __init__(self, since: float | None = None, now: Callable[[], float] | None = None):
        self.now = now or _steady_clock()
        """Returns the seconds of the epoch."""
        self.since = self.now() if since is None else since
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._taken, self._lap = dict(self._seconds), dict(self._seconds)
        self._kind = "start"
        self._last = self.since
        self._lock = threading.Lock()  # the heartbeat of a run reads in another thread
        self.earlier_train_seconds = 0.0
        """Training time of earlier sessions of the run."""
        self.step = 0
        """Number of steps that were dispatched, in all sessions of the run."""
        self.step_time = self.since
        """Time at which the latest of these steps was dispatched."""

    def switch(self, kind: str) -> str:
        """Counts the time from now on as this kind. Returns the previous kind."""
        with self._lock:
            self._settle()
            before = self._kind
            self._kind = kind
        return before

    @contextlib.contextmanager
    def doing(self, kind: str) -> Iterator[None]:
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def dispatched(self, step: int) -> None:
        self.step, self.step_time = step, self.now()

    @property
    def train_seconds(self) -> float:
        """Seconds of training in all sessions: steps, compilation and waits for data."""
        with self._lock:
            self._settle()
            return self.earlier_train_seconds + sum(self._seconds[kind] for kind in TRAINING)

    def lap(self) -> dict[str, float]:
        """Returns the seconds of each kind of training time since the last call."""
        with self._lock:
            self._settle()
            before = self._lap
            self._lap = dict(self._seconds)
        return {kind: self._lap[kind] - before[kind] for kind in TRAINING}

    def spent(self, *, take: bool = False) -> tuple[float, str, dict[str, float]]:
        """Returns the time, its kind, and the seconds of each kind since they were last taken (`take`)."""
        with self._lock:
            self._settle()
            spent = {kind: round(value - self._taken[kind], 4) for kind, value in self._seconds.items()}
            spent = {kind: value for kind, value in spent.items() if value > 0}
            if take:  # the rounding errors do not add up
                self._taken = {kind: value + spent.get(kind, 0.0) for kind, value in self._taken.items()}
            return self._last, self._kind, spent

    def _settle(self) -> None:
        now = self.now()
        self._seconds[self._kind] += now - self._last
        self._last = now


def process_start() -> float:
    """Returns the time at which this process began, in seconds of the epoch; the current time if it is not known."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            age = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - max(age, 0.0)
    except (OSError, ValueError, IndexError):
        return time.time()


def _steady_clock() -> Callable[[], float]:
    """Returns a function of the seconds of the epoch that does not jump when the system's clock is set."""
    offset = time.time() - time.perf_counter()
    return lambda: offset + time.perf_counter()
