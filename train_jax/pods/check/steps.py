"""The run's train step on the devices: time, utilization, bytes, and waiting time for its input."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train_jax.errors import UserError
from train_jax.pods.check.context import Context
from train_jax.pods.check.rows import Row, absent, named
from train_jax.pods.compile import first_line, memory_of
from train_jax.run import performance
from train_jax.run.choices import read_choices
from train_jax.run.kernels import kernels
from train_jax.runtime.compilation import entries_apart, save_program
from train_jax.runtime.coordination import exchange, place
from train_jax.runtime.devices import Runner
from train_jax.runtime.feed import Feed
from train_jax.trainer.start import Training

WINDOWS = 5
WINDOW_SECONDS = 0.25
SAME_LOSS = 2e-2
"""Largest relative difference of the first losses between two variants, which round at different places."""
MOST_WAIT = 0.25
"""Share of the time of a step; devices that wait less than this for their input do not wait."""
_INPUT_STEPS = 12


class Stepper:
    """The compiled train step of a run with its state, which every call replaces."""

    def __init__(self, training: Training, file: Path | None = None):
        """Saves the program in `file` before its first step; after the step, XLA for CPUs cannot write it."""
        self.training = training
        devices = training.devices
        state = training.initial_state()
        batch = training.batches.from_step(0)
        carry = devices.shard(training.initial_carry(state, batch))
        self._given = training.placement.place(state), carry
        self.batch = devices.shard(batch)
        self._key = devices.random_key(training.config.seed)
        arguments = (*self._given, self.batch, self._key)
        shapes = arguments if devices.compiles_for_arrays else jax.tree.map(_shape, arguments)
        begin = time.perf_counter()
        self.lowered = training.parallel_step().lower(*shapes)
        with contextlib.nullcontext() if file is None else entries_apart():  # what the cache has cannot be saved again
            self.program = training.parallel_step() if devices.compiles_for_arrays else self.lowered.compile()
        self.compile_seconds = time.perf_counter() - begin
        self.saved = [] if file is None else [_saved(file, self)]
        begin = time.perf_counter()
        self.first_loss = _loss(self(self.batch))
        self.compile_seconds += time.perf_counter() - begin

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Runs one step; returns its metrics."""
        *self._given, metrics = self.program(*self._given, batch, self._key)
        return metrics

    def run(self, steps: int) -> float:
        """Returns the seconds per step over several steps with the same batch."""
        begin = time.perf_counter()
        pending = []
        for _ in range(steps):
            self.training.devices.limit_dispatch(pending)
            pending = [*pending[-2:], self(self.batch)]
        jax.block_until_ready(pending)
        return (time.perf_counter() - begin) / steps

    def seconds(self) -> list[float]:
        """Returns the seconds per step of each window. Collective: the first process chooses the steps of a window."""
        steps = max(1, round(WINDOW_SECONDS / self.run(1)))
        steps = int(exchange("prove steps", str(steps))[0])
        return [self.run(steps) for _ in range(WINDOWS)]


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _loss(metrics: dict[str, Any]) -> float:
    name = next(name for name in metrics if name.endswith("loss"))
    return float(np.asarray(metrics[name]).reshape(-1)[0])


def step_rows(context: Context) -> list[Row]:
    """Times the step for each variant of kernels and each runner."""
    rows = list[Row]()
    first = None
    platform = context.devices.platform
    measured = read_choices(str(context.choices)) if context.choices.exists() else ""
    chosen = context.config.compute.choices or exchange("prove choices", measured)[0]
    plain = {"attention": "plain", "mlp": "plain", "choices": ""}
    variants: dict[str, dict[str, Any]] = {
        "plain": plain,
        "fused": {"attention": "fused", "mlp": "fused", "choices": ""},
        "chosen": plain | {"choices": chosen},
    }
    without = {"fused": f"a {platform} has no kernels of ours", "chosen": "nothing but the plain path was chosen"}
    runners: tuple[Runner, ...] = ("pmap", "shard_map")
    for variant, fields in variants.items():
        used = kernels(dataclasses.replace(context.config.compute, **fields), platform)["lowerings"]
        if variant in without and not used:
            rows.append(absent(f"step, {variant}", without[variant]))
            continue
        for runner in runners:
            training = context.training(runner, **fields)
            name = f"{variant}, {runner}"
            saves = (variant, runner) == ("plain", "shard_map") and place()[1] == 1
            try:
                stepper = Stepper(training, context.program if saves else None)
            except (UserError, jax.errors.JaxRuntimeError) as error:
                rows.append(named(f"step, {name}", first_line(error)[:300], fail=True))
                continue
            first = stepper.first_loss if first is None else first
            rows += _rows_of(name, stepper, first) + stepper.saved
            del stepper  # frees its state before the next one is made
    return rows


def _rows_of(name: str, stepper: Stepper, loss: float) -> list[Row]:
    seconds = stepper.seconds()
    median = statistics.median(seconds)
    training = stepper.training
    text = f"{1e3 * median:.2f} ms ({1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f})"
    text += f", {training.config.global_batch_size / median:.0f} examples/s; first step {stepper.compile_seconds:.1f} s"
    figures = {"step_ms": 1e3 * median, "first_step_s": stepper.compile_seconds}
    kind = training.devices.local[0].device_kind
    peak, bandwidth = (each.get(kind) for each in (performance.PEAK_BF16_FLOPS, performance.PEAK_BYTES_PER_SECOND))
    analysis = getattr(stepper.program, "cost_analysis", dict)() or {}
    if analysis.get("bytes accessed", 0) > 0:
        accessed = float(analysis["bytes accessed"])
        figures["bytes"] = accessed
        text += f"; {accessed / 1e9:.2f} GB to and from memory by XLA's count"
        if peak and bandwidth:
            estimate = max(float(analysis.get("flops", 0)) / peak, accessed / bandwidth)
            text = f"{text}, at least {1e3 * estimate:.2f} ms"
            figures["estimate_ms"] = 1e3 * estimate
    if hasattr(stepper.program, "memory_analysis"):
        text += f"; {memory_of(stepper.program).peak / 2**20:.0f} MiB on a device"
    other = abs(stepper.first_loss - loss) > SAME_LOSS * abs(loss) or not np.isfinite(stepper.first_loss)
    text += f"; first loss {stepper.first_loss:.6g}"
    rows = [named(f"step, {name}", text, fail=other, limit=f"loss {loss:.6g} within {SAME_LOSS:g}", **figures)]
    flops = performance.model_flops(training.config, training.task, training.devices.count)
    if peak is None or flops is None:
        reason = f"the peak of a {kind} is not known" if peak is None else "the FLOPs of your own model are not counted"
        return [*rows, absent(f"MFU, {name}", reason)]
    share = flops / median / peak
    text = f"{share:.2%} of {peak / 1e12:.0f} TFLOP/s; {flops / 1e12:.3f} TFLOP in a step on a device"
    return [*rows, named(f"MFU, {name}", text, fail=share > 1, limit="at most 100%", mfu=share)]


def _saved(file: Path, stepper: Stepper) -> Row:
    begin = time.perf_counter()
    try:
        save_program(file, stepper.lowered, stepper.program, stepper.training.devices.local)
    except UserError as error:  # XLA for CPUs cannot write every operation
        return absent("program, saved", str(error))
    seconds = time.perf_counter() - begin
    size = file.stat().st_size
    return named("program, saved", f"{size / 1e6:.1f} MB in {seconds:.1f} s", seconds=seconds)


def input_rows(context: Context) -> list[Row]:
    """Runs steps with the run's own batches, and measures how long they wait for them."""
    training = context.training(context.config.compute.runner)
    if training.task.needs_state:
        return [absent("input wait", "the batches are made by the model itself")]
    stepper = Stepper(training)
    batches = training.batches
    devices = training.devices
    count = min(_INPUT_STEPS, len(batches.dispatches(0)))
    feed = Feed(lambda number: devices.shard(batches.from_step(number)), count, training.config.compute.batches_ahead)
    waits = []
    total = []
    try:
        for _ in range(count):
            begin = time.perf_counter()
            batch = feed.next(None)  # pyright: ignore[reportArgumentType]
            waits.append(time.perf_counter() - begin)
            jax.block_until_ready(stepper(batch))
            total.append(time.perf_counter() - begin)
    finally:
        feed.close()
    late = count // 3  # no step could hide the preparation of the first batches
    share = sum(waits[late:]) / sum(total[late:])
    text = f"{1e3 * statistics.median(waits[late:]):.2f} ms of a step's {1e3 * statistics.median(total[late:]):.2f} ms"
    return [named("input wait", text, fail=share > MOST_WAIT, limit=f"{MOST_WAIT:.0%}", share=share)]
