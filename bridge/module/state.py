"""Places of a module's parameters and buffers: their names, what is in them, and what a call leaves there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.tensor.layout import overlap
from bridge.tensor.storage import Storage
from bridge.tensor.tensor import BridgeTensor

Slot = tuple[nn.Module, str]
"""A submodule, and the name of a parameter or buffer in it."""


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its first qualified name; a tied one once."""
    seen: dict[int, str] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            state[name] = tensor
    return state


def second_names(module: nn.Module) -> dict[str, str]:
    """The further names of parameters and buffers that have several -> the first one."""
    first = {id(tensor): name for name, tensor in state_of(module).items()}
    every = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def fill(module: nn.Module, copies: dict[int, nn.Module], tensors: dict[int, BridgeTensor]) -> dict[str, Slot]:
    """Put the traced tensors where the real ones were; returns where each name lives."""
    slots: dict[str, Slot] = {}
    placed: set[int] = set()
    for prefix, original in module.named_modules():
        twin = copies[id(original)]
        for registry in ("_parameters", "_buffers"):
            for slot, real in getattr(original, registry).items():
                if real is None:
                    continue
                getattr(twin, registry)[slot] = tensors[id(real)]
                if id(real) not in placed:
                    placed.add(id(real))
                    slots[f"{prefix}.{slot}" if prefix else slot] = (twin, slot)
    return slots


def slot_of(module: nn.Module, name: str) -> Slot:
    """The submodule and the name in it of a qualified name."""
    path, _, slot = name.rpartition(".")
    return module.get_submodule(path), slot


def value_in(name: str, slot: Slot) -> Any:
    """Returns the object in the place of a parameter or buffer. Raises `BridgeError` if a call has deleted it."""
    owner, key = slot
    for registry in (owner._parameters, owner._buffers):
        if key in registry:
            return registry[key]
    if not hasattr(owner, key):
        raise BridgeError(f"the call deletes {name}, which the next one would miss; write zeros to it instead")
    return getattr(owner, key)


class Start(NamedTuple):
    """A parameter or buffer as a call finds it."""

    tensor: BridgeTensor
    memory: Storage
    requires_grad: bool
    version: int

    @staticmethod
    def of(tensor: BridgeTensor) -> Start:
        storage = tensor._cell.storage
        return Start(tensor, storage, tensor.requires_grad, storage.version)

    def replaced_by(self, tensor: Any) -> bool:
        """True if another tensor, or other memory, is in its place."""
        return tensor is not self.tensor or self.tensor._cell.storage is not self.memory

    def written(self, tensor: Any) -> bool:
        """True if a call that leaves `tensor` in its place has given it other values."""
        return self.replaced_by(tensor) or self.memory.version != self.version


def check_final(start: Mapping[str, Start], final: Mapping[str, Any], memory_of: Callable) -> dict[str, Any]:
    """Returns the memory of each parameter and buffer after a call, by name.

    Raises `BridgeError` where the next call cannot start from what a call leaves, each tensor as an array of its own.
    `final`: what is in the place of each parameter and buffer after the call. `memory_of(tensor)`: what tensors that
    share memory have in common.
    """
    for name, value in final.items():
        if value is None:
            raise BridgeError(
                f"the call sets {name} to None, from which the next one cannot start: a buffer stays an array; keep a "
                "flag in another buffer, or zeros in this one"
            )
    before = {name: at.memory for name, at in start.items()}
    if not any(start[name].replaced_by(value) for name, value in final.items()):
        return before
    after = {name: memory_of(t) for name, t in final.items() if isinstance(t, torch.Tensor)}
    _check_sharing(before, after, final)
    return after


def _check_sharing(before: Mapping[str, Any], after: Mapping[str, Any], final: Mapping[str, Any]) -> None:
    """Raise for names that share memory before the call, or after it, and not at the other time.

    Where two share memory before the call, one array is a window on the other in each.
    """
    for memory, other, what in (
        (before, after, "share memory before the call and not after it, and would share it in the next one"),
        (after, before, "share their memory after the call, and would be separate in the next one"),
    ):
        groups = dict[Any, list[str]]()
        for name, at in memory.items():
            for twin in groups.setdefault(at, []):
                if not {twin, name} <= other.keys() or other[twin] == other[name]:
                    continue
                # Parts of one memory may have no element in common.
                if memory is before or overlap(_laid_out(final[twin]), _laid_out(final[name])):
                    remedy = "write in place, or register a clone" if memory is before else "assign a clone()"
                    raise BridgeError(f"{twin} and {name} {what}; {remedy}")
            groups[at].append(name)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._meta if isinstance(tensor, BridgeTensor) else tensor


def check_tied(names: Mapping[str, str], slots: Mapping[str, Slot], final: Mapping[str, Any]) -> None:
    """Raise for a tensor with two names that is two tensors after the call: it has one array."""
    for name, first in names.items():
        if value_in(name, slots[name]) is not final[first]:
            raise BridgeError(
                f"{first} and {name} are one tensor before the call and two after it, and would be one in the next "
                "call; write in place, or register a clone"
            )
