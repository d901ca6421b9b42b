"""Comparison of kernels with the plain path: values, gradients and time, at small shapes and the run's shapes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bridge
from train_jax.core.objective import Objective, sparse_tables
from train_jax.pods.check.context import Context
from train_jax.pods.check.rows import Row, absent, named
from train_jax.pods.compile import train_step_arguments
from train_jax.run import kernels
from train_jax.run.kernels import ATTENTION, CANDIDATES, functions_of, plain_of
from train_jax.run.model import build_module
from train_jax.runtime.backend import host_device
from train_jax.runtime.coordination import exchange, place
from train_jax.storage.files import write_text
from train_jax.trainer.start import part_size

LIMIT = 2.0
"""Largest ratio of a kernel's error to the plain path's own, both against the plain path in float32."""
FLOOR = 1e-5
"""Smaller errors, relative to the largest entry, always count as rounding; so does one bfloat16 rounding, 3.9e-3."""
_WINDOWS = 5
_WINDOW_SECONDS = 0.05
_DIFFERENTIABLE = 3
"""Number of leading arguments that get a gradient; later ones are tables and masks."""


class Case(NamedTuple):
    """A call of an operation, with shapes in place of arrays."""

    operation: str
    arguments: tuple

    def __str__(self) -> str:
        shapes = [f"{x.dtype}{list(x.shape)}" for x in self.arguments if isinstance(x, jax.ShapeDtypeStruct)]
        return " ".join(shapes[:_DIFFERENTIABLE])

    def inputs(self) -> list[Any]:
        """Returns random arrays: latents and queries of size 1, weights scaled by their width, and triangular masks."""
        rng = np.random.default_rng(0)

        def array(x: Any) -> Any:
            if not isinstance(x, jax.ShapeDtypeStruct):
                return x
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return jnp.tril(jnp.ones(x.shape, x.dtype)) if x.ndim > 1 else jnp.ones(x.shape, x.dtype)
            scale = x.shape[-1] ** -0.5 if x.ndim == 2 else 1.0
            return jnp.asarray(rng.normal(size=x.shape).astype(np.float32) * scale, x.dtype)

        return [array(x) for x in self.arguments]


def compiled(function: Callable, given: Sequence[Any]) -> Callable[[], Any]:
    """Returns a function without arguments that computes the values and gradients of `function` at these inputs."""
    numbers = [i for i, x in enumerate(given[:_DIFFERENTIABLE]) if isinstance(x, jax.Array)]
    arrays = {i: x for i, x in enumerate(given) if isinstance(x, jax.Array)}
    shape = jax.eval_shape(lambda each: function(*_filled(given, each)), arrays).shape
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)

    def call(of_gradient: dict, others: dict, cotangent: Any) -> Any:
        out = function(*_filled(given, of_gradient | others)).astype(jnp.float32)
        return jnp.sum(out * cotangent), out

    split = [{i: x for i, x in arrays.items() if (i in numbers) == first} for first in (True, False)]
    run = jax.jit(jax.grad(call, has_aux=True)).lower(*split, cotangent).compile()
    return lambda: run(*split, cotangent)


def _filled(given: Sequence[Any], arrays: dict[int, Any]) -> list[Any]:
    return [arrays.get(i, x) for i, x in enumerate(given)]


def leaves(result: Any) -> dict[str, np.ndarray]:
    """Returns the values and gradients of a call of `compiled`, by name."""
    gradients, out = result
    named = {"values": out} | {f"gradient {i}": x for i, x in gradients.items()}
    return {name: np.asarray(x, np.float32) for name, x in named.items()}


def differences(case: Case, ours: Any, plain: Any, exact: Any) -> str:
    """Returns "" if a candidate is as exact as the plain path, otherwise the leaf that differs most, and its errors."""
    worst = 1.0
    text = ""
    floor = max(FLOOR, float(jnp.finfo(case.arguments[0].dtype).eps) / 2)
    for name, right in exact.items():
        scale = max(float(np.abs(right).max()), 1e-30)
        error, own = (float(np.nan_to_num(np.abs(x[name] - right).max(), nan=np.inf)) / scale for x in (ours, plain))
        ratio = float(np.nan_to_num(error / max(LIMIT * own, floor), nan=np.inf))  # both may be infinite
        if ratio > worst:
            worst = ratio
            text = f"{name} differs by {error:.1e}, the plain path by {own:.1e}"
    return text


def exact_leaves(case: Case, given: Sequence[Any]) -> dict[str, np.ndarray]:
    """Returns the leaves of the plain path in float32, with exact products."""
    wide = [
        x.astype(jnp.float32) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in given
    ]
    with jax.default_matmul_precision("highest"):
        return leaves(compiled(plain_of(case.operation), wide)())


def milliseconds(call: Callable[[], Any]) -> float:
    """Returns the time of a compiled call, as the median over windows."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    times = max(1, round(_WINDOW_SECONDS / max(time.perf_counter() - begin, 1e-6)))
    windows = []
    for _ in range(_WINDOWS):
        begin = time.perf_counter()
        for _ in range(times):
            result = call()
        jax.block_until_ready(result)
        windows.append((time.perf_counter() - begin) / times)
    return 1e3 * statistics.median(windows)


# ---- Pallas kernels at small shapes


def _bf16(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _small() -> list[Case]:
    x = _bf16(2, 24, 128)
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    query = _bf16(1, 2, 256, 128)
    return [
        Case("trm::normed_mlp", (x, f32((512, 128)), f32((128, 256)), 1e-5, -1)),
        Case("trm::mix_positions", (x, f32((256, 24)), f32((24, 128)))),
        Case("trm::attention", (x, f32((384, 128)), f32((128, 128)), f32((24, 32)), f32((24, 32)), 64)),
        Case(ATTENTION, (query, query, query, None, 0.0, True)),
    ]


def pallas_rows(context: Context) -> list[Row]:
    """Compares every Pallas kernel with the plain path at a small shape: compiled on a TPU, interpreted elsewhere."""
    tpu = context.devices.platform == "tpu"
    how = "on the device" if tpu else "interpreted on the host"
    rows = []
    for case in _small():
        kernel = CANDIDATES["tpu"][case.operation]["fused"]
        kernel = kernel if tpu else functools.partial(kernel, interpret=True)
        with contextlib.nullcontext() if tpu else jax.default_device(host_device()):
            given = case.inputs()
            plain = leaves(compiled(plain_of(case.operation), given)())
            wrong = differences(case, leaves(compiled(kernel, given)()), plain, exact_leaves(case, given))
        text = wrong or f"values and gradients as exact as the plain path's, {how}"
        rows.append(named(f"Pallas kernel {case.operation}", text, fail=bool(wrong), limit=f"{LIMIT:g} x plain"))
        if not tpu:
            name = f"Pallas kernel {case.operation} on the device"
            rows.append(absent(name, f"it is written for TPUs; this is a {context.devices.platform}"))
    return rows


# ---- kernels at the run's own shapes


def calls_of(context: Context) -> list[Case]:
    """Returns the calls in the run's train step for which this platform has several implementations."""
    training = context.training("shard_map", choices="", attention="plain", mlp="plain")
    operations = CANDIDATES.get(training.devices.platform, {})
    cases: dict[str, Case] = {}

    def recorded(operation: str) -> Callable:
        plain = plain_of(operation)
        signature = inspect.signature(plain)

        def call(*args: Any, **keywords: Any) -> Any:
            out = plain(*args, **keywords)  # refuses what a decomposition computes
            bound = signature.bind(*args, **keywords)
            bound.apply_defaults()
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x for x in bound.args]
            if all(x.shape for x in shapes if isinstance(x, jax.ShapeDtypeStruct)):
                case = Case(operation, tuple(shapes))
                cases.setdefault(f"{case} {case.arguments}", case)
            return out

        return call

    module = build_module(training.config, context.task, part_size(training.config, training.devices))
    lowerings = {operation: recorded(operation) for operation in operations}
    fn = bridge.export(module, lowerings=lowerings, functions=functions_of(operations))
    step = training.parallel_step(Objective(fn, context.task, sparse_tables(fn)))
    step.lower(*train_step_arguments(training))
    return list(cases.values())


def choose_rows(context: Context) -> list[Row]:
    """Compares and times the implementations of each operation, and writes the fastest correct ones. Collective.

    For an operation with several shapes, the smallest sum of times decides. A candidate that is wrong in any process
    is never chosen; the first process measures the times.
    """
    platform = context.devices.platform
    rows = list[Row]()
    cases = calls_of(context)
    times: dict[str, dict[str, float]] = {}
    wrong: set[tuple[str, str]] = set()
    for case in cases:
        measured, faults = _compared(case, platform)
        by_process = [json.loads(text) for text in exchange("prove kernel", json.dumps([measured, faults]))]
        measured = by_process[0][0]
        faults = {k: v for _, each in reversed(by_process) for k, v in each.items()}
        wrong |= {(case.operation, name) for name in faults}
        for name, took in measured.items():
            sums = times.setdefault(case.operation, {})
            sums[name] = sums.get(name, 0.0) + took
        text = ", ".join(f"{name} {took:.3f} ms" for name, took in measured.items())
        text += "".join(f"; {name} is wrong: {fault}" for name, fault in faults.items())
        figures = {f"{name}_ms": took for name, took in measured.items()}
        rows.append(named(f"{case.operation} {case}", text, fail=bool(faults), limit=f"{LIMIT:g} x plain", **figures))
    choices = {}
    for operation, sums in times.items():
        right = {name: took for name, took in sums.items() if (operation, name) not in wrong}
        best = min(right, key=right.__getitem__)
        if best != "plain":
            choices[operation] = best
    if not cases:
        rows = [absent("choices", f"the run has no operation with several implementations on a {platform}")]
    else:
        text = ", ".join(f"{each} {choices.get(each, 'plain')}" for each in times)
        rows.append(named("choices", f"{text}; in {context.choices}"))
    if place()[0] == 0:
        kind = context.devices.local[0].device_kind
        content = {"platform": platform, "device": kind, "choices": choices, "milliseconds": times}
        write_text(context.choices, json.dumps(content, indent=1))
    return rows


def _compared(case: Case, platform: str) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the milliseconds of each implementation, and the faults of the wrong ones."""
    given = case.inputs()
    exact = exact_leaves(case, given)
    run = compiled(plain_of(case.operation), given)
    plain = leaves(run())
    times = {"plain": milliseconds(run)}
    faults = {}
    for name, function in kernels.CANDIDATES[platform][case.operation].items():
        try:
            run = compiled(function, given)
            fault = differences(case, leaves(run()), plain, exact)
            times[name] = milliseconds(run)
        except Exception as error:  # a kernel that the compiler or the device refuses
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if fault:
            faults[name] = fault
    return times, faults
