"""The batches of a run by step, and a thread that prefetches a few of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from train_jax.errors import UserError
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import process_shard
from train_jax.task import Task

if TYPE_CHECKING:
    from train_jax.core.state import TrainState


class Batches:
    """The batches of a run for the devices of this process: a function of the step, and of the state if needed."""

    def __init__(self, task: Task, devices: Devices, *, total_steps: int, steps_per_dispatch: int = 1, parts: int = 0):
        """`parts`: number of parts of a device's examples that the task makes one by one; 0 for a whole process."""
        self._task = task
        self._devices = devices
        self._parts = parts
        self._total_steps = total_steps
        self._steps_per_dispatch = steps_per_dispatch

    def at(self, step: int, state: TrainState | None = None) -> dict[str, np.ndarray]:
        """Returns the batch of one step, with a leading device axis."""
        if not self._parts:
            return self._devices.split_batch(self._task.batch(step, process_shard(), state))
        index, count = process_shard()
        here = len(self._devices.local) * self._parts
        shards = self._task.shards(step, [(index * here + part, count * here) for part in range(here)], state)
        check_alike(shards, "on one device and {} on a different one; pad it to one shape in collate")
        return self._devices.split_batch({name: np.concatenate([s[name] for s in shards]) for name in shards[0]})

    def dispatch(self, first: int) -> range:
        """Returns the steps that are dispatched at once after `first` steps, up to a multiple of their number."""
        size = self._steps_per_dispatch
        return range(first, min(first - first % size + size, self._total_steps))

    def dispatches(self, first: int) -> Sequence[range]:
        """Returns the steps of all dispatches after `first` steps."""
        return _Dispatches(self.dispatch, first, self._total_steps, self._steps_per_dispatch)

    def from_step(self, first: int, state: TrainState | None = None) -> dict[str, np.ndarray]:
        """Returns the batches of the dispatch after `first` steps; several steps are stacked along the second axis."""
        if self._steps_per_dispatch == 1:
            return self.at(first, state)
        batches = [self.at(step, state) for step in self.dispatch(first)]
        check_alike(batches, "at one step and {} at a different one of a dispatch; use --compute.steps-per-dispatch 1")
        return {name: np.stack([batch[name] for batch in batches], axis=1) for name in batches[0]}


def check_alike(batches: Sequence[dict[str, np.ndarray]], where: str) -> None:
    """Raises `UserError` for arrays of different shapes, which one program cannot have; `where` ends the message."""
    for name, array in batches[0].items():
        for other in batches[1:]:
            if other[name].shape != array.shape:
                end = where.format(other[name].shape)
                raise UserError(f"{name} of a batch has shape {array.shape} {end}")


class _Dispatches(Sequence[range]):
    """The dispatches from one step to another, computed when they are asked for: a run may have 10**12 of them."""

    def __init__(self, dispatch: Callable[[int], range], first: int, end: int, size: int):
        self._dispatch = dispatch
        self._first = first
        self._size = size
        before = first // size
        after = -(-end // size)
        self._count = after - before if first < end else 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        number = range(len(self))[index]
        start = (self._first // self._size + number) * self._size
        return self._dispatch(max(start, self._first))


class OnDemand:
    """The batches `make(0, state)`, `make(1, state)`, … in order, each computed for the current state."""

    def __init__(self, make: Callable[..., Any]):
        self._make = make
        self._number = 0
        self._peeked: list[Any] = []

    def next(self, state: TrainState) -> Any:
        """Returns the next batch; blocks until it is ready."""
        return self._peeked.pop() if self._peeked else self._take(state)

    def peek(self, state: TrainState) -> Any:
        """Returns the batch that `next` will return."""
        self._peeked.append(self.next(state))
        return self._peeked[0]

    def _take(self, state: TrainState) -> Any:
        batch = self._make(self._number, state)
        self._number = self._number + 1
        return batch

    def close(self) -> None: ...


class Feed(OnDemand):
    """Computes `make(0)`, `make(1)`, … in a thread; `next` raises the error if `make` failed.

    It must be closed, because the thread keeps batches in memory.
    """

    def __init__(self, make: Callable[[int], Any], count: int, ahead: int = 2):
        """`count` is the number of batches, `ahead` the largest number of prefetched batches."""
        super().__init__(make)
        self._count = count
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(max(ahead, 1))
        self._closed = threading.Event()
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

    def _take(self, state: TrainState) -> Any:
        batch, error = self._ready.get()
        if error is not None:
            raise error
        return batch

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
