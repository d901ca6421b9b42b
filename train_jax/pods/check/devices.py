"""Checks of the devices: that they exist and compute correctly; of the run's model on them, compared with PyTorch on
the host; and of the memory of its compiled step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train_jax.core.reduction import AXIS
from train_jax.pods.check.context import Context
from train_jax.pods.check.rows import Row, row
from train_jax.pods.compile import first_line, memory_of, train_step_arguments
from train_jax.run.comparison import TOLERANCE, compared
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import assemble

ALL_REDUCE_WARN = {"tpu": 10.0, "gpu": 1.0}
"""GB/s of each device below which the check warns, far below the interconnect of a slice; 0.01 on other platforms."""
ALL_REDUCE_BYTES = {"tpu": 2**28, "gpu": 2**28}
"""Bytes of the array on each device; 2**24 on other platforms."""
_TRIES = 3
PRODUCT_SIZE = 512
PRODUCT_FAIL = {"float32 at precision highest": 1e-5, "bfloat16": 1e-4, "float32 at JAX's default": 2e-2}
"""Largest error of a product, relative to its largest entry. bfloat16 inputs have exact products, summed in float32;
the default precision of float32 products on a TPU is that of bfloat16."""
_NO_STATE: tuple[dict, dict] = {}, {}
"""Parameters and buffers of a function that has none."""
MEMORY_WARN = 0.9
_MEMINFO = Path("/proc/meminfo")


def check_processes(context: Context) -> Row:
    """Checks that there are as many processes as the user expects; 0 accepts any number."""
    count = len(context.hosts)
    expected = context.expect_processes
    limit = f"{expected} expected" if expected else ""
    remedy = "start the same command on every host (`gcloud … --worker=all`), or set the JAX_* variables of all"
    wrong = expected not in (0, count)
    return row(f"{count} process{'es' * (count > 1)}", fail=wrong, limit=limit, remedy=remedy)


def check_devices(context: Context) -> Row:
    """Checks that the backend is the chosen one and has as many devices as the user expects. Initializes it."""
    choice = context.choice
    expected = context.expect_devices
    platform = jax.default_backend()
    count = jax.device_count()
    kind = jax.local_devices()[0].device_kind
    text = f"{count} x {kind}, {jax.local_device_count()} of this process; {platform}: {choice.reason}"
    limit = f"{expected} devices expected on {choice.platform}" if expected else f"on {choice.platform}"
    other = platform != choice.platform
    remedy = "is this the slice that was meant, and does every host take part?"
    if other:
        remedy = "look at `device held by`; is jax installed for this platform (`source ./environment.sh tpu`)?"
    tolerated = choice.may_fall_back and jax.process_count() == 1
    wrong = expected not in (0, count) or (other and not tolerated)
    return row(text, fail=wrong, warn=other, limit=limit, remedy=remedy)


def check_collective(context: Context) -> Row:
    """Checks the sum over all devices of a vector with one entry for each, and the rate of a large sum. Collective."""
    devices = context.devices
    count = devices.count
    local = len(devices.local)
    first = jax.process_index() * local
    entries = np.eye(count, dtype=np.float32)[first : first + local] * np.arange(1, count + 1, dtype=np.float32)
    total = devices.parallel_map(lambda _, __, x: jax.lax.psum(x, AXIS))
    results = np.asarray(devices.to_host(total(*_NO_STATE, devices.shard(entries))))
    expected = np.arange(1, count + 1, dtype=np.float32)
    wrong = [index for index in range(count) if (results[:, index] != expected[index]).any()]
    text = f"sum over {count} devices is {results[0].sum():g}"
    if wrong:
        text += f"; wrong are those of device {wrong[0]}" + f" and {len(wrong) - 1} more" * (len(wrong) > 1)
        remedy = "replace the slice: a device or a link between devices is broken"
        return row(text, fail=True, limit=f"{expected.sum():g}", remedy=remedy)
    if count == 1:
        return row(text)
    platform = devices.local[0].platform
    size = ALL_REDUCE_BYTES.get(platform, 2**24)
    seconds = _best_seconds(total, devices.shard(np.ones((local, size // 4), np.float32)))
    rate = 2 * (count - 1) / count * size / seconds / 1e9
    low = ALL_REDUCE_WARN.get(platform, 0.01)
    return row(
        f"{text}; {size / 2**20:.0f} MiB of each in {seconds * 1e3:.1f} ms, {rate:.2f} GB/s",
        warn=rate < low,
        limit=f"WARN below {low:g} GB/s",
        remedy="are all hosts in one slice and one zone? are they busy?",
    )


def _best_seconds(function: Callable[..., Any], array: Any) -> float:
    jax.block_until_ready(function(*_NO_STATE, array))
    times = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        jax.block_until_ready(function(*_NO_STATE, array))
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)


def check_products(context: Context) -> Row:
    """Checks a matrix product in bfloat16 and in float32 on every device of this process against NumPy in float64."""
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(2, PRODUCT_SIZE, PRODUCT_SIZE)).astype(np.float32)
    inputs = wide, np.asarray(wide, jnp.bfloat16), wide
    errors = {}
    for name, factors, precision in zip(PRODUCT_FAIL, inputs, ("highest", None, None), strict=True):
        product = jax.jit(partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32))
        left, right = np.asarray(factors, np.float64)
        exact = left @ right
        results = [np.asarray(product(*jax.device_put(tuple(factors), device))) for device in context.devices.local]
        errors[name] = max(
            np.nan_to_num(np.abs(each - exact).max() / np.abs(exact).max(), nan=np.inf) for each in results
        )
    measured = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    return row(
        f"error of {PRODUCT_SIZE} x {PRODUCT_SIZE}: {measured}",
        fail=any(error > PRODUCT_FAIL[name] for name, error in errors.items()),
        limit=", ".join(f"{limit:.0e}" for limit in PRODUCT_FAIL.values()),
        remedy="do not train here: a device or its compiler computes wrongly",
    )


# ---- the model


def check_training(context: Context) -> Row:
    """Builds the components of the run, with the errors of `trm train`."""
    devices = context.run.devices
    size = context.config.global_batch_size
    text = f"{size} examples, {devices.local_batch_size(size)} on a device; evaluation {context.config.eval_batch_size}"
    return row(text, limit=f"multiples of {devices.count} devices")


def check_model(context: Context) -> Row:
    """Runs `bridge.verify` for the module's first training call: outputs, gradients and buffers, in float32."""
    report = compared(context.config, context.task)
    beyond = report.count("beyond tolerance")
    worst = report.worst
    where = report.environment
    text = f"largest error {max((each.error for each in report.rows), default=0.0):.0e}"
    if beyond:
        text = f"{beyond} differ, most {worst.kind} {worst.name} by {worst.error:.0e}"
    return row(
        f"{len(report.rows)} leaves in float32, products {where.matmul_precision}, on {where.device}; {text}",
        fail=bool(beyond) or not report.rows,
        limit=f"{TOLERANCE:.0e}, or 8 x PyTorch's own rounding",
        remedy="do not train here: does it pass with --platform cpu? then the device computes wrongly",
    )


# ---- memory


def check_memory(context: Context) -> Row:
    """Compiles the train step for shapes alone and compares its memory with that of a device.

    With several processes it is compiled under `shard_map`: `pmap` cannot do it ahead of time.
    """
    training = context.run
    if training.devices.compiles_for_arrays:
        training = assemble(training.config, training.task, Devices(runner="shard_map"))
    begin = time.perf_counter()
    lowered = training.parallel_step().lower(*train_step_arguments(training))
    try:
        memory = memory_of(lowered.compile())
    except jax.errors.JaxRuntimeError as error:
        return row(f"the compiler refuses the train step: {first_line(error)[:300]}", fail=True, remedy=_REMEDY)
    seconds = time.perf_counter() - begin
    limit, of_what = memory_limit(training.devices)
    if limit is None:
        return row(f"train step {_size(memory.peak)} on a device", warn=True, remedy="the limit is not known")
    share = memory.peak / limit
    return row(
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
    """Returns the memory of a device in bytes, None if it is not known, and a description of it."""
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


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
