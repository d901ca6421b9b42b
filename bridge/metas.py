"""What PyTorch says of a result before it exists: shape, dtype and strides, asked on its meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bridge._compat.torch import arguments, below_dispatch, leave_compiler_unloaded, overload_name, schema_name
from bridge.arrays import refuse_dtype
from bridge.lowerings.registry import METAS
from bridge.tensors import BridgeTensor, blank

leave_compiler_unloaded()


def map_tensors(value: Any, leaf: Callable[[BridgeTensor], Any]) -> Any:
    """`value` with `leaf(tensor)` for every tensor in it; lists and tuples are followed, nothing else holds tensors."""
    if isinstance(value, BridgeTensor):
        return leaf(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(v, leaf) for v in value)
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor among the arguments of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def listed(values: Any) -> tuple | list:
    return values if isinstance(values, (tuple, list)) else (values,)


def meta_of(func: Any, args: tuple, kwargs: dict) -> Any:
    """The result of an operation as tensors on the meta device."""
    kwargs = _on_meta({k: map_tensors(v, _twin) for k, v in kwargs.items()})
    if any(a.name == "device" for a in arguments(func)):
        kwargs["device"] = "meta"
    if "generator" in overload_name(func):
        kwargs["generator"] = None
    with below_dispatch():
        answer = METAS.get(func) or func
        return answer(*map_tensors(args, _twin), **kwargs)


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
        key = func, _signature(args), _signature(tuple(kwargs.items())), torch.get_default_dtype()
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
        kwargs = {k: map_tensors(v, _zeros) for k, v in kwargs.items()}
        with below_dispatch():
            func(*map_tensors(args, _zeros), **kwargs)
        return
    scratch = blank(target.shape, target._meta.stride(), target.dtype)
    kwargs = _on_meta({k: map_tensors(v, _twin) for k, v in kwargs.items()})
    with below_dispatch():
        func(scratch, *map_tensors(args[1:], _twin), **kwargs)


def _twin(tensor: BridgeTensor) -> torch.Tensor:
    return tensor._meta


def _zeros(tensor: BridgeTensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor._meta.stride(), dtype=tensor.dtype).zero_()


def _on_meta(kwargs: dict) -> dict:
    return {k: "meta" if k == "device" else v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}


def _signature(value: Any) -> Any:
    """What of an argument decides the shape, dtype and strides of a result. `True` and `1` are not the same."""
    if isinstance(value, BridgeTensor):
        meta = value._meta
        return meta.shape, meta.stride(), meta.dtype
    if type(value) in (list, tuple):
        return tuple(map(_signature, value))
    return type(value), value
