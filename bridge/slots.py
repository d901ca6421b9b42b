"""The places of a module's parameters and buffers: their names, the copy's own tensors in them, what is there later."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.tensors import BridgeTensor


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


def fill(
    module: nn.Module, copies: dict[int, nn.Module], tensors: dict[int, BridgeTensor]
) -> dict[str, tuple[nn.Module, str]]:
    """Put the traced tensors where the real ones were; returns where each name lives."""
    slots: dict[str, tuple[nn.Module, str]] = {}
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


def place_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule and the name in it of a qualified name."""
    path, _, slot = name.rpartition(".")
    return module.get_submodule(path), slot


def value_in(name: str, owner: nn.Module, slot: str) -> Any:
    """What is in the place of a parameter or buffer."""
    for registry in (owner._parameters, owner._buffers):
        if slot in registry:
            return registry[slot]
    if not hasattr(owner, slot):
        raise BridgeError(f"the call deletes {name}, which the next one would miss; write zeros to it instead")
    return getattr(owner, slot)
