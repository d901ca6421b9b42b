"""Real PyTorch tensors that a traced call meets: state tensors have stand-ins, all others are constants."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bridge.arrays import array_of
from bridge.errors import BridgeError
from bridge.internals import storage_id
from bridge.memory import elements, positions, what_is_special
from bridge.metas import meta_of_strided
from bridge.tensors import BridgeTensor, as_view, blank, fresh
from bridge.views import view_steps

STATIC_LIMIT = 2**16
"""Elements up to which a constant is computed while tracing; larger ones would bloat the compiled program."""

aten = torch.ops.aten


class Adopted:
    """The traced tensor of every real tensor, by identity or, for one that shares memory, by storage."""

    def __init__(self):
        self._known: dict[int, tuple[torch.Tensor, BridgeTensor]] = {}
        self._owners: dict[int, list[BridgeTensor]] = {}
        self.state: list[BridgeTensor] = []

    def stand_in(self, real: torch.Tensor, tensor: BridgeTensor) -> None:
        """Whenever the code touches `real`, or a view of it, it gets `tensor`."""
        self._known[id(real)] = (real, tensor)
        self.state.append(tensor)
        self._owners.setdefault(storage_id(real), []).append(tensor)

    def adopt(self, real: torch.Tensor, error: Callable[[str, str], BridgeError]) -> BridgeTensor:
        """The traced tensor for any tensor: itself, the stand-in for a state tensor, or a constant.

        `error(what, remedy)` makes the exception of a tensor that can have none.
        """
        if isinstance(real, BridgeTensor):
            return real
        known = self._known.get(id(real))
        if known is not None:
            return known[1]
        special = what_is_special(real)
        if special is not None:
            what, _, remedy = special.partition("; ")
            raise error(f"a tensor {what}", remedy)
        owners = self._owners.get(storage_id(real))
        if owners is not None:  # a view or `.data` of a state tensor, taken before the call
            if any(o.dtype != real.dtype for o in owners):
                raise error(
                    "a tensor shares the memory of a parameter or buffer of another dtype",
                    "make the view inside the call, or clone it",
                )
            owner = next((o for o in owners if elements(o._meta, positions(real)) is not None), None)
            if owner is None:
                raise error(
                    "a tensor shares memory with a parameter or buffer and reaches beyond it",
                    "register the whole tensor as one parameter or buffer, or clone it",
                )
            tensor = window(owner, real, differentiable=real.requires_grad)
        else:
            if real.requires_grad and real.grad_fn is not None:
                raise error("a tensor with a PyTorch graph", "pass it as an argument or make it a parameter")
            array = array_of(real)
            meta = blank(real.shape, real.stride(), real.dtype)
            tensor = fresh(array, meta, static=real.numel() <= STATIC_LIMIT, live=False)
        self._known[id(real)] = (real, tensor)
        return tensor


def window(owner: BridgeTensor, real: torch.Tensor, differentiable: bool) -> BridgeTensor:
    """What `real` shows of the owner of its memory."""
    place = (real.shape, real.stride(), int(real.storage_offset()))
    meta = meta_of_strided(owner, *place)
    (step,) = view_steps(aten.as_strided.default, owner, (owner, *place), {}, [meta])
    return as_view(BridgeTensor(owner._cell, owner._meta), meta, step, differentiable=differentiable)
