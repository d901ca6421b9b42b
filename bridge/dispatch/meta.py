"""Shape, dtype and strides of results, from PyTorch's meta device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge._compat.torch import (
    arguments,
    below_dispatch,
    leave_compiler_unloaded,
    overload_name,
    schema_name,
    tree_map_only,
)
from bridge.lowerings.registry import METAS
from bridge.tensor.convert import refuse_dtype
from bridge.tensor.tensor import BridgeTensor, blank

leave_compiler_unloaded()


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns every tensor among the arguments of an operation."""
    found: list[torch.Tensor] = []
    for value in values if type(values) in (list, tuple) else [values]:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in([*value])
        elif isinstance(value, dict):
            found += tensors_in(tuple(value.values()))
    return found


def with_tensors(values: Any, traced: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns `values` with `traced(tensor)` for each tensor that is none of the bridge; itself if nothing changes."""
    changed: list[Any] | None = None
    for place, value in enumerate(values):
        kind = type(value)
        if kind is BridgeTensor:
            continue
        if kind is list or kind is tuple:
            new = with_tensors(value, traced)
        elif issubclass(kind, torch.Tensor):
            new = traced(value)
        else:
            continue
        if new is not value:
            changed = [*values] if changed is None else changed
            changed[place] = new
    return values if changed is None else type(values)(changed)


def with_named_tensors(values: dict, traced: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    """As `with_tensors`, of keyword arguments."""
    return dict(zip(values, with_tensors([*values.values()], traced), strict=True)) if values else values


def listed(values: Any) -> tuple | list:
    return values if isinstance(values, (tuple, list)) else (values,)


def meta_of(func: Any, args: tuple, kwargs: dict) -> Any:
    """The result of an operation as tensors on the meta device."""
    kwargs = _on_meta(kwargs) if kwargs else {}
    if _takes_device(func):
        kwargs["device"] = "meta"
    if "generator" in overload_name(func):
        kwargs["generator"] = None
    with below_dispatch():
        answer = METAS.get(func) or func
        return answer(*_twins(args), **kwargs)


@functools.cache
def _takes_device(func: Any) -> bool:
    return any(a.name == "device" for a in arguments(func))


def traced_meta_of(func: Any, args: tuple, kwargs: dict) -> Any:
    """As `meta_of`, of an operation on traced tensors. Raises `BridgeError` for a dtype that JAX does not have."""
    metas = meta_of(func, args, kwargs)
    for meta in tensors_in(metas):
        refuse_dtype(meta.dtype)
    return metas


class MetaCache:
    """`traced_meta_of`, asked once for each operation on the same shapes: recursion asks again and again."""

    def __init__(self):
        self._known: dict[Any, Any] = {}

    def __call__(self, func: Any, args: tuple, kwargs: dict) -> Any:
        key = func, _signature(args), _signature(tuple(kwargs.items())) if kwargs else None, torch.get_default_dtype()
        try:
            return self._known[key]
        except KeyError:
            metas = self._known[key] = traced_meta_of(func, args, kwargs)
            return metas
        except TypeError:  # an argument that has no hash
            return traced_meta_of(func, args, kwargs)


def meta_of_strided(
    base: BridgeTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """`as_strided` without PyTorch's check: the twin of a view of memory knows the view's own memory only."""
    offset = base._meta.storage_offset() if storage_offset is None else storage_offset
    return blank(size, stride, base.dtype, int(offset))


def check_write(func: Any, target: BridgeTensor, args: tuple, kwargs: dict) -> None:
    """Raise what PyTorch raises for an in-place operation that does not fit its target in shape or dtype."""
    if not schema_name(func).endswith("_"):
        return
    if any(n > 1 and s == 0 for n, s in zip(target.shape, target._meta.stride(), strict=True)):
        # Elements that share memory, of which the meta device says nothing.
        args, kwargs = tree_map_only(BridgeTensor, lambda t: zeros_like(t._meta), (args, kwargs))
        with below_dispatch():
            func(*args, **kwargs)
        return
    scratch = blank(target.shape, target._meta.stride(), target.dtype)
    kwargs = _on_meta(kwargs) if kwargs else {}
    with below_dispatch():
        func(scratch, *_twins(args[1:]), **kwargs)


def _twins(values: tuple | list) -> list:
    """Returns `values` with the tensors on the meta device of those in it."""
    twins = []
    for value in values:
        kind = type(value)
        if kind is BridgeTensor:
            value = value._meta
        elif kind is list or kind is tuple:
            value = kind(_twins(value))
        twins.append(value)
    return twins


def zeros_like(meta: torch.Tensor) -> torch.Tensor:
    """Returns zeros on the host in the place of a twin."""
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype).zero_()


def _on_meta(kwargs: dict) -> dict:
    named = zip(kwargs, _twins([*kwargs.values()]), strict=True)
    return {k: "meta" if k == "device" else v for k, v in named if k not in ("generator", "pin_memory")}


def _signature(values: tuple | list) -> tuple:
    """The part of the arguments that decides shape, dtype and strides of a result. `True` and `1` are not the same."""
    key: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is BridgeTensor:
            meta = value._meta
            key += (meta.shape, meta.stride(), meta.dtype)
        elif kind is list or kind is tuple:
            key.append(_signature(value))
        else:
            key += (kind, value)
    return tuple(key)
