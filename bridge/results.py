"""What a call may return: pytrees. A tensor inside any other object would be useless to the caller."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from bridge.held_objects import PLAIN, inside, referent
from bridge.holders import holder_of, of_cells

REMEDY = (
    "return a tuple, a list, a dict or a dataclass, or give `bridge.register` functions that flatten and rebuild it"
)


def tensor_inside(value: Any) -> bool:
    """Whether a result that is no pytree holds a tensor, at any depth."""
    todo, seen = [value], {}
    while todo:
        value = referent(todo.pop())
        if isinstance(value, torch.Tensor):
            return True
        if isinstance(value, (*PLAIN, torch.Generator, type, types.ModuleType)) or id(value) in seen:
            continue
        seen[id(value)] = value
        todo += _contents(value)
    return False


def _contents(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        return [*value.keys(), *value.values(), *(vars(value).values() if hasattr(value, "__dict__") else ())]
    if isinstance(value, types.FunctionType):
        return [*(of_cells(value).original.values() if value.__closure__ else ()), *(value.__defaults__ or ())]
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    if isinstance(value, (functools.partial, types.MethodType)):
        return list((inside(value) or {}).values())
    holder = holder_of(value)
    if holder is None and type(value).__module__.startswith("torch.distributions"):
        return list(vars(value).values())
    return list(holder.original.values()) if holder is not None else []
