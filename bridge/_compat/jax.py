"""Private names of JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.interpreters.batching import BatchTracer
from jax._src.interpreters.partial_eval import DynamicJaxprTracer
from jax._src.lax.lax import _convert_element_type
from jax.core import Tracer as Tracer

INLINED: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]
"""The option `inline` of `jax.jit` with which a trace holds the operations themselves.

True means that since JAX 0.12 only for the lowered program: the trace, and the names of operations, have the call.
"""

_ABSENT_GPU: ContextVar[tuple[int, int] | None] = ContextVar("compute capability of an absent GPU", default=None)


def compute_capability() -> tuple[int, int]:
    """Returns that of the NVIDIA GPU which programs are traced for; (0, 0) for any other device."""
    absent = _ABSENT_GPU.get()
    if absent is not None:
        return absent
    device = jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    major, _, minor = getattr(device, "compute_capability", "0.0").partition(".")  # no other platform has one
    return int(major), int(minor or 0)


@contextlib.contextmanager
def tracing_for_gpu(capability: tuple[int, int], cudnn_version: int) -> Iterator[None]:
    """Traces programs as on an NVIDIA GPU, on a machine without one.

    JAX asks the devices of the machine and its cuDNN which attention they serve, and has no other place for the answer.
    """
    stand_ins = {
        "check_cudnn_version": lambda: cudnn_version,
        "check_compute_capability": lambda least: capability >= tuple(map(int, least.split("."))),
        "is_cuda_compute_capability_equal": lambda other: capability == tuple(map(int, other.split("."))),
    }
    originals = {name: getattr(fused_attention_stablehlo, name) for name in stand_ins}
    jax.clear_caches()  # traces for other devices
    token = _ABSENT_GPU.set(capability)
    try:
        for name, stand_in in stand_ins.items():
            setattr(fused_attention_stablehlo, name, stand_in)
        yield
    finally:
        for name, original in originals.items():
            setattr(fused_attention_stablehlo, name, original)
        _ABSENT_GPU.reset(token)
        jax.clear_caches()


def weakly_typed(array: Any) -> jax.Array:
    """Returns the array with a weak type, which promotes as a number of Python's does."""
    weak: Any = _convert_element_type(array, array.dtype, weak_type=True)
    return weak


def same_values(one: Any, other: Any) -> bool:
    """True if two arrays are one, or were computed by the same operations from the same arrays.

    Compares operations of the innermost trace and constants; False is no proof of a difference.
    """
    known: dict[tuple[int, int], bool] = {}

    def same(a: Any, b: Any) -> bool:
        if a is b:
            return True
        key = id(a), id(b)
        if key not in known:
            known[key] = made_alike(a, b)
        return known[key]

    def made_alike(a: Any, b: Any) -> bool:
        if isinstance(a, BatchTracer) and isinstance(b, BatchTracer):  # under `vmap`
            return a._trace is b._trace and a.batch_dim == b.batch_dim and same(a.val, b.val)
        x, y = (value.full_lower() if isinstance(value, DynamicJaxprTracer) else value for value in (a, b))
        if not isinstance(x, Tracer) and not isinstance(y, Tracer):
            return np.asarray(x).dtype == np.asarray(y).dtype and np.array_equal(x, y)
        if not (isinstance(a, DynamicJaxprTracer) and isinstance(b, DynamicJaxprTracer)) or a._trace is not b._trace:
            return False
        if a.val is b.val:
            return True
        made = a.parent
        again = b.parent
        return (
            made is not None
            and again is not None
            and made.primitive is again.primitive
            and [v is a.val for v in made.outvars] == [v is b.val for v in again.outvars]
            and made.params == again.params
            and len(made.in_tracers) == len(again.in_tracers)
            and all(map(same, made.in_tracers, again.in_tracers))
        )

    try:
        return same(one, other)
    except ValueError:  # the truth of an array among the parameters of an operation
        return False


def depends_on(value: Any, names: Mapping[str, Any]) -> list[str] | None:
    """Returns the names of the arrays that a traced one is computed of; None if it may be computed of others, too."""
    known = {id(array.val): name for name, array in names.items() if isinstance(array, DynamicJaxprTracer)}
    found: dict[str, None] = {}
    todo = [value]
    seen = set[int]()
    while todo:
        tracer = todo.pop()
        if isinstance(tracer, DynamicJaxprTracer):  # a constant of the program
            tracer = tracer.full_lower()
        if not isinstance(tracer, Tracer):
            continue
        if not isinstance(tracer, DynamicJaxprTracer):
            return None
        if id(tracer.val) in seen:
            continue
        seen.add(id(tracer.val))
        if id(tracer.val) in known:
            found[known[id(tracer.val)]] = None
        elif tracer.parent is None:
            return None
        else:
            todo += tracer.parent.in_tracers
    return [*found]
