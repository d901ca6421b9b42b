"""Operations that compute a new tensor: values by a lowering or a decomposition, shape and dtype by PyTorch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch

from bridge._compat.torchax import decomposition, torchax_lowering
from bridge.arrays import jax_dtype
from bridge.cells import differentiable, stop_gradient
from bridge.draws import drawn_numbers
from bridge.errors import BridgeError
from bridge.inlining import cast
from bridge.integers import REMEDY, RangeError, fitting
from bridge.lowerings import BY_LAYOUT, LOWERINGS
from bridge.lowerings.creation import broadcast
from bridge.metas import listed, map_tensors
from bridge.operations import takes_dimension
from bridge.precision import precision_for
from bridge.randomness import RANDOM
from bridge.tensors import BridgeTensor, fresh
from bridge.untranslated import DEFECT_REMEDY, TRACE_ERRORS, LoweringError

if TYPE_CHECKING:
    from bridge.dispatch import Dispatch

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
"""What a lowering raises without a defect of its own: `jax.debug_nans`, and devices that are out of memory."""


def compute(dispatch: Dispatch, func: Any, args: tuple, kwargs: dict, like: BridgeTensor | None = None) -> Any:
    """A new tensor, or several. `like`: the tensor an in-place operation will write, which fixes the dtype."""
    inputs: list[BridgeTensor] = []
    arrays, array_kwargs = _arrays(args, kwargs, values_into(inputs))
    random = RANDOM.get(func)
    lowering = None if random else _lowering(dispatch, func)
    if random is None and lowering is None:
        return _decompose(dispatch, func, args, kwargs)
    dispatch.note(func, "random" if random else _server(dispatch, func, lowering))
    metas = dispatch.metas_of(func, args, kwargs) if like is None else like._meta
    outs = listed(metas)
    replaced = _narrowed(func, args, kwargs, inputs, outs) or _broadcast(func, args, kwargs, inputs, outs)
    arrays, array_kwargs = replaced or (arrays, array_kwargs)
    arrays, array_kwargs = fitting(func, arrays, array_kwargs, any(differentiable(t.dtype) for t in inputs))
    by_layout = BY_LAYOUT.get(func)
    if by_layout is not None and lowering is LOWERINGS.get(func):
        array_kwargs = array_kwargs | by_layout(*args, **kwargs)
    bounds = _bounds(dispatch, func, args, kwargs, outs)
    if random:
        values = drawn_numbers(
            dispatch, func, args, kwargs, lambda source: random(source, metas, *arrays, **array_kwargs)
        )
    else:
        assert lowering is not None
        with precision_for((t.value for t in inputs), dispatch.products_of_pytorch):
            if inputs and not inputs[0].dim() and takes_dimension(func):
                values = _lowered_in_one_dimension(lowering, arrays, array_kwargs, metas)
            else:
                values = _lowered(lowering, arrays, array_kwargs)
    if not isinstance(metas, (tuple, list)):
        values = (values,)
    elif len(values) != len(outs):
        raise NotImplementedError(f"its lowering gives {len(values)} results, PyTorch {len(outs)}")
    tracked = random is None and torch.is_grad_enabled() and any(t._cell.tracked for t in inputs)
    live = any(t._cell.live for t in inputs)
    stopped = live and (random is not None or not torch.is_grad_enabled())
    results = tuple(
        result_of(dispatch, func, value, meta, tracked, live, stopped) for value, meta in zip(values, outs, strict=True)
    )
    if dispatch.integers is not None and bounds is not None:
        dispatch.integers.note(results, bounds)
    dispatch.positions.note(func, args, kwargs, results)
    return type(metas)(results) if isinstance(metas, (tuple, list)) else results[0]


def _arrays(args: tuple, kwargs: dict, leaf: Callable[[BridgeTensor], jax.Array]) -> tuple[tuple, dict]:
    """The arguments with arrays in place of tensors."""
    arrays, array_kwargs = map_tensors(args, leaf), {k: map_tensors(v, leaf) for k, v in kwargs.items()}
    return arrays, array_kwargs


def _narrowed(func: Any, args: tuple, kwargs: dict, inputs: list[BridgeTensor], outs: Any) -> tuple[tuple, dict] | None:
    """The arguments of a pointwise operation on integers where one without dimensions has more bits than the others.

    PyTorch converts it to the dtype of the others first.
    """
    if len(inputs) < 2 or not (torch.Tag.pointwise in func.tags or func is torch.ops.aten.floor_divide.default):
        return None
    integers = [t for t in inputs if t.dtype in _INTEGERS]
    sizes = {t.dtype for t in integers if t.dim()}
    if not sizes or {t.dtype for t in integers} == sizes or any(differentiable(t.dtype) for t in (*inputs, *outs)):
        return None
    dtype = jax_dtype(functools.reduce(torch.promote_types, sizes))
    return _arrays(args, kwargs, lambda t: cast(t.value, dtype) if t.dtype in _INTEGERS else t.value)


def _broadcast(
    func: Any, args: tuple, kwargs: dict, inputs: list[BridgeTensor], outs: Any
) -> tuple[tuple, dict] | None:
    """The arguments where one of a narrow type is broadcast to the result and may have a gradient."""
    place = _BROADCAST.get(func)
    if not torch.is_grad_enabled() or (place is None and torch.Tag.pointwise not in func.tags):
        return None
    if len(outs) > 1:
        return None
    (out,) = outs
    candidates = inputs if place is None else args[place : place + 1]

    def is_broadcast(t: Any) -> bool:
        return t._cell.live and t.dtype == out.dtype and t.dtype in _NARROW and t.shape != out.shape

    chosen = [t for t in candidates if isinstance(t, BridgeTensor) and is_broadcast(t)]
    if not chosen:
        return None
    shape = tuple(out.shape)
    return _arrays(args, kwargs, lambda t: broadcast(t.value, shape) if any(t is one for one in chosen) else t.value)


def values_into(seen: list[BridgeTensor]) -> Callable[[BridgeTensor], jax.Array]:
    """A function that gives the array of a tensor and appends the tensor to `seen`."""

    def leaf(tensor: BridgeTensor) -> jax.Array:
        seen.append(tensor)
        return tensor.value

    return leaf


def _bounds(dispatch: Dispatch, func: Any, args: tuple, kwargs: dict, outs: Any) -> list | None:
    """What 64-bit integers among the results may be, where JAX stores them in 32 bits."""
    if dispatch.integers is None:
        return None
    try:
        return dispatch.integers.bounds(func, args, kwargs, outs)
    except RangeError as error:
        what = f"`{func.name()}` makes or takes 64-bit integers that 32 bits do not hold: they {error}"
        if dispatch.survey is None:
            raise dispatch.error(what, REMEDY) from None
        dispatch.survey.unsupported.setdefault(func.name(), f"{what}, {dispatch.where()}")
        return None


def result_of(dispatch: Dispatch, func: Any, value: Any, meta: Any, tracked: bool, live: bool, stopped: bool) -> Any:
    if not isinstance(meta, torch.Tensor):
        return meta if value is None else value
    value = jnp.asarray(value)
    if value.shape != tuple(meta.shape):
        raise dispatch.error(
            f"the lowering of `{func.name()}` gave shape {value.shape}, PyTorch gives {tuple(meta.shape)}",
            DEFECT_REMEDY,
        )
    if value.dtype != jax_dtype(meta.dtype):
        value = cast(value, jax_dtype(meta.dtype))
    if func is not aten._efficientzerotensor.default:  # exact, and float64 where PyTorch adds a Python number
        _notice_narrowing(dispatch, meta.dtype, value)
    if stopped:
        value, live = stop_gradient(value), False
    free = differentiable(meta.dtype)
    return fresh(value, meta, tracked=tracked and free, live=live and free)


def _notice_narrowing(dispatch: Dispatch, dtype: torch.dtype, value: jax.Array) -> None:
    if dtype in (torch.float64, torch.complex128) and value.dtype.itemsize < dtype.itemsize:
        dispatch.warn(f"{dtype} is computed as {value.dtype}", "set JAX_ENABLE_X64=1 for full precision")


def _lowering(dispatch: Dispatch, func: Any) -> Callable | None:
    if not dispatch.is_off(func):
        ours = dispatch.chosen_lowering(func) or LOWERINGS.get(func)
        if ours is not None:
            return ours
    return torchax_lowering(func)


def _server(dispatch: Dispatch, func: Any, lowering: Any) -> str:
    if lowering is LOWERINGS.get(func):
        return "ours"
    return "chosen" if lowering is dispatch.chosen_lowering(func) else "torchax"


def _decompose(dispatch: Dispatch, func: Any, args: tuple, kwargs: dict) -> Any:
    made_of = decomposition(func)
    if made_of is None:
        raise NotImplementedError("neither a lowering nor a decomposition")
    with dispatch.taking_apart():
        result = made_of(*args, **kwargs)
    if result is NotImplemented:
        raise NotImplementedError("its decomposition does not take these arguments")
    return result


def _lowered(lowering: Callable, args: tuple, kwargs: dict) -> Any:
    """What the lowering gives. Raises `NotImplementedError` if it was not written for these arguments."""
    try:
        return lowering(*args, **kwargs)
    except (*TRACE_ERRORS, *_OF_THE_RUN, NotImplementedError, BridgeError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        if not _takes(lowering, args, kwargs):
            raise NotImplementedError(f"its lowering does not take these arguments: {lines[0]}") from error
        raise LoweringError(f"{type(error).__name__}: {lines[0]}") from error


def _lowered_in_one_dimension(lowering: Callable, args: tuple, kwargs: dict, metas: Any) -> Any:
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
    """Whether the arguments fit the lowering's signature."""
    try:
        inspect.signature(lowering).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function without a Python signature
        pass
    return True
