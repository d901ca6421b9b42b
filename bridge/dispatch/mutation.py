"""Operations whose result shares memory with an argument: views, writes in place, and shapes changed in place."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from bridge._compat.torch import below_autograd, below_modes, schema_name
from bridge.context import TraceContext
from bridge.dispatch.compute import arrays_of, compute
from bridge.dispatch.meta import check_write, listed, meta_of_strided, traced_meta_of
from bridge.dispatch.schema import functional_of, functional_op, has_out
from bridge.dispatch.values import raise_if_not_cast
from bridge.dispatch.views import view_steps
from bridge.symbolic.ranges import after_write
from bridge.tensor.convert import jax_dtype
from bridge.tensor.layout import refuse_overlap
from bridge.tensor.tensor import BridgeTensor, as_view

aten = torch.ops.aten

GIVES_MEMORY = "it gives a tensor the memory of another one; `x.data = y` does"
_IN_DTYPE_OF_OUT = {aten.sum, aten.nansum, aten.mean, aten.prod, aten.cumsum, aten.cumprod}
"""Operations that compute in the dtype of `out=` where they are told none."""


def make_view(context: TraceContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """A tensor, or several, over the memory of the first argument."""
    base: BridgeTensor = args[0]
    metas = meta_of_strided(base, *args[1:], **kwargs) if func is aten.as_strided.default else None
    metas = traced_meta_of(func, args, kwargs) if metas is None else metas
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
    _refuse_write_into_leaf(target)
    _refuse_write_into_view(target, inputs)
    for each in inputs:
        if each is not target and each._cell.storage is target._cell.storage:
            refuse_overlap(target._meta, each._meta)
    target.renew_views()
    check_write(func, target, args, kwargs)
    raise_if_not_cast(func, args, kwargs)
    into_out = has_out(func)
    if into_out and functional.overloadpacket in _IN_DTYPE_OF_OUT and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": target.dtype}
    source = compute(context, functional, args, kwargs, like=None if into_out else target)
    if isinstance(source, torch.Tensor):  # a constant where what was written there does not count, as in `zero_`
        source = context.adopt(source)
    if into_out and isinstance(source, torch.Tensor) and source.shape != target.shape:
        raise NotImplementedError("it resizes the tensor of `out=`; give that the size of the result, or leave it out")
    if not isinstance(source, BridgeTensor) or source.shape != target.shape:
        raise NotImplementedError("an in-place operation that changes the shape")
    value = source.value.astype(jax_dtype(target.dtype))
    tracked = any(t._cell.tracked for t in inputs if t is not target) or source._cell.tracked
    known = after_write(target, source)
    target.write(
        value,
        tracked=tracked,
        grad_enabled=torch.is_grad_enabled(),
        live=source._cell.live,
    )
    target._cell.storage.bounds = known
    return target


def _refuse_write_into_leaf(target: BridgeTensor) -> None:
    """Raise what PyTorch raises for a write with gradients on: the leaf would no longer be one."""
    if target.requires_grad and target._cell.leaf is not None and torch.is_grad_enabled():
        what = "a leaf Variable" if target.is_leaf else "a view of a leaf Variable"
        raise RuntimeError(f"{what} that requires grad is being used in an in-place operation.")


def _refuse_write_into_view(target: BridgeTensor, inputs: list[BridgeTensor]) -> None:
    """Raise what PyTorch raises for a write that has a gradient, depending on how the target was made.

    The results of `unbind`, `split` and `chunk` take none, nor do views that were made while gradients were off.
    """
    if not torch.is_grad_enabled() or not target._views:
        return
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
