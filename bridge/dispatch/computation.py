"""One operation that makes a new tensor: its lowering or decomposition computes the values, JAX the gradients."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._compat.jax import Tracer
from bridge._compat.torchax import decomposition, torchax_lowering
from bridge.context import CallState
from bridge.dispatch.metas import metas_of
from bridge.dispatch.random import RANDOM, REPARAMETERIZED, drawn_numbers
from bridge.dispatch.schemas import arrays_of, takes_dimension
from bridge.errors import BridgeError, first_line
from bridge.lowerings import BY_LAYOUT, LOWERINGS
from bridge.lowerings.creation import broadcast
from bridge.lowerings.plain import PLAIN
from bridge.lowerings.registry import cast
from bridge.symbolic.ranges import fitting, follow
from bridge.tensor.arrays import COUNTERPARTS, jax_dtype
from bridge.tensor.tensor import DIFFERENTIABLE, BridgeTensor, stop_gradient, wrap

aten = torch.ops.aten
EMBEDDED = 2**16
"""Largest number of elements of a constant that is embedded in the program; more would bloat it."""
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
WHOLE = _INTEGERS | {torch.bool}
_FLOATS = frozenset({torch.float32, torch.float64})
_NARROW = (torch.bfloat16, torch.float16)
_BROADCAST = {
    aten.addmm.default: 0,
    aten.addmv.default: 0,
    aten.baddbmm.default: 0,
    aten.fill.Tensor: 1,
    aten.masked_fill.Tensor: 2,
    aten._prelu_kernel.default: 1,
}
"""Operations that PyTorch does not call pointwise -> position of the argument that is broadcast to the result."""
_OF_ONE_DTYPE = {
    getattr(aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "linear", "convolution")
}
TRACE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
)

DEFECT_REMEDY = "this is a defect of the lowering, please report it; `lowerings={operation: None}` switches it off"
_OF_THE_RUN = (FloatingPointError, MemoryError, jax.errors.JaxRuntimeError)
"""Exceptions that are no defect of a lowering: `jax.debug_nans`, and devices that run out of memory."""


class LoweringError(NotImplementedError):
    """A lowering raised an error for arguments that it accepts: a defect of the lowering."""


def compute(context: CallState, func: Any, args: tuple, kwargs: dict, like: BridgeTensor | None = None) -> Any:
    """Returns a new tensor, or several. `like`: the tensor an in-place operation will write, which fixes the dtype."""
    random = RANDOM.get(func)
    lowering, server = (None, "random") if random else _lowering(context, func)
    if random is None and lowering is None:
        return _decompose(context, func, args, kwargs)
    if context.survey is not None:
        context.survey.note(func, server)
    inputs: list[BridgeTensor] = []
    arrays = arrays_of(args, inputs)
    array_kwargs = arrays_of(kwargs, inputs) if kwargs else {}
    metas = metas_of(context, func, args, kwargs) if like is None else like._meta
    several = isinstance(metas, (tuple, list))
    outs = metas if several else (metas,)
    as_pytorch = _as_pytorch(func, args, inputs, outs)
    if as_pytorch is not None:
        arrays = arrays_of(args, [], as_pytorch)
        array_kwargs = arrays_of(kwargs, [], as_pytorch)
    for value in arrays:
        if type(value) is int and not -(2**31) <= value < 2**31:
            arrays = fitting(context, func, inputs, outs, arrays)
            break
    by_layout = BY_LAYOUT.get(func)
    if by_layout is not None and lowering is LOWERINGS.get(func):
        array_kwargs = array_kwargs | by_layout(*args, **kwargs)
    if random:
        values = drawn_numbers(
            context, func, args, kwargs, lambda source: random(source, metas, *arrays, **array_kwargs)
        )
        values = REPARAMETERIZED[func](values, *arrays) if func in REPARAMETERIZED else values
    else:
        assert lowering is not None
        values = _values(context, func, lowering, arrays, array_kwargs, inputs, metas)
    values = values if several else (values,)
    if len(values) != len(outs):
        raise NotImplementedError(f"its lowering gives {len(values)} results, PyTorch {len(outs)}")
    results = _results(context, func, values, outs, inputs)
    if random or not (isinstance(outs[-1], torch.Tensor) and outs[-1].dtype in DIFFERENTIABLE):
        follow(context, func, args, kwargs, results)
    return type(metas)(results) if several else results[0]


def _values(
    context: CallState, func: Any, lowering: Callable, arrays: tuple, kwargs: dict, inputs: list, metas: Any
) -> Any:
    """Returns the results of the lowering.

    Raises `NotImplementedError` for arguments that it was not written for, `LoweringError` for a defect of it.
    """
    along = bool(inputs) and not inputs[0].dim() and takes_dimension(func)
    if along:  # PyTorch gives tensors without dimensions one of size 1 wherever a dimension is named
        arrays, kwargs = jax.tree.map(_in_one_dimension, (arrays, kwargs))
    precision: Any = contextlib.nullcontext()
    for tensor in inputs:
        dtype = tensor.dtype
        if dtype != inputs[0].dtype and func in _OF_ONE_DTYPE:  # the meta device accepts the mixture
            raise RuntimeError(f"`{func.name()}` of {inputs[0].dtype} and {dtype}, which PyTorch's kernel refuses")
        if dtype.itemsize < 4 and dtype.is_floating_point and context.products_of_pytorch:
            precision = jax.default_matmul_precision(None)  # PyTorch's setting applies to float32
    whole = inputs and type(metas) is torch.Tensor and metas.dtype in WHOLE
    if whole and not isinstance(next(iter(arrays), None), Tracer) and is_known((arrays, kwargs), metas.numel()):
        precision = jax.ensure_compile_time_eval()
    try:
        with precision:
            values = lowering(*arrays, **kwargs)
    except (*TRACE_ERRORS, *_OF_THE_RUN, NotImplementedError, BridgeError):
        raise
    except Exception as error:
        raise _defect(lowering, arrays, kwargs, first_line(error)) from error
    if along:
        several = isinstance(metas, (tuple, list))
        if several:
            return tuple(map(_as_meta, values, metas))
        return _as_meta(values, metas)
    return values


def is_known(values: Any, size: int) -> bool:
    """True for a mask or an index of `size` elements whose numbers are known, so that they can decide shapes."""
    leaves = jax.tree.leaves(values)
    largest = max([EMBEDDED, *(leaf.size for leaf in leaves if isinstance(leaf, jax.Array))])
    return size <= largest and not any(isinstance(leaf, Tracer) for leaf in leaves)


def _defect(lowering: Callable, args: tuple, kwargs: dict, line: str) -> NotImplementedError:
    """Returns the error for an exception of a lowering; `line` is the exception's first line."""
    if _takes(lowering, args, kwargs):
        return LoweringError(line)
    return NotImplementedError(f"its lowering does not take these arguments: {line}")


def _in_one_dimension(value: Any) -> Any:
    if isinstance(value, jax.Array) and not value.ndim:
        return jnp.reshape(value, 1)
    return value


def _as_meta(value: Any, meta: Any) -> Any:
    fits = isinstance(meta, torch.Tensor) and jnp.size(value) == meta.numel()
    if fits:
        return jnp.reshape(value, meta.shape)
    return value


def _results(context: CallState, func: Any, values: Any, outs: Any, inputs: list[BridgeTensor]) -> tuple:
    """Returns the results as tensors; results that are no tensors stay as they are."""
    enabled = torch.is_grad_enabled() and (func not in RANDOM or func in REPARAMETERIZED)
    tracked = live = False
    for tensor in inputs:
        tracked = tracked or tensor._handle.tracked
        live = live or tensor._handle.live
    results = []
    for value, meta in zip(values, outs, strict=True):
        if isinstance(meta, torch.Tensor):
            value = _checked(context, func, value, meta)
            free = enabled and meta.dtype in DIFFERENTIABLE
            if live and not enabled:
                value = stop_gradient(value)
            value = wrap(value, meta, tracked=tracked and free, live=live and free)
        results.append(meta if value is None else value)
    return tuple(results)


def _as_pytorch(
    func: Any, args: tuple, inputs: list[BridgeTensor], outs: Any
) -> Callable[[BridgeTensor], jax.Array] | None:
    """The conversion of the inputs of a pointwise operation, if JAX would convert them otherwise."""
    pointwise = torch.Tag.pointwise in func.tags
    if pointwise and inputs and outs[0].dtype in _FLOATS and not any(t.dtype in DIFFERENTIABLE for t in inputs):
        dtype = jax_dtype(outs[0].dtype)  # PyTorch computes functions of integers and booleans in this dtype
        return lambda t: cast(t.value, dtype)
    place = None if pointwise else _BROADCAST.get(func)
    if len(inputs) < 2 or not (pointwise or place is not None or func is aten.floor_divide.default):
        return None
    dtype = None if place is not None else _narrowed(inputs, outs)
    if dtype is not None:
        return lambda t: cast(t.value, dtype) if t.dtype in _INTEGERS else t.value
    if len(outs) > 1 or not torch.is_grad_enabled() or not (pointwise or place is not None):
        return None
    (out,) = outs
    candidates = inputs if place is None else args[place : place + 1]
    chosen = [
        id(t)
        for t in candidates
        if type(t) is BridgeTensor and t.dtype in _NARROW and t.dtype == out.dtype and t.shape != out.shape
        if t._handle.live
    ]
    if not chosen:
        return None
    shape = tuple(out.shape)
    return lambda t: broadcast(t.value, shape) if id(t) in chosen else t.value


def _narrowed(inputs: list[BridgeTensor], outs: Any) -> Any:
    """Returns the dtype of an integer operation in which one without dimensions has more bits than the others.

    PyTorch converts it to the dtype of the others first.
    """
    sizes = set()
    kinds = set()
    for tensor in inputs:
        if tensor.dtype in _INTEGERS:
            kinds.add(tensor.dtype)
            if tensor.dim():
                sizes.add(tensor.dtype)
        elif tensor.dtype in DIFFERENTIABLE:
            return None
    if not sizes or kinds == sizes or any(t.dtype in DIFFERENTIABLE for t in outs):
        return None
    return jax_dtype(functools.reduce(torch.promote_types, sizes))


def _checked(context: CallState, func: Any, value: Any, meta: torch.Tensor) -> jax.Array:
    """Returns the value as an array with the shape and dtype of PyTorch's result."""
    value = jnp.asarray(value)
    if value.shape != meta.shape:
        raise context.error(
            f"the lowering of `{func.name()}` gave shape {value.shape}, PyTorch gives {tuple(meta.shape)}",
            DEFECT_REMEDY,
        )
    if value.dtype != COUNTERPARTS[meta.dtype]:
        dtype = jax_dtype(meta.dtype)
        if value.dtype != dtype:
            value = cast(value, dtype)
    wide = meta.dtype in (torch.float64, torch.complex128)
    # The dtype of a tensor of zeros is exact, and float64 where PyTorch adds a Python number.
    if wide and value.dtype.itemsize < meta.dtype.itemsize and func is not aten._efficientzerotensor.default:
        context.warn(f"{meta.dtype} is computed as {value.dtype}", "set JAX_ENABLE_X64=1 for full precision")
    return value


def _lowering(context: CallState, func: Any) -> tuple[Callable | None, str]:
    """Returns the function of arrays for an operation, if there is one, and its origin."""
    if context.options.lowerings:
        chosen: Any = context.options.lowerings.get(
            func.name(), func
        )  # the operation itself if the user has chosen nothing
        if chosen is None:
            return _plain(func)
        if chosen is not func:
            return chosen, "chosen"
    if func in LOWERINGS:
        return LOWERINGS[func], "ours"
    return _plain(func)


def _plain(func: Any) -> tuple[Callable | None, str]:
    """Returns torchax's function, or JAX's where torchax has none."""
    lowering = torchax_lowering(func)
    if lowering is None:
        return PLAIN.get(func), "ours"
    return lowering, "torchax"


def _decompose(context: CallState, func: Any, args: tuple, kwargs: dict) -> Any:
    made_of = decomposition(func)
    if made_of is None:
        raise NotImplementedError("neither a lowering nor a decomposition")
    with context.taking_apart():
        result = made_of(*args, **kwargs)
    if result is NotImplemented:
        raise NotImplementedError("its decomposition does not take these arguments")
    return result


def _takes(lowering: Callable, args: tuple, kwargs: dict) -> bool:
    """True if the arguments fit the lowering's signature."""
    try:
        inspect.signature(lowering).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function without a Python signature
        pass
    return True
