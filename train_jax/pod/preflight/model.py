"""The run's own model on the device beside PyTorch on the host, and the memory of its compiled step."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np

from train_jax.pod.compile import memory_of, train_step_arguments
from train_jax.pod.preflight.row import Row, row
from train_jax.run.comparison import TOLERANCE, compared
from train_jax.run.config import RunConfig
from train_jax.runtime.devices import Devices
from train_jax.start import Training, assemble
from train_jax.task import Task

MEMORY_WARN = 0.9
_MEMINFO = Path("/proc/meminfo")


def batch_row(training: Training) -> Row:
    """That the run's configuration can be trained, and its batches on these devices."""
    config, devices = training.config, training.devices
    local = devices.local_batch_size(config.global_batch_size)
    text = f"{config.global_batch_size} examples, {local} on a device; evaluation {config.eval_batch_size}"
    return Row("configuration trains", "PASS", text, f"multiples of {devices.count} devices")


def check_model(config: RunConfig, task: Task) -> Row:
    """`bridge.verify` of the module's call in the first training step: outputs, gradients and buffers, in float32."""
    report = compared(config, task)
    beyond = report.count("beyond tolerance")
    worst = report.worst
    where = report.environment
    text = f"{len(report.rows)} leaves in float32, products {where.matmul_precision}, on {where.device}"
    shown = f"; {beyond} differ, most {worst.kind} {worst.name} by {worst.error:.0e}" if beyond else ""
    biggest = max((each.error for each in report.rows), default=0.0)
    return row(
        "model beside PyTorch",
        f"{text}{shown or f'; largest error {biggest:.0e}'}",
        fail=bool(beyond) or not report.rows,
        limit=f"{TOLERANCE:.0e}, or 8 x PyTorch's own rounding",
        remedy="do not train here: does it pass with --platform cpu? then the device computes wrongly",
    )


# ---- memory


def check_memory(training: Training) -> Row:
    """Compiles the train step for shapes alone and compares its memory with that of a device.

    With several processes it is compiled under `shard_map`: `pmap` cannot do it ahead of time.
    """
    devices = training.devices
    if devices.compiles_for_arrays:
        devices = Devices(runner="shard_map")
        training = assemble(training.config, training.task, devices)
    begin = time.perf_counter()
    lowered = training.parallel_step().lower(*train_step_arguments(training))
    try:
        memory = memory_of(lowered.compile())
    except jax.errors.JaxRuntimeError as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return Row("memory", "FAIL", f"the compiler refuses the train step: {reason[:300]}", "", _REMEDY)
    seconds = time.perf_counter() - begin
    limit, of_what = memory_limit(devices)
    if limit is None:
        return Row("memory", "WARN", f"train step {_size(memory.peak)} on a device", "", "the limit is not known")
    share = memory.peak / limit
    return row(
        "memory",
        f"train step {_size(memory.peak)} of {_size(limit)} {of_what}, compiled in {seconds:.1f} s",
        fail=share > 1,
        warn=share > MEMORY_WARN,
        limit=f"WARN above {MEMORY_WARN:.0%}, FAIL above 100%",
        remedy=_REMEDY,
    )


_REMEDY = (
    "--compute.remat blocks, a larger --compute.accumulation-steps, or a smaller --global-batch-size; "
    "`trm compile-pod` shows what takes the memory"
)


def memory_limit(devices: Devices) -> tuple[int | None, str]:
    """Bytes that a device has, and what they are; None if nobody says."""
    statistics = devices.local[0].memory_stats() or {}
    if statistics.get("bytes_limit"):
        return int(statistics["bytes_limit"]), "on a device"
    if devices.local[0].platform != "cpu":
        return None, ""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024 // len(devices.local), "of the host for each device"
    except (OSError, KeyError, ValueError):
        return None, ""


def state_bytes(training: Training) -> int:
    """Bytes of everything in a checkpoint's model and optimizer."""
    shapes = jax.eval_shape(training.initial_state)
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
