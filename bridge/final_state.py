"""Whether the next call can start from the parameters and buffers that a call leaves, as separate arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.internals import is_parameter, storage_id
from bridge.memory import shares_memory
from bridge.slots import state_of, value_in
from bridge.tensors import BridgeTensor

if TYPE_CHECKING:
    from bridge.dispatch import Dispatch


def refuse_parted(
    second_names: Mapping[str, str], slots: Mapping[str, tuple[nn.Module, str]], final: Mapping[str, Any]
) -> None:
    """A tensor with two names has one array, so it must be one tensor after the call, too."""
    for name, first in second_names.items():
        if value_in(name, *slots[name]) is not final[first]:
            raise BridgeError(
                f"{first} and {name} are one tensor before the call and two after it, and would be one in the next "
                "call; write in place, or register a clone"
            )


def shared_slots(dispatch: Dispatch, state: Mapping[str, BridgeTensor], final: Mapping[str, Any]) -> set[str]:
    """The names that now share memory with a tensor from before the call. Raises `BridgeError` if two names share some.

    Parameters and buffers come back as separate arrays, so a later write would not reach both.
    """
    shared, names = set(), dict[Any, str]()
    for name, now in final.items():
        if not isinstance(now, torch.Tensor):
            continue
        now = dispatch.adopt(now) if dispatch.is_traced(now) else now
        other = names.setdefault(now._cell.storage if isinstance(now, BridgeTensor) else storage_id(now), name)
        if other != name and state[other]._cell.storage is not state[name]._cell.storage:
            raise BridgeError(
                f"{other} and {name} share their memory after the call, and would be separate in the next one; "
                "assign a clone()"
            )
        if not isinstance(now, BridgeTensor) and not dispatch.may_write(now):
            shared.add(name)
    return shared


def refuse_lost_sharing(names: Iterable[str]) -> None:
    """Slots that have shared memory with a tensor from before the call, and that this or another call writes."""
    for name in names:
        raise BridgeError(
            f"a call sets {name} to a tensor that was there before and is no parameter or buffer, and one writes "
            f"{name} in place, which would not reach that tensor; assign a clone()"
        )


def refuse_stale_arrays(arrays: Mapping[str, np.ndarray], module: nn.Module, changing: list[str]) -> None:
    """`changing`: names of the parameters, and of the buffers that the call has written."""
    if not arrays:
        return
    reals = state_of(module)
    for path, array in arrays.items():
        for name in changing:
            if shares_memory(array, reals[name]):
                raise BridgeError(
                    f"`{path}` is a NumPy array over the memory of {name}, which no call writes; "
                    f"use {name} itself, or keep a copy of the array"
                )


def changed_flags(buffers: Mapping[str, tuple[BridgeTensor, bool, Any]]) -> dict[tuple[str, Any], Any]:
    """Buffers that require grad after the call and did not before it, or the reverse.

    `buffers`: by name, the tensor before, whether it required grad, and what is in its place now.
    """
    flags: dict[tuple[str, Any], Any] = {}
    for name, (before, required, now) in buffers.items():
        if isinstance(now, torch.Tensor) and not is_parameter(before) and now.requires_grad != required:
            flags[name, "requires_grad"] = now.requires_grad and ("leaf" if now.is_leaf else "result")
    return flags
