"""`x[i]` and `x[i] = value` by integers without dimensions that are traced.

PyTorch asks such a tensor for its number and takes a view. Here the place is an operand of the view.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.cells import View
from bridge.tensors import BridgeTensor, as_view, blank

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_traced_place(index: Any) -> bool:
    """A traced integer; a bool without dimensions is a mask."""
    return isinstance(index, BridgeTensor) and not index.shape and index.dtype in _INTEGERS


def is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def places_of(index: Any) -> tuple:
    return index if type(index) is tuple else (index,)


def selected(tensor: BridgeTensor, places: tuple) -> tuple[BridgeTensor, tuple]:
    """The view at the traced integers among `places`, and the other places in it, as PyTorch counts them.

    Raises PyTorch's `IndexError` for too many of them.
    """
    dims, taken = [], 0
    for place in places:
        dims.append(taken)
        taken += _dimensions(place)
    if taken > tensor.dim():
        raise IndexError(f"too many indices for tensor of dimension {tensor.dim()}")
    ellipsis = next((i for i, place in enumerate(places) if place is Ellipsis), len(places))
    skipped = tensor.dim() - taken
    traced = [(dims[i] + skipped * (i > ellipsis), p) for i, p in enumerate(places) if is_traced_place(p)]
    for dim, place in reversed(traced):
        tensor = _select(tensor, dim, place)
    return tensor, tuple(p for p in places if not is_traced_place(p))


def _dimensions(place: Any) -> int:
    if place is None or place is Ellipsis or isinstance(place, bool):
        return 0
    is_mask = isinstance(place, torch.Tensor) and place.dtype in (torch.bool, torch.uint8) and place.dim()
    return place.dim() if is_mask else 1


def _select(tensor: BridgeTensor, dim: int, place: BridgeTensor) -> BridgeTensor:
    """Where it lies in memory is not known, so its offset is one that no element of the memory has."""
    shape, stride = [*tensor.shape], [*tensor._meta.stride()]
    del shape[dim], stride[dim]
    layout = tensor._cell.storage.layout
    beyond = tensor._meta.storage_offset() + math.prod(layout.shape if layout is not None else tensor.shape) + 1
    number = place.value

    def get(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, number, dim, keepdims=False)

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, jnp.asarray(new, x.dtype), number, dim)

    meta = blank(shape, stride, tensor.dtype, int(beyond) * max([1, *tensor._meta.stride()]))
    on = torch.is_grad_enabled()
    view = View(get, put, base=None if on else tensor._cell, inference=torch.is_inference_mode_enabled())
    return as_view(tensor, meta, view, differentiable=on)
