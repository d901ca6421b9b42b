"""`torch.tensor` and its like on Python lists that hold traced numbers, whose values PyTorch would ask for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bridge.tensors import BridgeTensor

CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


def holds_traced(data: Any) -> bool:
    """Whether a nested list holds a tensor of the bridge; a tensor by itself is no list."""
    return isinstance(data, (list, tuple)) and any(isinstance(v, BridgeTensor) or holds_traced(v) for v in data)


def constructed(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """What `func` makes of the list: numbers without a gradient, of the dtype that PyTorch infers.

    Raises `ValueError` where PyTorch does.
    """
    owner, data = args if func is torch.Tensor.new_tensor else (None, args[0])
    shape, leaves = _flat(data)
    dtype = kwargs.get("dtype") or (owner.dtype if owner is not None else None)
    dtype = dtype or functools.reduce(torch.promote_types, (v.dtype for v in leaves))
    return torch.stack([v.detach().reshape(()).to(dtype) for v in leaves]).reshape(shape)


def _flat(data: Any) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    if isinstance(data, torch.Tensor):
        if data.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return (), [data]
    if not isinstance(data, (list, tuple)):
        return (), [torch.tensor(data)]
    parts = [_flat(v) for v in data]
    if any(shape != parts[0][0] for shape, _ in parts):
        raise ValueError("lists of different lengths make no tensor")
    return (len(parts), *parts[0][0]), [leaf for _, leaves in parts for leaf in leaves]
