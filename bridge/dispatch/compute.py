"""Operations that compute a new tensor: values by a lowering or a decomposition, shape and dtype by PyTorch."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._compat.torchax import decomposition, torchax_lowering
from bridge.context import TraceContext
from bridge.dispatch.random import RANDOM, drawn_numbers
from bridge.dispatch.schema import takes_dimension
from bridge.dispatch.unsupported import DEFECT_REMEDY, TRACE_ERRORS, LoweringError
from bridge.errors import BridgeError
from bridge.lowerings import BY_LAYOUT, LOWERINGS
from bridge.lowerings.cache import cast
from bridge.lowerings.creation import broadcast
from bridge.symbolic.int64 import fitting, follow
from bridge.tensor.convert import jax_dtype
from bridge.tensor.storage import differentiable, stop_gradient
from bridge.tensor.tensor import BridgeTensor, fresh

aten = torch.ops.aten

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_NARROW = (torch.bfloat16, torch.float16)
_BROADCAST = {
    aten.addmm.default: 0,
    aten.addmv.default: 0,
    aten.baddbmm.default: 0,
    aten.fill.Tensor: 1,
    aten.masked_fill.Tensor: 2,
    aten._prelu_kernel.default: 1,
}
"""Operations that PyTorch does not call pointwise, and the place of the argument that is broadcast to the result."""
_OF_THE_RUN = (FloatingPointError, MemoryError, jax.errors.JaxRuntimeError)
"""Exceptions of a lowering without a defect of its own: `jax.debug_nans`, and devices that are out of memory."""


def compute(context: TraceContext, func: Any, args: tuple, kwargs: dict, like: BridgeTensor | None = None) -> Any:
    """A new tensor, or several. `like`: the tensor an in-place operation will write, which fixes the dtype."""
    random = RANDOM.get(func)
    lowering, server = (None, "random") if random else _lowering(context, func)
    if random is None and lowering is None:
        return _decompose(context, func, args, kwargs)
    if context.survey is not None:
        context.survey.note(func, server)
    inputs: list[BridgeTensor] = []
    arrays, array_kwargs = arrays_of(args, inputs), named_arrays_of(kwargs, inputs) if kwargs else {}
    metas = context.metas_of(func, args, kwargs) if like is None else like._meta
    several = isinstance(metas, (tuple, list))
    outs = metas if several else (metas,)
    as_pytorch = _as_pytorch(func, args, inputs, outs)
    if as_pytorch is not None:
        arrays, array_kwargs = arrays_of(args, [], as_pytorch), named_arrays_of(kwargs, [], as_pytorch)
    arrays, array_kwargs = fitting(context, func, inputs, outs, arrays, array_kwargs)
    by_layout = BY_LAYOUT.get(func)
    if by_layout is not None and lowering is LOWERINGS.get(func):
        array_kwargs = array_kwargs | by_layout(*args, **kwargs)
    if random:
        values = drawn_numbers(
            context, func, args, kwargs, lambda source: random(source, metas, *arrays, **array_kwargs)
        )
    else:
        assert lowering is not None
        values = _values(context, func, lowering, arrays, array_kwargs, inputs, metas)
    values = values if several else (values,)
    if len(values) != len(outs):
        raise NotImplementedError(f"its lowering gives {len(values)} results, PyTorch {len(outs)}")
    results = _results(context, func, values, outs, inputs)
    follow(context, func, args, kwargs, results)
    return type(metas)(results) if several else results[0]


def arrays_of(values: Any, seen: list[BridgeTensor], of: Callable[[BridgeTensor], jax.Array] | None = None) -> Any:
    """Returns `values` with arrays in place of tensors, which are appended to `seen`."""
    arrays = []
    for value in values:
        kind = type(value)
        if kind is BridgeTensor:
            seen.append(value)
            arrays.append(value.value if of is None else of(value))
        elif kind is list or kind is tuple:
            arrays.append(arrays_of(value, seen, of))
        else:
            arrays.append(value)
    return arrays if type(values) is list else tuple(arrays)


def named_arrays_of(
    values: dict, seen: list[BridgeTensor], of: Callable[[BridgeTensor], jax.Array] | None = None
) -> dict:
    """As `arrays_of`, of keyword arguments."""
    return dict(zip(values, arrays_of([*values.values()], seen, of), strict=True))


def _values(
    context: TraceContext, func: Any, lowering: Callable, arrays: tuple, kwargs: dict, inputs: list, metas: Any
) -> Any:
    """Returns the results of the lowering."""
    along = bool(inputs) and not inputs[0].dim() and takes_dimension(func)
    lowered = functools.partial(_lowered_in_one_dimension, metas) if along else _lowered
    if context.products_of_pytorch:
        for tensor in inputs:
            if tensor.dtype.itemsize < 4 and tensor.dtype.is_floating_point:  # PyTorch's setting is about float32
                with jax.default_matmul_precision(None):
                    return lowered(lowering, arrays, kwargs)
    return lowered(lowering, arrays, kwargs)


def _results(context: TraceContext, func: Any, values: Any, outs: Any, inputs: list[BridgeTensor]) -> tuple:
    """The results as tensors, or what they are besides."""
    enabled = torch.is_grad_enabled() and func not in RANDOM
    tracked = live = False
    for tensor in inputs:
        tracked, live = tracked or tensor._cell.tracked, live or tensor._cell.live
    results = []
    for value, meta in zip(values, outs, strict=True):
        if isinstance(meta, torch.Tensor):
            value = _checked(context, func, value, meta)
            free = differentiable(meta.dtype)
            if live and not enabled:
                value = stop_gradient(value)
            value = fresh(value, meta, tracked=tracked and enabled and free, live=live and enabled and free)
        results.append(meta if value is None else value)
    return tuple(results)


def _as_pytorch(
    func: Any, args: tuple, inputs: list[BridgeTensor], outs: Any
) -> Callable[[BridgeTensor], jax.Array] | None:
    """How the inputs of a pointwise operation are converted before it, if JAX would do it otherwise."""
    pointwise = torch.Tag.pointwise in func.tags
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
        if t._cell.live
    ]
    if not chosen:
        return None
    shape = tuple(out.shape)
    return lambda t: broadcast(t.value, shape) if id(t) in chosen else t.value


def _narrowed(inputs: list[BridgeTensor], outs: Any) -> Any:
    """The dtype of an operation on integers where one without dimensions has more bits than the others.

    PyTorch converts it to the dtype of the others first.
    """
    sizes, kinds = set(), set()
    for tensor in inputs:
        if tensor.dtype in _INTEGERS:
            kinds.add(tensor.dtype)
            if tensor.dim():
                sizes.add(tensor.dtype)
        elif differentiable(tensor.dtype):
            return None
    if not sizes or kinds == sizes or any(differentiable(t.dtype) for t in outs):
        return None
    return jax_dtype(functools.reduce(torch.promote_types, sizes))


def _checked(context: TraceContext, func: Any, value: Any, meta: torch.Tensor) -> jax.Array:
    """The value as an array of the shape and dtype that PyTorch gives."""
    value = jnp.asarray(value)
    if value.shape != meta.shape:
        raise context.error(
            f"the lowering of `{func.name()}` gave shape {value.shape}, PyTorch gives {tuple(meta.shape)}",
            DEFECT_REMEDY,
        )
    dtype = jax_dtype(meta.dtype)
    if value.dtype != dtype:
        value = cast(value, dtype)
    wide = meta.dtype in (torch.float64, torch.complex128)
    # That of a tensor of zeros is exact, and float64 where PyTorch adds a Python number.
    if wide and value.dtype.itemsize < meta.dtype.itemsize and func is not aten._efficientzerotensor.default:
        context.warn(f"{meta.dtype} is computed as {value.dtype}", "set JAX_ENABLE_X64=1 for full precision")
    return value


def _lowering(context: TraceContext, func: Any) -> tuple[Callable | None, str]:
    """The function of arrays for an operation, if there is one, and whose it is."""
    name = func.name() if context.lowerings or context.off else ""
    if name not in context.off:
        if name in context.lowerings:
            return context.lowerings[name], "chosen"
        if func in LOWERINGS:
            return LOWERINGS[func], "ours"
    return torchax_lowering(func), "torchax"


def _decompose(context: TraceContext, func: Any, args: tuple, kwargs: dict) -> Any:
    made_of = decomposition(func)
    if made_of is None:
        raise NotImplementedError("neither a lowering nor a decomposition")
    with context.taking_apart():
        result = made_of(*args, **kwargs)
    if result is NotImplemented:
        raise NotImplementedError("its decomposition does not take these arguments")
    return result


def _lowered(lowering: Callable, args: tuple, kwargs: dict) -> Any:
    """Returns the results of the lowering. Raises `NotImplementedError` if it was not written for these arguments."""
    try:
        return lowering(*args, **kwargs)
    except (*TRACE_ERRORS, *_OF_THE_RUN, NotImplementedError, BridgeError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        if not _takes(lowering, args, kwargs):
            raise NotImplementedError(f"its lowering does not take these arguments: {lines[0]}") from error
        raise LoweringError(f"{type(error).__name__}: {lines[0]}") from error


def _lowered_in_one_dimension(metas: Any, lowering: Callable, args: tuple, kwargs: dict) -> Any:
    """As `_lowered`, of tensors without dimensions: PyTorch lets them have one, of size 1, wherever one is named."""

    def lift(value: Any) -> Any:
        return jnp.reshape(value, 1) if isinstance(value, jax.Array) and not value.ndim else value

    def drop(value: Any, meta: Any) -> Any:
        fits = isinstance(meta, torch.Tensor) and jnp.size(value) == meta.numel()
        return jnp.reshape(value, meta.shape) if fits else value

    args, kwargs = jax.tree.map(lift, (args, kwargs))
    values = _lowered(lowering, args, kwargs)
    return tuple(map(drop, values, metas)) if isinstance(metas, (tuple, list)) else drop(values, metas)


def _takes(lowering: Callable, args: tuple, kwargs: dict) -> bool:
    """True if the arguments fit the lowering's signature."""
    try:
        inspect.signature(lowering).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function without a Python signature
        pass
    return True


# How exact products of float32 numbers are: as PyTorch's setting says, unless JAX has been told something itself.

_OF_PYTORCH = {"highest": "highest", "high": "high", "medium": "default"}
_OF_CUDA = {"tf32": "high", "bf16": "default"}


def matmul_precision() -> str:
    """The precision of float32 products in a call traced now, in JAX's words.

    `jax.default_matmul_precision` where the user has set it, otherwise `torch.get_float32_matmul_precision()`, which
    `torch.backends.cuda.matmul.allow_tf32` sets too. JAX's own default is bf16 passes on a TPU and TF32 on a GPU;
    PyTorch's is "highest".
    """
    return _of_jax() or _of_pytorch()


def _of_jax() -> str | None:
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def _of_pytorch() -> str:
    try:
        return _OF_PYTORCH[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set for CUDA alone, by the newer switch
        return _OF_CUDA.get(str(torch.backends.cuda.matmul.fp32_precision), "highest")


def precision_is_given() -> bool:
    """True if the user has set `jax.default_matmul_precision`."""
    return _of_jax() is not None


def products_of_pytorch() -> contextlib.AbstractContextManager:
    """The context of a traced call: float32 products have PyTorch's precision, unless JAX has been given one."""
    if precision_is_given():
        return contextlib.nullcontext()
    return jax.default_matmul_precision(_of_pytorch())
