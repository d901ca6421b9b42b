"""Shape, dtype and strides of an operation's result, from PyTorch's meta device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from bridge._compat.torch import (
    arguments,
    below_dispatch,
    leave_compiler_unloaded,
    overload_name,
    tree_map_only,
)
from bridge.context import CallState
from bridge.dispatch.schemas import has_out
from bridge.lowerings.registry import METAS
from bridge.symbolic.numbers import NUMBERS, of_class, refuse_numbers
from bridge.tensor.arrays import COUNTERPARTS, refuse_dtype
from bridge.tensor.tensor import BridgeTensor, empty_meta

leave_compiler_unloaded()


def metas_of(context: CallState, func: Any, args: tuple, kwargs: dict) -> Any:
    """Like `meta_of`, for traced tensors, once for each kind. Raises `BridgeError` for a dtype that JAX lacks."""
    key = func, _signature(args), _signature((*kwargs, *kwargs.values())) if kwargs else None, torch.get_default_dtype()
    try:
        return context.metas[key]
    except KeyError:
        pass
    except TypeError:  # an argument is not hashable
        key = None
    metas = meta_of(func, args, kwargs)
    for meta in metas if isinstance(metas, (tuple, list)) else (metas,):
        if isinstance(meta, torch.Tensor) and meta.dtype not in COUNTERPARTS:
            refuse_dtype(meta.dtype)
    if key is not None:
        context.metas[key] = metas
    return metas


def meta_of(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns the result of an operation as tensors on the meta device."""
    kwargs = (_on_meta(kwargs) if kwargs else {}) | _meta_settings(func)
    with below_dispatch():
        return (METAS.get(func) or func)(*_twins(args), **kwargs)


@functools.cache
def _meta_settings(func: Any) -> dict[str, Any]:
    """Returns the keyword arguments with which an operation runs on the meta device."""
    if any(a.name == "device" for a in arguments(func)):
        device = {"device": "meta"}
    else:
        device = {}
    return device | ({"generator": None} if "generator" in overload_name(func) else {})


def meta_of_strided(
    base: BridgeTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Returns `as_strided` without PyTorch's check: the twin of a view of memory knows only the view's own memory."""
    if storage_offset is None:
        offset = base._meta.storage_offset()
    else:
        offset = storage_offset
    return empty_meta(size, stride, base.dtype, int(offset))


def check_write(func: Any, target: BridgeTensor, args: tuple, kwargs: dict) -> None:
    """Raises what PyTorch raises for an in-place operation that does not fit its target in shape or dtype."""
    if has_out(func):
        return
    sizes = target.shape
    strides = target._meta.stride()
    if 0 in strides and any(n > 1 and s == 0 for n, s in zip(sizes, strides, strict=True)):
        # Elements that share memory are an error that the meta device does not raise.
        args, kwargs = tree_map_only(BridgeTensor, lambda t: zeros_like(t._meta), (args, kwargs))
        with below_dispatch():
            func(*args, **kwargs)
        return
    scratch = empty_meta(sizes, strides, target.dtype)
    kwargs = _on_meta(kwargs) if kwargs else {}
    with below_dispatch():
        func(scratch, *_twins(args[1:]), **kwargs)


def _twins(values: tuple | list) -> list:
    """Returns `values` with each tensor replaced by its twin on the meta device."""
    twins = []
    for value in values:
        kind = type(value)
        if kind is BridgeTensor:
            value = value._meta
        elif kind is list or kind is tuple:
            if not NUMBERS.isdisjoint(map(type, value)):
                refuse_numbers(value)
            value = kind(_twins(value))
        elif kind in NUMBERS:
            value = of_class(value)
        twins.append(value)
    return twins


def zeros_like(meta: torch.Tensor) -> torch.Tensor:
    """Returns zeros on the host to replace a twin."""
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype).zero_()


def _on_meta(kwargs: dict) -> dict:
    named = zip(kwargs, _twins([*kwargs.values()]), strict=True)
    return {k: "meta" if k == "device" else v for k, v in named if k not in ("generator", "pin_memory")}


def _signature(values: tuple | list) -> tuple:
    """Returns the part of the arguments that decides shape, dtype and strides; `True` and `1` differ in it."""
    key: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is BridgeTensor:
            meta = value._meta
            key += (meta.shape, meta.stride(), meta.dtype)
        elif kind is list or kind is tuple:
            if not NUMBERS.isdisjoint(map(type, value)):
                refuse_numbers(value)
            key.append(_signature(value))
        elif kind in NUMBERS:
            key.append(kind)
        else:
            key += (kind, value)
    return tuple(key)
