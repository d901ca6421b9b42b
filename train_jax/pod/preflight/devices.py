"""Checks of the devices: they are there, compute right and are fast enough to reach; the run's model on them beside
PyTorch on the host, and the memory of its compiled step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train_jax.core.reduction import AXIS
from train_jax.pod.compile import first_line, memory_of, train_step_arguments
from train_jax.pod.preflight.rows import Row, row
from train_jax.run.comparison import TOLERANCE, compared
from train_jax.run.config import RunConfig
from train_jax.runtime.backend import Choice
from train_jax.runtime.devices import Devices
from train_jax.start import Training, assemble
from train_jax.task import Task

GIGABYTE = 1e9
HOST_TO_DEVICE_WARN = {"tpu": 1.0, "gpu": 2.0}
"""GB/s to one device, far below what PCIe gives; other platforms 0.1."""
ALL_REDUCE_WARN = {"tpu": 10.0, "gpu": 1.0}
"""GB/s that each device sends and receives, far below the interconnect of a slice; other platforms 0.01."""
TRANSFER_BYTES = {"tpu": 2**28, "gpu": 2**28}
"""Of one array on each device; on other platforms 2**24."""
_TRIES = 3
PRODUCT_SIZE = 512
FLOAT32_FAIL, BFLOAT16_FAIL, DEFAULT_FAIL = 1e-5, 1e-4, 2e-2
"""Largest error of a product, relative to its largest entry. bfloat16 inputs have exact products, summed in float32;
the default precision of float32 products on a TPU is that of bfloat16."""
_NO_STATE: tuple[dict, dict] = {}, {}
"""Parameters and buffers of a function that has none."""
MEMORY_WARN = 0.9
_MEMINFO = Path("/proc/meminfo")


def check_processes(count: int, expected: int) -> Row:
    """Checks that as many processes came as the user expects; 0 for any number."""
    several = f"{count} process{'es' * (count > 1)}"
    wrong = bool(expected) and count != expected
    limit = f"{expected} expected" if expected else ""
    remedy = "start the same command on every host (`gcloud … --worker=all`), or set the JAX_* variables of all"
    return row(several, fail=wrong, limit=limit, remedy=remedy)


def check_devices(choice: Choice, expected: int) -> Row:
    """Checks that the backend is the chosen one and has as many devices as the user expects. Initializes it."""
    platform, devices = jax.default_backend(), jax.devices()
    kind = jax.local_devices()[0].device_kind
    text = f"{len(devices)} x {kind}, {jax.local_device_count()} of this process; {platform}: {choice.reason}"
    limit = f"{expected} devices expected on {choice.platform}" if expected else f"on {choice.platform}"
    remedy = "look at `device held by`; is jax installed for this platform (`source ./environment.sh tpu`)?"
    if platform == choice.platform and expected:
        remedy = "is this the slice that was meant, and does every host take part?"
    other = platform != choice.platform
    tolerated = choice.may_fall_back and jax.process_count() == 1
    wrong = bool(expected) and len(devices) != expected
    return row(text, fail=wrong or (other and not tolerated), warn=other, limit=limit, remedy=remedy)


def check_collective(devices: Devices) -> Row:
    """Sums a vector in which every device has another entry: the number of the device, counted from 1. Collective."""
    count, local = devices.count, len(devices.local)
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
    return row(text, fail=bool(wrong), limit=f"{expected.sum():g}", remedy=remedy)


def check_products(devices: Devices) -> Row:
    """A matrix product in bfloat16 and in float32 on every device of this process, beside NumPy in float64."""
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, PRODUCT_SIZE, PRODUCT_SIZE)).astype(np.float32)
    narrow = np.asarray(left, jnp.bfloat16), np.asarray(right, jnp.bfloat16)
    cases: dict[str, tuple[Any, Any, str | None, float]] = {
        "float32 at precision highest": (left, right, "highest", FLOAT32_FAIL),
        "bfloat16": (*narrow, None, BFLOAT16_FAIL),
        "float32 at JAX's default": (left, right, None, DEFAULT_FAIL),
    }
    parts, failed = [], []
    for name, (a, b, precision, limit) in cases.items():
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        worst = max(_product_errors(devices, a, b, precision, exact))
        parts.append(f"{name} {worst:.0e}")
        failed += [name] * (not worst <= limit)
    return row(
        f"error of {PRODUCT_SIZE} x {PRODUCT_SIZE}: {', '.join(parts)}",
        fail=bool(failed),
        limit=f"{FLOAT32_FAIL:.0e}, {BFLOAT16_FAIL:.0e}, {DEFAULT_FAIL:.0e}",
        remedy="do not train here: a device or its compiler computes wrongly",
    )


def _product_errors(devices: Devices, a: Any, b: Any, precision: Any, exact: np.ndarray) -> list[float]:
    product = jax.jit(lambda x, y: jnp.matmul(x, y, precision=precision, preferred_element_type=jnp.float32))
    results = [np.asarray(product(*jax.device_put((a, b), device)), np.float64) for device in devices.local]
    return [float(np.nan_to_num(np.abs(each - exact).max() / np.abs(exact).max(), nan=np.inf)) for each in results]


def check_host_to_device(devices: Devices) -> Row:
    """Copies an array to each device of this process, one after the other."""
    platform = devices.local[0].platform
    host = np.zeros(TRANSFER_BYTES.get(platform, 2**24), np.uint8)
    rates = []
    for device in devices.local:
        seconds = _best_seconds(lambda device=device: jax.device_put(host, device, may_alias=False))
        rates.append(host.nbytes / seconds / GIGABYTE)
    low = HOST_TO_DEVICE_WARN.get(platform, 0.1)
    return row(
        f"{min(rates):.1f} GB/s to the slowest device of a process, {host.nbytes / 2**20:.0f} MiB",
        warn=min(rates) < low,
        limit=f"WARN below {low:g} GB/s",
        remedy="is the host busy? see `other processes`",
    )


def check_all_reduce(devices: Devices) -> Row:
    """Sums an array over all devices. Collective."""
    platform, count = devices.local[0].platform, devices.count
    if count == 1:
        return row("one device: nothing to send")
    size = TRANSFER_BYTES.get(platform, 2**24) // 4
    array = devices.shard(np.ones((len(devices.local), size), np.float32))
    total = devices.parallel_map(lambda _, __, x: jax.lax.psum(x, AXIS))
    seconds = _best_seconds(lambda: total(*_NO_STATE, array))
    rate = 2 * (count - 1) / count * 4 * size / seconds / GIGABYTE
    low = ALL_REDUCE_WARN.get(platform, 0.01)
    return row(
        f"{rate:.2f} GB/s over {count} devices, {4 * size / 2**20:.0f} MiB of float32 in {seconds * 1e3:.1f} ms",
        warn=rate < low,
        limit=f"WARN below {low:g} GB/s",
        remedy="are all hosts in one slice and one zone? are they busy?",
    )


def _best_seconds(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)


# ---- the model


def batch_row(training: Training) -> Row:
    """That the run's configuration can be trained, and its batches on these devices."""
    config, devices = training.config, training.devices
    local = devices.local_batch_size(config.global_batch_size)
    text = f"{config.global_batch_size} examples, {local} on a device; evaluation {config.eval_batch_size}"
    return row(text, limit=f"multiples of {devices.count} devices")


def check_model(config: RunConfig, task: Task) -> Row:
    """`bridge.verify` of the module's call in the first training step: outputs, gradients and buffers, in float32."""
    report = compared(config, task)
    beyond, worst, where = report.count("beyond tolerance"), report.worst, report.environment
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
        return row(f"the compiler refuses the train step: {first_line(error)[:300]}", fail=True, remedy=_REMEDY)
    seconds = time.perf_counter() - begin
    limit, of_what = memory_limit(devices)
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
