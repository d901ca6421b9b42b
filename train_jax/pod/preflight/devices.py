"""Whether the devices are there, compute right, and are fast enough to reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train_jax.core.reduction import AXIS
from train_jax.pod.preflight.row import Row, row
from train_jax.runtime.backend import Choice
from train_jax.runtime.devices import Devices

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


def check_processes(count: int, expected: int) -> Row:
    """Whether as many processes came as the user expects; 0 for any number."""
    several = f"{count} process{'es' * (count > 1)}"
    wrong = bool(expected) and count != expected
    limit = f"{expected} expected" if expected else ""
    remedy = "start the same command on every host (`gcloud … --worker=all`), or set the JAX_* variables of all"
    return row("processes", several, fail=wrong, limit=limit, remedy=remedy)


def check_devices(choice: Choice, expected: int) -> Row:
    """Whether the backend is the chosen one, and has as many devices as the user expects. Initializes the backend."""
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
    return row("devices", text, fail=wrong or (other and not tolerated), warn=other, limit=limit, remedy=remedy)


def check_collective(devices: Devices) -> Row:
    """Sums a vector in which every device has another entry: the number of the device, counted from 1. Collective."""
    count, local = devices.count, len(devices.local)
    first = jax.process_index() * local
    entries = np.eye(count, dtype=np.float32)[first : first + local] * np.arange(1, count + 1, dtype=np.float32)
    total = devices.parallel_map(lambda _, __, x: jax.lax.psum(x, AXIS))
    results = np.asarray(devices.to_host(total(*_no_state(devices), devices.shard(entries))))
    expected = np.arange(1, count + 1, dtype=np.float32)
    wrong = [index for index in range(count) if (results[:, index] != expected[index]).any()]
    named = (
        f"; wrong are those of device {wrong[0]}" + f" and {len(wrong) - 1} more" * (len(wrong) > 1) if wrong else ""
    )
    text = f"sum over {count} devices is {results[0].sum():g}{named}"
    remedy = "replace the slice: a device or a link between devices is broken"
    return row("collective", text, fail=bool(wrong), limit=f"{expected.sum():g}", remedy=remedy)


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
        "matrix product",
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
        "host to device",
        f"{min(rates):.1f} GB/s to the slowest device of a process, {_megabytes(host.nbytes)}",
        warn=min(rates) < low,
        limit=f"WARN below {low:g} GB/s",
        remedy="is the host busy? see `other processes`",
    )


def check_all_reduce(devices: Devices) -> Row:
    """Sums an array over all devices. Collective."""
    platform, count = devices.local[0].platform, devices.count
    if count == 1:
        return Row("all-reduce", "PASS", "one device: nothing to send")
    size = TRANSFER_BYTES.get(platform, 2**24) // 4
    array = devices.shard(np.ones((len(devices.local), size), np.float32))
    total = devices.parallel_map(lambda _, __, x: jax.lax.psum(x, AXIS))
    state = _no_state(devices)
    seconds = _best_seconds(lambda: total(*state, array))
    rate = 2 * (count - 1) / count * 4 * size / seconds / GIGABYTE
    low = ALL_REDUCE_WARN.get(platform, 0.01)
    return row(
        "all-reduce",
        f"{rate:.2f} GB/s over {count} devices, {_megabytes(4 * size)} of float32 in {seconds * 1e3:.1f} ms",
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


def _no_state(devices: Devices) -> Sequence[Any]:
    """Parameters and buffers of a function that has none."""
    return {}, {}


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
