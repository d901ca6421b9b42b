"""The parameters and buffers of a module: their names, their places, and what a call leaves in these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.tensor.arrays import overlap
from bridge.tensor.tensor import BridgeTensor, Storage

Slot = tuple[nn.Module, str]
"""A submodule, and the name of a parameter or buffer in it."""


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every parameter and buffer by its first qualified name; a tied one appears once.

    The functions of `nn.Module` itself find those, too, that a class hides by a `named_parameters` of its own.
    """
    seen: dict[int, str] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in [*nn.Module.named_parameters(module), *nn.Module.named_buffers(module)]:
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            state[name] = tensor
    return state


def trained_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state that requires grad, without parameters that the module hides from optimizers."""
    shown = {id(parameter) for _, parameter in module.named_parameters()}
    state = state_of(module).items()
    return {n: t for n, t in state if t.requires_grad and (id(t) in shown or not isinstance(t, nn.Parameter))}


def second_names(module: nn.Module) -> dict[str, str]:
    """Returns the further names of parameters and buffers that have several -> the first one."""
    first = {id(tensor): name for name, tensor in state_of(module).items()}
    every = [
        *nn.Module.named_parameters(module, remove_duplicate=False),
        *nn.Module.named_buffers(module, remove_duplicate=False),
    ]
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def slots_of(modules: Mapping[str, nn.Module], names: Iterable[str]) -> dict[str, Slot]:
    """Returns the slots of the parameters and buffers with these names, given the modules by name."""
    slots: dict[str, Slot] = {}
    for name in names:
        path, _, slot = name.rpartition(".")
        slots[name] = modules[path], slot
    return slots


def slot_of(module: nn.Module, name: str) -> Slot:
    """Returns the submodule and the local name for a qualified name."""
    path, _, slot = name.rpartition(".")
    return module.get_submodule(path), slot


def value_in(name: str, slot: Slot) -> Any:
    """Returns the object in the slot of a parameter or buffer. Raises `BridgeError` if a call has deleted it."""
    owner, key = slot
    for registry in (owner._parameters, owner._buffers):
        if key in registry:
            return registry[key]
    if not hasattr(owner, key):
        raise BridgeError(f"the call deletes {name}, which the next one would miss; write zeros to it instead")
    return getattr(owner, key)


class Start(NamedTuple):
    """A parameter or buffer at the beginning of a call."""

    tensor: BridgeTensor
    memory: Storage
    requires_grad: bool
    version: int

    def written(self, tensor: Any) -> bool:
        """True if a call that leaves `tensor` in its place has given it other values."""
        if tensor is not self.tensor or self.tensor._handle.storage is not self.memory:
            return True
        return self.memory.version != self.version


def check_final(start: Mapping[str, Start], final: Mapping[str, Any], memory_of: Callable) -> dict[str, Any]:
    """Returns the memory of each parameter and buffer after a call, by name.

    Raises `BridgeError` where the next call cannot start from what a call leaves, each tensor as an array of its own.
    `final`: what is in the place of each parameter and buffer after the call. `memory_of(tensor)`: what tensors that
    share memory have in common.
    """
    before: dict[str, Any] = {}
    replaced = False
    for name, value in final.items():
        if value is None:
            raise BridgeError(
                f"the call sets {name} to None, from which the next one cannot start: a buffer stays an array; keep a "
                "flag in another buffer, or zeros in this one"
            )
        at = start[name]
        before[name] = at.memory
        replaced = replaced or value is not at.tensor or at.tensor._handle.storage is not at.memory
    if not replaced:
        return before
    after = {name: memory_of(t) for name, t in final.items() if isinstance(t, torch.Tensor)}
    _check_sharing(before, after, final)
    return after


def _check_sharing(before: Mapping[str, Any], after: Mapping[str, Any], final: Mapping[str, Any]) -> None:
    """Raises for names that share memory before the call or after it, but not both.

    If two share memory before the call, one array is a window on the other at each call.
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
                    if memory is before:
                        remedy = "write in place, or register a clone"
                    else:
                        remedy = "assign a clone()"
                    raise BridgeError(f"{twin} and {name} {what}; {remedy}")
            groups[at].append(name)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, BridgeTensor):
        return tensor._meta
    return tensor


def check_tied(names: Mapping[str, str], slots: Mapping[str, Slot], final: Mapping[str, Any]) -> None:
    """Raises for a tensor with two names that is two tensors after the call: it has only one array."""
    for name, first in names.items():
        if value_in(name, slots[name]) is not final[first]:
            raise BridgeError(
                f"{first} and {name} are one tensor before the call and two after it, and would be one in the next "
                "call; write in place, or register a clone"
            )
