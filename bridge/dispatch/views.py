"""Operations whose result shares memory with an argument: views, writes in place, and shapes changed in place."""

from __future__ import annotations

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

from bridge._compat.torch import below_autograd, below_modes, schema_name
from bridge.context import TraceContext
from bridge.dispatch.compute import (
    arrays_of,
    check_write,
    compute,
    functional_of,
    functional_op,
    has_out,
    listed,
    meta_of,
    meta_of_strided,
)
from bridge.dispatch.values import raise_if_not_cast
from bridge.lowerings.creation import broadcast
from bridge.lowerings.registry import METAS, inlined
from bridge.symbolic.ranges import after_write
from bridge.tensor.arrays import elements, jax_dtype, positions, refuse_overlap
from bridge.tensor.tensor import REGION, BridgeTensor, View, as_view, stop_gradient

aten = torch.ops.aten

_RESHAPES = {
    aten.view.default, aten._reshape_alias.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default, aten.lift_fresh.default,
    aten._unsafe_view.default,
}  # fmt: skip


def view_steps(  # noqa: C901 (one case for each view operation)
    func: Any, base: BridgeTensor, args: tuple, kwargs: dict, outs: list[torch.Tensor]
) -> list[View]:
    """One `View` for each output of the view operation `func`; `outs` are its outputs on the meta device.

    Raises `NotImplementedError` for a view this cannot follow.
    """
    shape = tuple(base.shape)
    if func in _RESHAPES:
        return [_reshape(tuple(out.shape)) for out in outs]
    rest = args[1:]
    if func is aten.permute.default:
        return [_permute([d % len(shape) for d in rest[0]])]
    if func is aten.transpose.int:
        order = list(range(len(shape)))
        if order:
            a, b = rest[0] % len(shape), rest[1] % len(shape)
            order[a], order[b] = order[b], order[a]
        return [_permute(order)]
    if func is aten.t.default:
        return [_permute(list(reversed(range(len(shape)))))]
    if func is aten.slice.Tensor:
        dim = (rest[0] if rest else kwargs.get("dim", 0)) % len(shape)
        start, end, step = (*rest[1:], *(None,) * (3 - len(rest[1:])))
        return [_index(dim, slice(*slice(start, end, step or 1).indices(shape[dim])))]
    if func is aten.select.int:
        dim = rest[0] % len(shape)
        return [_index(dim, int(rest[1]) % shape[dim])]
    if func is aten.unbind.int:
        dim = (rest[0] if rest else kwargs.get("dim", 0)) % len(shape)
        return [_index(dim, i) for i in range(shape[dim])]
    if func in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = (rest[1] if len(rest) > 1 else kwargs.get("dim", 0)) % len(shape)
        return _split(dim, [out.shape[dim] for out in outs])
    if func is aten.expand.default:
        wide = tuple(outs[0].shape)
        repeats = functools.partial(operator.ne, outs[0].numel(), base.numel())
        return [View(lambda x: broadcast(x, wide), lambda x, new: jnp.reshape(new, x.shape), repeats)]
    if func is aten.as_strided.default:
        return [_as_strided(base, outs[0])]
    if func is aten.view.dtype:
        return [_bits(base.dtype, outs[0].dtype)]
    if func in _OF_NUMBERS:
        return [_OF_NUMBERS[func]]
    if func.namespace != "aten":
        raise NotImplementedError("a view that is not PyTorch's own")
    return _by_index_map(func, base, args, kwargs)


def _parts(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


def _joined(x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


_OF_NUMBERS = {
    aten.view_as_real.default: View(_parts, lambda x, new: _joined(new)),
    aten.view_as_complex.default: View(_joined, lambda x, new: _parts(new)),
    # PyTorch puts both off until somebody reads, and marks the tensor; here the view itself computes it.
    aten._conj.default: View(jnp.conj, lambda x, new: jnp.conj(new)),
    aten._neg_view.default: View(jnp.negative, lambda x, new: jnp.negative(new)),
}
METAS[aten._conj.default] = METAS[aten._neg_view.default] = aten.alias.default


def _bits(old: torch.dtype, new: torch.dtype) -> View:
    """The same bits read as another dtype; nothing of it is differentiable, in PyTorch neither."""
    if old.is_complex or new.is_complex:
        raise NotImplementedError("the bits of complex numbers; use view_as_real and view_as_complex")
    here, there = jnp.dtype(jax_dtype(old)), jnp.dtype(jax_dtype(new))
    if (here.itemsize, there.itemsize) != (old.itemsize, new.itemsize):
        raise NotImplementedError(
            "the bits of 64-bit numbers, which JAX stores as 32-bit ones while x64 is off; an integer input of 32 bits "
            "counts as one of 64, and `x.to(torch.int32)` has 32"
        )
    # XLA takes two casts in a row together, and fails where three sizes are involved.
    there, back = (functools.partial(_bitcast_alone, dtype=dtype) for dtype in (there, here))
    return View(there, lambda x, value: back(value))


def _bitcast_alone(x: jax.Array, dtype: Any) -> jax.Array:
    return _bitcast(lax.optimization_barrier(stop_gradient(x)), dtype)


def _bitcast(x: jax.Array, dtype: Any) -> jax.Array:
    dtype = jnp.dtype(dtype)
    x = x.view(jnp.uint8) if x.dtype == bool else x
    if jnp.issubdtype(dtype, jnp.bool_):
        return _bitcast(x, jnp.uint8) != 0
    ratio = dtype.itemsize // x.dtype.itemsize
    if ratio > 1:
        x = jnp.reshape(x, (*x.shape[:-1], x.shape[-1] // ratio, ratio))
    out = lax.bitcast_convert_type(x, dtype)
    return jnp.reshape(out, (*out.shape[:-2], -1)) if out.ndim > x.ndim else out


_reshaped, _transposed, _split_up = map(inlined, (lax.reshape, lax.transpose, lax.split))
_taken, _sliced = map(inlined, (lax.index_in_dim, lax.slice_in_dim))


def _reshape(shape: tuple[int, ...]) -> View:
    return View(lambda x: _reshaped(x, shape), lambda x, new: _reshaped(new, x.shape))


def _permute(dims: Sequence[int]) -> View:
    order = tuple(dims)
    inverse = tuple(order.index(i) for i in range(len(order)))
    return View(lambda x: _transposed(x, order), lambda x, new: _transposed(new, inverse))


def _index(dim: int, index: int | slice) -> View:
    where = (slice(None),) * dim + (index,)

    if isinstance(index, int):
        return View(lambda x: _taken(x, index, dim, keepdims=False), lambda x, new: x.at[where].set(new))
    start, stop, step = index.start, max(index.start, index.stop), index.step
    return View(lambda x: _sliced(x, start, stop, step, dim), lambda x, new: x.at[where].set(new))


def _split(dim: int, sizes: list[int]) -> list[View]:
    """All pieces at once: the gradients then meet in one concatenation instead of a sum of padded arrays."""
    known: list[Any] = [None, None, ()]

    def piece(i: int) -> View:
        start = sum(sizes[:i])

        def get(x: jax.Array) -> jax.Array:
            if known[0] is not x or known[1] is not REGION.notes:
                known[:] = [x, REGION.notes, _split_up(x, tuple(sizes), dim)]
            return known[2][i]

        return View(get, _index(dim, slice(start, start + sizes[i], 1)).put)

    return [piece(i) for i in range(len(sizes))]


def _by_index_map(func: Callable, base: BridgeTensor, args: tuple, kwargs: dict) -> list[View]:
    """Any other view: run it in PyTorch on the numbers of the elements, and gather and scatter by them."""
    with below_modes():
        return [_gather(index) for index in _index_maps(func, base, args, kwargs)]


def _index_maps(func: Callable, base: BridgeTensor, args: tuple, kwargs: dict) -> list[np.ndarray]:
    out = func(torch.arange(base.numel()).reshape(base.shape), *args[1:], **kwargs)
    return [o.numpy() for o in (out if isinstance(out, (list, tuple)) else [out])]


def _as_strided(base: BridgeTensor, out: torch.Tensor) -> View:
    """It counts in memory, not in the tensor it is called on, so it starts from the cell's whole base.

    The gradient reaches the elements of the tensor it is called on only, as in PyTorch. Once something was written into
    the memory, PyTorch takes the view of the base, and it reaches all.
    """
    layout = base._cell.storage.layout
    assert layout is not None
    if layout.dtype != out.dtype:
        raise NotImplementedError("it counts elements of a tensor that views another dtype")
    index = elements(layout, positions(out))
    if index is None:
        raise NotImplementedError("it reaches memory that is no element of the tensor")
    view = _gather(index)
    own = np.isin(positions(out), positions(base._meta))
    if own.all():
        return view
    storage, versions = base._cell.storage, [base._cell.storage.version]

    def get(x: jax.Array) -> jax.Array:
        as_it_was = storage.version in versions
        return jnp.where(own, view.get(x), stop_gradient(view.get(x))) if as_it_was else view.get(x)

    return dataclasses.replace(view, get=get, renew=versions.clear)


def _gather(index: np.ndarray) -> View:
    return View(
        lambda x: jnp.reshape(x, -1)[index],
        lambda x, new: jnp.reshape(jnp.reshape(x, -1).at[index].set(new), x.shape),
        lambda: np.unique(index).size != index.size,
    )


# ---- views, writes in place, and shapes changed in place

GIVES_MEMORY = "it gives a tensor the memory of another one; `x.data = y` does"
_IN_DTYPE_OF_OUT = {aten.sum, aten.nansum, aten.mean, aten.prod, aten.cumsum, aten.cumprod}
"""Operations that compute in the dtype of `out=` where they are told none."""


def make_view(context: TraceContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """A tensor, or several, over the memory of the first argument."""
    base: BridgeTensor = args[0]
    metas = meta_of_strided(base, *args[1:], **kwargs) if func is aten.as_strided.default else None
    metas = meta_of(func, args, kwargs) if metas is None else metas
    outs = list(listed(metas))
    if context.survey is not None:
        context.survey.note(func, "view")
    steps = view_steps(func, base, args, kwargs, outs)
    if func is aten.detach.default:
        steps = [dataclasses.replace(step, detached=True) for step in steps]
    elif not torch.is_grad_enabled():
        inference = torch.is_inference_mode_enabled()
        steps = [dataclasses.replace(step, base=base._cell, inference=inference) for step in steps]
    elif isinstance(metas, (tuple, list)):
        steps = [dataclasses.replace(step, one_of_several=True) for step in steps]
    if func is aten.as_strided.default:  # counts in memory: starts over from the cell's base
        base = BridgeTensor(base._cell, base._meta)
    tracks = torch.is_grad_enabled() and func is not aten.detach.default
    if func is aten.detach.default and context.recording and not below_autograd():
        tracks = True  # no operation: PyTorch's graph keeps a result for its backward
    made = [as_view(base, o, s, differentiable=tracks) for o, s in zip(outs, steps, strict=True)]
    return made if isinstance(metas, (tuple, list)) else made[0]


def reshape_in_place(context: TraceContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`transpose_`, `squeeze_` and their like: the same tensor object becomes a view of what it was."""
    target = args[0]
    if schema_name(func) == "aten::set_":
        raise NotImplementedError(GIVES_MEMORY)
    if schema_name(func) == "aten::as_strided_" and not _keeps_places(target, *args[1:], **kwargs):
        raise NotImplementedError("PyTorch's gradient of it is wrong where the memory is written later; use as_strided")
    if torch.is_grad_enabled():
        _refuse_write_into_leaf(target)
        _refuse_write_into_view(target, [])
    if schema_name(func) in ("aten::resize_", "aten::resize_as_"):
        size = args[1] if isinstance(args[1], (list, tuple)) else args[1].shape
        if math.prod(size) > target._cell.read().size:
            raise NotImplementedError("it makes a tensor larger; make one of the new size")
    view = make_view(context, functional_op(func), args, kwargs)
    with below_modes():
        func(*args, **kwargs)  # PyTorch's own record of the shape
    target.become(view)
    return target


def _keeps_places(target: BridgeTensor, size: Any, stride: Any, storage_offset: int | None = None) -> bool:
    """True if every element stays where it is, as in PyTorch's pooling to one element of channels-last images."""
    strides = zip(size, stride, target._meta.stride(), strict=True) if len(size) == target.dim() else ((2, 0, 1),)
    return (
        tuple(size) == tuple(target.shape)
        and storage_offset in (None, target._meta.storage_offset())
        and all(n <= 1 or new == old for n, new, old in strides)
    )


def write_in_place(context: TraceContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """The target, after what the operation would give without its write was written into it."""
    target, functional, args, kwargs = functional_of(func, args, kwargs)
    if not isinstance(target, torch.Tensor):
        raise NotImplementedError("it writes a list of tensors; write them one by one")
    inputs: list[BridgeTensor] = []
    arrays_of((*args, *kwargs.values()), inputs)
    if torch.is_grad_enabled():
        _refuse_write_into_leaf(target)
        _refuse_write_into_view(target, inputs)
    for each in inputs:
        if each is not target and each._cell.storage is target._cell.storage:
            refuse_overlap(target._meta, each._meta)
    if target._views:
        target.renew_views()
    check_write(func, target, args, kwargs)
    raise_if_not_cast(func, args, kwargs)
    into_out = has_out(func)
    if into_out and functional.overloadpacket in _IN_DTYPE_OF_OUT and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": target.dtype}
    source = compute(context, functional, args, kwargs, like=None if into_out else target)
    if not isinstance(source, torch.Tensor) or source.shape != target.shape:
        raise NotImplementedError("it resizes the tensor of `out=`; give that the size of the result, or leave it out")
    source = context.adopt(source)  # a constant where what was written there does not count, as in `zero_`
    value = source.value.astype(jax_dtype(target.dtype))
    tracked = source._cell.tracked
    for each in inputs:
        tracked = tracked or (each is not target and each._cell.tracked)
    known = after_write(target, source)
    target.write(value, tracked=tracked, grad_enabled=torch.is_grad_enabled(), live=source._cell.live)
    target._cell.storage.bounds = known
    return target


def _refuse_write_into_leaf(target: BridgeTensor) -> None:
    """Raise what PyTorch raises for a write with gradients on: the leaf would no longer be one."""
    if target.requires_grad and target._cell.leaf is not None:
        what = "a leaf Variable" if target.is_leaf else "a view of a leaf Variable"
        raise RuntimeError(f"{what} that requires grad is being used in an in-place operation.")


def _refuse_write_into_view(target: BridgeTensor, inputs: list[BridgeTensor]) -> None:
    """Raise what PyTorch raises for a write that has a gradient, depending on how the target was made.

    The results of `unbind`, `split` and `chunk` take none, nor do views that were made while gradients were off.
    """
    tracked = target.requires_grad or any(each.requires_grad for each in inputs)
    for view in reversed(target._views):
        if view.detached:
            return
        if view.one_of_several and tracked:
            raise RuntimeError(
                "a view is being modified inplace. This view is the output of a function that returns multiple views. "
                "Such functions do not allow the output views to be modified inplace. You should replace the inplace "
                "operation by an out-of-place one."
            )
        if view.base is not None and (tracked or view.base.tracked):
            mode = "inference mode" if view.inference else "no_grad mode"
            raise RuntimeError(
                f"A view was created in {mode} and is being modified inplace with gradients enabled, which is "
                f"forbidden. Make the view and the write both in {mode}, or both outside of it."
            )
