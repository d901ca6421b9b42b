"""Batches made and put on the devices by a thread of their own, a few ahead of the step that wants them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class Feed:
    """`make(0)`, `make(1)`, … in order; an error in `make` comes out where the batch is asked for.

    Close it, or use it in a `with`: its thread holds batches in memory.
    """

    def __init__(self, make: Callable[[int], Any], count: int, ahead: int = 2):
        """`count`: how many there are; `ahead`: how many wait ready at most."""
        self._make, self._count = make, count
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(max(ahead, 1))
        self._closed = threading.Event()
        self._wait_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="feed", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for number in range(self._count):
            try:
                item = (self._make(number), None)
            except BaseException as error:
                item = (None, error)
            if not self._put(item) or item[1] is not None:
                return

    def _put(self, item: tuple[Any, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def next(self) -> Any:
        """The next batch; waits for it if it must."""
        start = time.perf_counter()
        batch, error = self._ready.get()
        self._wait_seconds += time.perf_counter() - start
        if error is not None:
            raise error
        return batch

    def waited(self) -> float:
        """Seconds that batches were waited for since this was last asked."""
        seconds, self._wait_seconds = self._wait_seconds, 0.0
        return seconds

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
