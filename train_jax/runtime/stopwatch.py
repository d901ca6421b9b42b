"""Training time without evaluation and checkpoints, summed over all sessions of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax


class Stopwatch:
    """Measures training time, including compilation; evaluation and checkpoints pause it."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter):
        self._now, self._before = now, seconds
        self._since: float | None = now()
        self._lap = seconds

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else self._now() - self._since)

    def lap(self, steps: int) -> float:
        """Returns the seconds per step since the last lap."""
        lap, self._lap = self.seconds - self._lap, self.seconds
        return lap / steps

    def paused(self, until_ready: Any) -> _Pause:
        """Returns a context that blocks until `until_ready` is computed and pauses the stopwatch inside."""
        jax.block_until_ready(until_ready)
        return _Pause(self)


class _Pause:
    def __init__(self, watch: Stopwatch):
        self._watch = watch

    def __enter__(self) -> None:
        self._watch._before, self._watch._since = self._watch.seconds, None

    def __exit__(self, *_exception) -> None:
        self._watch._since = self._watch._now()
