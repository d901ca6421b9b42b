"""Numbers that a module keeps in attributes, set by name for one call."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from bridge.errors import BridgeError
from bridge.tensors import BridgeTensor


def override(module: nn.Module, tree: list[nn.Module], name: str, number: BridgeTensor) -> None:
    """Set a number inside the throwaway copy; an object on the way to it that is no module is copied as well."""
    *path, last = name.split(".")
    owner: Any = module
    for depth, step in enumerate(path):
        if not hasattr(owner, step):
            raise BridgeError(_no_number(name, ".".join(path[:depth]), owner, step))
        inner = getattr(owner, step)
        if not isinstance(inner, nn.Module):
            fresh_inner = copy.copy(inner)
            for holder in [owner, *tree]:  # a configuration that several submodules share stays shared
                for slot, value in list(vars(holder).items()):
                    if value is inner:
                        object.__setattr__(holder, slot, fresh_inner)
            inner = fresh_inner
        owner = inner
    if not isinstance(getattr(owner, last, None), (bool, int, float)):
        raise BridgeError(_no_number(name, ".".join(path), owner, last))
    object.__setattr__(owner, last, number)


def _no_number(name: str, place: str, owner: Any, step: str) -> str:
    found = f"is {getattr(owner, step)!r}" if hasattr(owner, step) else "is not there"
    numbers = sorted(k for k, v in vars(owner).items() if type(v) in (int, float) and not k.startswith("_"))
    return (
        f"the override {name} names no number: {step} {found} in {place or 'the module'} ({type(owner).__name__}); "
        f"numbers there: {', '.join(numbers) or 'none'}"
    )
