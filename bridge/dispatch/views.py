"""Operations whose result shares memory with an argument: views, writes in place, and shapes changed in place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_autograd, below_modes, schema_name
from bridge.context import CallState
from bridge.dispatch.computation import WHOLE, compute, is_known
from bridge.dispatch.metas import check_write, meta_of_strided, metas_of
from bridge.dispatch.schemas import arrays_of, functional_of, functional_op, has_out, listed
from bridge.dispatch.values import raise_kernel_error
from bridge.lowerings.creation import broadcast
from bridge.lowerings.registry import METAS, inlined
from bridge.symbolic.ranges import after_write
from bridge.tensor.arrays import elements, jax_dtype, refuse_overlap, storage_offsets
from bridge.tensor.tensor import REGION, BridgeTensor, View, as_view, stop_gradient

aten = torch.ops.aten

# ---- a `View` for each view operation


def view_steps(func: Any, base: BridgeTensor, args: tuple, kwargs: dict, outs: list[torch.Tensor]) -> list[View]:
    """Returns one `View` for each output of the view operation `func`; `outs` are the outputs on the meta device.

    Raises `NotImplementedError` for a view that cannot be followed.
    """
    rule = _RULES.get(func)
    if rule is not None:
        return rule(base, outs, *args[1:], **kwargs)
    if func.namespace != "aten":
        raise NotImplementedError("a view that is not PyTorch's own")
    with below_modes():  # numbers the elements, for gather and scatter
        numbers = func(torch.arange(base.numel()).reshape(base.shape), *args[1:], **kwargs)
        return [_gather(each.numpy()) for each in listed(numbers)]


_reshaped, _transposed, _split_up = map(inlined, (lax.reshape, lax.transpose, lax.split))
_taken, _sliced = map(inlined, (lax.index_in_dim, lax.slice_in_dim))


def _reshape(_base: BridgeTensor, outs: list[torch.Tensor], *_settings: Any) -> list[View]:
    shape = tuple(outs[0].shape)
    return [View(lambda x: _reshaped(x, shape), lambda x, new: _reshaped(new, x.shape))]


def _permute(base: BridgeTensor, _outs: Any, dims: Sequence[int]) -> list[View]:
    order = tuple(d % base.dim() for d in dims)
    inverse = tuple(order.index(i) for i in range(len(order)))
    return [View(lambda x: _transposed(x, order), lambda x, new: _transposed(new, inverse))]


def _transpose(base: BridgeTensor, outs: Any, dim0: int = 0, dim1: int = -1) -> list[View]:
    order = list(range(base.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(base, outs, order)


def _select(base: BridgeTensor, _outs: Any, dim: int, index: int) -> list[View]:
    dim = dim % base.dim()
    index = int(index) % base.shape[dim]
    where = (slice(None),) * dim + (index,)
    return [View(lambda x: _taken(x, index, dim, keepdims=False), lambda x, new: x.at[where].set(new))]


def _unbind(base: BridgeTensor, outs: list[torch.Tensor], dim: int = 0) -> list[View]:
    return [view for index in range(len(outs)) for view in _select(base, outs, dim, index)]


def _slice(
    base: BridgeTensor, _outs: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> list[View]:
    dim = dim % base.dim()
    start, end, step = slice(start, end, step).indices(base.shape[dim])
    where = (slice(None),) * dim + (slice(start, end, step),)
    end = max(start, end)
    return [View(lambda x: _sliced(x, start, end, step, dim), lambda x, new: x.at[where].set(new))]


def _split(base: BridgeTensor, outs: list[torch.Tensor], _sizes: Any, dim: int = 0) -> list[View]:
    """Makes all pieces at once: their gradients then form one concatenation instead of a sum of padded arrays."""
    known: list[Any] = [None, None, ()]
    dim = dim % base.dim()
    sizes = tuple(out.shape[dim] for out in outs)

    def piece(i: int) -> View:
        def get(x: jax.Array) -> jax.Array:
            if known[0] is not x or known[1] is not REGION.notes:
                known[:] = [x, REGION.notes, _split_up(x, sizes, dim)]
            return known[2][i]

        (alone,) = _slice(base, outs, dim, sum(sizes[:i]), sum(sizes[: i + 1]))
        return View(get, alone.put)

    return [piece(i) for i in range(len(sizes))]


def _expand(base: BridgeTensor, outs: list[torch.Tensor], *_sizes: Any, **_settings: Any) -> list[View]:
    wide = tuple(outs[0].shape)
    repeats = functools.partial(operator.ne, outs[0].numel(), base.numel())
    return [View(lambda x: broadcast(x, wide), lambda x, new: jnp.reshape(new, x.shape), repeats)]


def _parts(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


def _joined(x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


def _bits(base: BridgeTensor, outs: list[torch.Tensor], _dtype: torch.dtype) -> list[View]:
    """Reads the same bits as another dtype; this is not differentiable, in PyTorch neither."""
    old = base.dtype
    new = outs[0].dtype
    if old.is_complex or new.is_complex:
        raise NotImplementedError("the bits of complex numbers; use view_as_real and view_as_complex")
    here = jnp.dtype(jax_dtype(old))
    there = jnp.dtype(jax_dtype(new))
    if (here.itemsize, there.itemsize) != (old.itemsize, new.itemsize):
        raise NotImplementedError(
            "the bits of 64-bit numbers, which JAX stores as 32-bit ones while x64 is off; an integer input of 32 bits "
            "counts as one of 64, and `x.to(torch.int32)` has 32"
        )

    def cast(x: jax.Array, dtype: Any) -> jax.Array:
        # XLA merges two casts in a row, and fails if three sizes are involved.
        return lax.optimization_barrier(stop_gradient(x)).view(dtype)

    return [View(lambda x: cast(x, there), lambda x, value: cast(value, here))]


def _as_strided(base: BridgeTensor, outs: list[torch.Tensor], *_place: Any, **_named: Any) -> list[View]:
    """Starts from the handle's whole base: `as_strided` counts in memory, not in the tensor that it is called on."""
    (out,) = outs
    layout = base._handle.storage.layout
    assert layout is not None
    if layout.dtype != out.dtype:
        raise NotImplementedError("it counts elements of a tensor that views another dtype")
    index = elements(layout, storage_offsets(out))
    if index is None:
        raise NotImplementedError("it reaches memory that is no element of the tensor")
    if (
        base._handle.live
        and torch.is_grad_enabled()
        and not np.isin(storage_offsets(out), storage_offsets(base._meta)).all()
    ):
        # PyTorch's gradient reaches only the elements of the tensor, until something is written into the memory.
        raise NotImplementedError("it reaches elements outside of the tensor; call it on the tensor that has them all")
    return [_gather(index)]


def _gather(index: np.ndarray) -> View:
    return View(
        lambda x: jnp.reshape(x, -1)[index],
        lambda x, new: jnp.reshape(jnp.reshape(x, -1).at[index].set(new), x.shape),
        lambda: np.unique(index).size != index.size,
    )


_RULES: dict[Any, Callable[..., list[View]]] = {
    **dict.fromkeys(
        (
            aten.view.default, aten._reshape_alias.default, aten.unsqueeze.default, aten.squeeze.default,
            aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default, aten.lift_fresh.default,
            aten._unsafe_view.default,
        ),
        _reshape,
    ),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.expand.default: _expand,
    aten.as_strided.default: _as_strided,
    aten.view.dtype: _bits,
    aten.view_as_real.default: lambda *_: [View(_parts, lambda x, new: _joined(new))],
    aten.view_as_complex.default: lambda *_: [View(_joined, lambda x, new: _parts(new))],
    # PyTorch defers both until somebody reads, and marks the tensor; here the view itself computes it.
    aten._conj.default: lambda *_: [View(jnp.conj, lambda x, new: jnp.conj(new))],
    aten._neg_view.default: lambda *_: [View(jnp.negative, lambda x, new: jnp.negative(new))],
}  # fmt: skip
"""View operation -> function of the viewed tensor, the outputs on the meta device and the other arguments."""
METAS[aten._conj.default] = METAS[aten._neg_view.default] = aten.alias.default


# ---- views, writes in place, and shapes changed in place

GIVES_MEMORY = "it gives a tensor the memory of another one; `x.data = y` does"
_IN_DTYPE_OF_OUT = {aten.sum, aten.nansum, aten.mean, aten.prod, aten.cumsum, aten.cumprod}
"""Operations that compute in the dtype of `out=` if no dtype is given."""


def make_view(context: CallState, func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns a tensor, or several, over the memory of the first argument."""
    base: BridgeTensor = args[0]
    strided = func is aten.as_strided.default
    detached = func is aten.detach.default
    if strided:
        metas = meta_of_strided(base, *args[1:], **kwargs)
    else:
        metas = metas_of(context, func, args, kwargs)
    outs = list(listed(metas))
    several = isinstance(metas, (tuple, list))
    if context.survey is not None:
        context.survey.note(func, "view")
    steps = view_steps(func, base, args, kwargs, outs)
    marks: dict[str, Any] = {"one_of_several": True} if several else {}
    if detached:
        marks = {"detached": True}
    elif not torch.is_grad_enabled():
        marks = {"base": base._handle, "inference": torch.is_inference_mode_enabled()}
    if marks:
        steps = [dataclasses.replace(step, **marks) for step in steps]
    if strided:  # counts in memory, so it starts from the handle's base
        base = BridgeTensor(base._handle, base._meta)
    # The code did not call a `detach` that the autograd layer has not passed on: PyTorch's graph saves a result.
    if detached:
        tracks = context.recording and not below_autograd()
    else:
        tracks = torch.is_grad_enabled()
    made = [as_view(base, o, s, differentiable=bool(tracks)) for o, s in zip(outs, steps, strict=True)]
    if several:
        return made
    return made[0]


def reshape_in_place(context: CallState, func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs `transpose_`, `squeeze_` and their like: the same tensor object becomes a view of the former tensor."""
    target = args[0]
    name = schema_name(func).removeprefix("aten::")
    if name == "set_":
        raise NotImplementedError(GIVES_MEMORY)
    if name == "as_strided_":
        # Every element has to stay at its place, as in PyTorch's pooling of channels-last images to one element.
        there = storage_offsets(meta_of_strided(*args, **kwargs))
        here = storage_offsets(target._meta)
        if there.shape != here.shape or (there != here).any():
            raise NotImplementedError("PyTorch's gradient of it is wrong once the memory is written; use as_strided")
    if context.condition is not None:
        raise NotImplementedError(
            "a turn of a loop over selected rows changes a shape, which PyTorch may leave as it is"
        )
    _refuse_write(target, [])
    if name in ("resize_", "resize_as_"):
        size = args[1] if isinstance(args[1], (list, tuple)) else args[1].shape
        if math.prod(size) > target._handle.read().size:
            raise NotImplementedError("it makes a tensor larger; make one of the new size")
    view = make_view(context, functional_op(func), args, kwargs)
    with below_modes():
        func(*args, **kwargs)  # updates PyTorch's own record of the shape
    target.become(view)
    return target


def write_in_place(context: CallState, func: Any, args: tuple, kwargs: dict) -> Any:
    """Writes the result of the operation's functional form into the target, and returns the target."""
    given = args, kwargs
    target, functional, args, kwargs = functional_of(func, args, kwargs)
    inputs: list[BridgeTensor] = []
    arrays_of((*args, *kwargs.values()), inputs)
    _refuse_write(target, inputs)
    for each in inputs:
        if each is not target and each._handle.storage is target._handle.storage:
            refuse_overlap(target._meta, each._meta)
    check_write(func, target, args, kwargs)
    if _takes_wider(target, (*args, *kwargs.values())):
        raise_kernel_error(func, *given)
    into_out = has_out(func)
    if into_out and functional.overloadpacket in _IN_DTYPE_OF_OUT and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": target.dtype}
    source = compute(context, functional, args, kwargs, like=None if into_out else target)
    if context.condition is not None:
        source = compute(context, aten.where.self, (context.condition, context.wrap(source), target), {}, like=target)
    if isinstance(source, torch.Tensor):  # a constant, if the old values do not matter, as in `zero_`
        source = context.wrap(source)
    if not isinstance(source, BridgeTensor) or source.shape != target.shape:
        raise NotImplementedError("it resizes the tensor of `out=`; give that the size of the result, or leave it out")
    bounds = after_write(target, source)
    may_be_known = target.dtype in WHOLE and not isinstance(source.value, Tracer)  # before the target is read
    known = may_be_known and is_known((source.value, target._handle.read()), target.numel())
    with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
        target.write(
            source.value.astype(jax_dtype(target.dtype)),
            tracked=source._handle.tracked,
            grad_enabled=torch.is_grad_enabled(),
            live=source._handle.live,
        )
    target._handle.storage.bounds = bounds
    return target


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32, complex: torch.complex64}


def _takes_wider(target: BridgeTensor, values: tuple) -> bool:
    """True if a value has a type that the target cannot hold, such as a float if the target holds integers."""
    for value in values:
        if isinstance(value, torch.Tensor):
            dtype = value.dtype
        else:
            dtype = _DTYPES.get(type(value), target.dtype)
        if not torch.can_cast(dtype, target.dtype):
            return True
    return False


def _refuse_write(target: BridgeTensor, inputs: list[BridgeTensor]) -> None:
    """Raises what PyTorch raises for a write, with gradients enabled, into a leaf or into certain views.

    Results of `unbind`, `split` and `chunk` accept no write, nor do views that were made while gradients were off.
    """
    if not torch.is_grad_enabled():
        return
    if target.requires_grad and target._handle.leaf is not None:
        what = "a leaf Variable" if target.is_leaf else "a view of a leaf Variable"
        raise RuntimeError(f"{what} that requires grad is being used in an in-place operation.")
    tracked = target._views and (target.requires_grad or any(each.requires_grad for each in inputs))
    for view in reversed(target._views):
        if view.detached:
            return
        if view.one_of_several and tracked:
            raise RuntimeError(
                "a view is being modified inplace. This view is the output of a function that returns multiple views, "
                "which PyTorch does not allow; use an operation that is not in place"
            )
        if view.base is not None and (tracked or view.base.tracked):
            mode = "inference mode" if view.inference else "no_grad mode"
            raise RuntimeError(
                f"A view was created in {mode} and is being modified inplace with gradients enabled, which is "
                f"forbidden. Make the view and the write both in {mode}, or both outside of it."
            )
