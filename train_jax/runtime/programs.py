"""The compiled train steps of a run, one for each variant and shape of a batch; the next variant's is compiled in the
background."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from train_jax.runtime.clock import Clock
from train_jax.runtime.coordination import wait_for_processes
from train_jax.runtime.devices import Devices
from train_jax.task import VariantSchedule

MANY_SHAPES = 4
"""Number of shapes of a batch after which a new one causes a warning."""


class _Key(NamedTuple):
    """What a program is compiled for."""

    variant: Any
    steps: int
    """Number of steps in a dispatch."""
    shapes: tuple[tuple[int, ...], ...]
    """Those of the arrays of a batch."""


class Programs:
    """Train steps by variant and number of steps in a dispatch, compiled ahead of time."""

    def __init__(
        self,
        devices: Devices,
        step_at: Callable[[Any], Any],
        variants: VariantSchedule,
        clock: Clock | None = None,
        saved_at: Callable[[Any, int], Path | None] = lambda _stage, _steps: None,
    ):
        """`step_at(variant)` returns the parallel train step of a variant, not yet compiled. `clock` counts the waits.

        `saved_at(variant, steps)` names the file with the program of a variant and a dispatch; None to compile it.
        """
        self._saved_at = saved_at
        self._clock = clock or Clock()
        self._news: list[str] = []
        self._devices = devices
        self._step_at = step_at
        self.variants = variants
        self._compiled: dict[_Key, Future] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._called: frozenset[Any] = frozenset()
        self._ready: set[_Key] = set()

    def get(self, step: int, steps: int, args: tuple) -> Callable[..., Any]:
        """Returns the program for the `steps` steps that follow the first `step` ones, compiled for `args`.

        Blocks until it is compiled, and starts to compile that of the next variant.
        """
        key = _Key(self.variants.at(step), steps, _shapes(args))
        if key not in self._compiled:
            self._start(key, args)
        with self._clock.doing("compile"):
            compiled = self._compiled[key].result()
            if key not in self._ready:
                # No process begins the step, which takes the memory of the state, while another one could not follow.
                wait_for_processes("compiled")
                self._ready.add(key)
        following = self.variants.after(step)
        known = key._replace(variant=following) in self._compiled or self._devices.compiles_for_arrays
        if following is not None and not known:
            self._start(key._replace(variant=following), args)
        return functools.partial(self._call, compiled)

    def _call(self, compiled: Any, *args: Any) -> Any:
        # No transfer between host and devices during dispatch, except while the program compiles.
        known = compiled in self._called
        self._called = self._called | {compiled}
        with jax.transfer_guard("disallow" if known else "allow"):
            return compiled(*args)

    @property
    def compiles(self) -> int:
        return len(self._compiled)

    def flops(self) -> float | None:
        """Returns the FLOPs of one step on one device, as counted by XLA for the latest compiled program."""
        analysis = getattr(self._latest(), "cost_analysis", dict)() or {}
        # XLA counts the body of a scan once, so this is one step of the dispatch.
        return float(analysis["flops"]) if analysis.get("flops", 0) > 0 else None

    def text(self) -> str:
        """Returns the latest compiled program as XLA prints it; empty for `pmap` on several hosts, which has none."""
        return getattr(self._latest(), "as_text", str)() or ""

    def _latest(self) -> Any:
        return next((future.result() for future in reversed(self._compiled.values()) if future.done()), None)

    def _start(self, key: _Key, args: tuple) -> None:
        alike = [each for each in self._compiled if each[:2] == key[:2]]
        if len(alike) == MANY_SHAPES:
            shape = next(shape for shape in key.shapes if shape not in alike[-1].shapes)
            self._news.append(f"warning: {MANY_SHAPES} shapes of batches are compiled, {shape} is new; pad to fewer")
        shapes = args if self._devices.compiles_for_arrays else jax.tree.map(_shape, args)

        def compiled() -> Any:
            start = time.perf_counter()
            saved = self._saved_at(key.variant, key.steps)
            made, source = self._devices.compile(self._step_at(key.variant), shapes, saved)
            seconds = time.perf_counter() - start
            how = f"loaded in {seconds:.1f} s" if saved else f"compiled in {seconds:.1f} s,"
            self._news.append(f"train step {how} {source}")
            return made

        self._compiled[key] = self._pool.submit(compiled)

    def news(self) -> list[str]:
        """Returns one line for each program that was compiled since the last call."""
        lines = self._news
        self._news = []
        return lines

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _shapes(args: tuple) -> tuple[tuple[int, ...], ...]:
    _state, _carry, batch, *_ = args
    return tuple(array.shape for array in batch.values())


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
