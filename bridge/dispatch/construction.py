"""`torch.tensor`, `torch.full` and their like of traced numbers, whose values PyTorch would ask for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bridge.tensor.tensor import BridgeTensor

CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)

FILLERS = {torch.full: 1, torch.full_like: 1, torch.Tensor.new_full: 2, torch.scalar_tensor: 0}
"""Functions that fill a tensor -> the place of the number among their arguments."""
_NAMES_OF_NUMBERS = ("fill_value", "s")


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


def filled(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """What `func` makes of a traced number: a tensor without a gradient. None where the number is not traced.

    Raises `TypeError` where PyTorch does: of a number that requires grad.
    """
    place = FILLERS[func]
    name = next((n for n in _NAMES_OF_NUMBERS if n in kwargs), "")
    number = kwargs.get(name, args[place] if place < len(args) else None)
    if not isinstance(number, BridgeTensor) or number.dim():
        return None
    zero: Any = torch.zeros((), dtype=number.dtype, requires_grad=number.requires_grad)
    zero = zero if number.requires_grad else zero.item()  # PyTorch infers a dtype from a Python number
    if name:
        made = func(*args, **(kwargs | {name: zero}))
    else:
        made = func(*args[:place], zero, *args[place + 1 :], **kwargs)
    return made.fill_(number.detach().to(made.dtype))


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
