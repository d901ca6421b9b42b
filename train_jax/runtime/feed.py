"""What a run trains on, step by step, and a thread of its own that has it ready a few batches ahead of the step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from train_jax.run.config import RunConfig
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.batches import Batch
from train_jax.tasks.puzzles.mixture import Mixture


class Batches:
    """A run's batches for the devices of this process: a function of the step and of nothing that happened before."""

    def __init__(self, config: RunConfig, data: Mixture, devices: Devices, total_steps: int):
        self._config, self._data, self._devices, self._total_steps = config, data, devices, total_steps

    def at(self, step: int) -> Batch:
        """A leading axis for the devices."""
        size, shard = self._config.global_batch_size, self._devices.shard()
        found = self._data.train_batch(
            seed=self._config.seed, step=step, batch_size=size, shard=shard, augment=self._config.augment
        )
        return self._devices.split(found)

    def from_step(self, first: int) -> Batch:
        """What the dispatch after `first` steps trains on; with several steps a dispatch an axis for them."""
        together = self._config.compute.steps_per_dispatch
        if together == 1:
            return self.at(first)
        batches = [self.at(step) for step in range(first, min(first + together, self._total_steps))]
        return {name: np.stack([batch[name] for batch in batches], axis=1) for name in batches[0]}


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
