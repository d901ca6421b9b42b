"""Whether the next call can start from the parameters and buffers that a call leaves, as separate arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bridge._compat.torch import is_parameter, storage_id
from bridge.errors import BridgeError
from bridge.memory import overlap, shares_memory
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


def refuse_removed(final: Mapping[str, Any]) -> None:
    for name, value in final.items():
        if value is None:
            raise BridgeError(
                f"the call sets {name} to None, from which the next one cannot start: a buffer stays an array; keep a "
                "flag in another buffer, or zeros in this one"
            )


def refuse_changed_sharing(before: Mapping[str, Any], after: Mapping[str, Any], final: Mapping[str, Any]) -> None:
    """Two names that share memory before a call, or after it, and not at the other time.

    `before`, `after`: the memory of each by name; `final`: the tensors after the call, which may be parts of one memory
    without an element in common. Where two share memory before the call, one array is a window on the other in each.
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
                if memory is before or overlap(_laid_out(final[twin]), _laid_out(final[name])):
                    remedy = "write in place, or register a clone" if memory is before else "assign a clone()"
                    raise BridgeError(f"{twin} and {name} {what}; {remedy}")
            groups[at].append(name)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._meta if isinstance(tensor, BridgeTensor) else tensor


def memory_of(dispatch: Dispatch, tensor: torch.Tensor) -> Any:
    """What tensors that share memory have in common."""
    tensor = dispatch.adopt(tensor) if dispatch.is_traced(tensor) else tensor
    return tensor._cell.storage if isinstance(tensor, BridgeTensor) else storage_id(tensor)


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


def changed_layouts(before: Mapping[str, torch.Tensor], final: Mapping[str, Any]) -> dict[tuple[str, Any], Any]:
    """The strides of buffers that are laid out in another way after the call: `reshape` and `view` count on them.

    `before`: tensors on the meta device.
    """
    layouts: dict[tuple[str, Any], Any] = {}
    for name, was in before.items():
        now = final[name]
        if isinstance(now, torch.Tensor) and now.shape == was.shape:
            pairs = zip(now.shape, now.stride(), was.stride(), strict=True)
            if any(n > 1 and here != there for n, here, there in pairs):
                layouts[name, "layout"] = now.stride()
    return layouts


def changed_flags(buffers: Mapping[str, tuple[BridgeTensor, bool, Any]]) -> dict[tuple[str, Any], Any]:
    """Buffers that require grad after the call and did not before it, or the reverse.

    `buffers`: by name, the tensor before, whether it required grad, and what is in its place now.
    """
    flags: dict[tuple[str, Any], Any] = {}
    for name, (before, required, now) in buffers.items():
        if isinstance(now, torch.Tensor) and not is_parameter(before) and now.requires_grad != required:
            flags[name, "requires_grad"] = now.requires_grad and ("leaf" if now.is_leaf else "result")
    return flags
