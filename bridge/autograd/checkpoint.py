"""`torch.utils.checkpoint` as `jax.checkpoint`: its intermediate results are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from bridge._compat.torch import in_place_of_checkpoint
from bridge.context import current
from bridge.tensor.tensor import REGION, AutogradHandle, BridgeTensor, Storage


def recomputed(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`; the backward pass keeps none of its intermediate results.

    Everything that outlives the call leaves the `jax.checkpoint` as one of its results: what the function returns,
    wrote in place or put away in an attribute. Batch statistics are written once; PyTorch writes them again in its
    backward.
    """
    call = current()
    if call is None or not call.traced or call.recording or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    outer = REGION.notes
    left = []

    @jax.checkpoint  # pyright: ignore[reportPrivateImportUsage]
    def region() -> list[jax.Array]:
        REGION.notes = []
        try:
            outputs = function(*args, **kwargs)
            # Results that nobody holds any more are gone by now; those in `REGION.notes` are still held.
            holders = {id(h): h for ref in REGION.notes if (h := ref()) is not None}
        finally:
            REGION.notes = outer
        slots = [(holder, _ARRAY[type(holder)]) for holder in holders.values() if type(holder) in _ARRAY]
        left.extend((outputs, list(holders.values()), slots))
        arrays = [getattr(holder, slot) for holder, slot in slots]
        for holder, slot in slots:  # nothing may hold on to an object of this trace
            setattr(holder, slot, None)
        for holder in holders.values():
            if isinstance(holder, BridgeTensor):
                holder._cache = None
        return arrays

    arrays = region()
    outputs, holders, slots = left
    for (holder, slot), array in zip(slots, arrays, strict=True):
        setattr(holder, slot, array)
    if outer is not None:
        for holder in holders:
            REGION.note(holder)
    return outputs


_ARRAY = {AutogradHandle: "_array", Storage: "array"}
"""The attribute of a handle or of memory that holds its array."""


_SETTINGS = {"context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}
"""Keywords of `torch.utils.checkpoint.checkpoint` that are not passed to the function and change no value."""


def _checkpoint(function: Callable, *args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
    call = current()
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if call is not None and use_reentrant and torch.is_grad_enabled() and not any(t.requires_grad for t in tensors):
        what = (
            "`checkpoint(use_reentrant=True)` gives parameters no gradient in PyTorch if no input of it requires grad"
        )
        # Only the caller knows whether an input of the call requires grad.
        if not any(isinstance(t, BridgeTensor) and t.may_have_gradient for t in tensors):
            raise call.error(what, "pass use_reentrant=False")
        call.warn(f"{what}; here they have one", "pass use_reentrant=False, which always gives it")
    return recomputed(function, *args, **{n: v for n, v in kwargs.items() if n not in _SETTINGS})


REPLACED = (in_place_of_checkpoint(lambda: current() is not None, _checkpoint),)
