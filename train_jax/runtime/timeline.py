"""What the main thread of a process spends its wall time on, without gaps."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

KINDS: tuple[str, ...] = ("steps", "start", "restore", "compile", "data", "evaluation", "saving", "end")
"""`start`: until the first step, with imports; `data`: until a batch is ready; `saving`: until the next step may run;
`end`: after the last step."""


class Timeline:
    """Divides the wall time from `since`, seconds of the epoch, among `KINDS`: at any moment it is one of them."""

    def __init__(self, since: float | None = None, now: Callable[[], float] | None = None):
        self._now = now or _steady_clock()
        self.since = self._now() if since is None else since
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kind, self._last = "start", self.since
        self._lock = threading.Lock()  # the heartbeat of a run reads in another thread
        self.step = 0
        """Steps that were dispatched, in all sessions of the run."""
        self.step_time = self.since
        """When the latest of them was."""

    def switch(self, kind: str) -> str:
        """From now on the time is of this kind. Returns the one before."""
        with self._lock:
            self._settle()
            before, self._kind = self._kind, kind
        return before

    @contextlib.contextmanager
    def doing(self, kind: str) -> Iterator[None]:
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def dispatched(self, step: int) -> None:
        self.step, self.step_time = step, self._now()

    def spent(self, *, take: bool = False) -> tuple[float, str, dict[str, float]]:
        """The time, its kind, and the seconds of each kind since they were last taken; `take`: count anew from here."""
        with self._lock:
            self._settle()
            rounded = {kind: round(value, 4) for kind, value in self._seconds.items()}
            seconds = {kind: value for kind, value in rounded.items() if value > 0}
            if take:  # what was rounded off stays
                self._seconds = {kind: value - seconds.get(kind, 0.0) for kind, value in self._seconds.items()}
            return self._last, self._kind, seconds

    def _settle(self) -> None:
        now = self._now()
        self._seconds[self._kind] += now - self._last
        self._last = now


def process_start() -> float:
    """When this process began, in seconds of the epoch; where the system does not tell, now."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            age = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - max(age, 0.0)
    except (OSError, ValueError, IndexError):
        return time.time()


def _steady_clock() -> Callable[[], float]:
    """Seconds of the epoch that do not jump when somebody sets the clock."""
    offset = time.time() - time.perf_counter()
    return lambda: offset + time.perf_counter()
