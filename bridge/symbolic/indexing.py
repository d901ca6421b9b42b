"""`x[i]`, `x[i : i + n]` and writes to them, by integers without dimensions that are traced.

PyTorch asks such a tensor for its number and takes a view. Here the place is an operand of the view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._compat.jax import Tracer
from bridge.symbolic.ranges import distance, range_of
from bridge.tensor.storage import View
from bridge.tensor.tensor import BridgeTensor, as_view, blank

Error = Callable[[str, str], Exception]
"""Makes the error of the traced call from what was found and a remedy."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_traced_place(index: Any) -> bool:
    """A traced integer; a bool without dimensions is a mask."""
    return isinstance(index, BridgeTensor) and not index.shape and index.dtype in _INTEGERS


def is_traced_number(index: Any) -> bool:
    """A traced integer whose value PyTorch cannot be told."""
    return is_traced_place(index) and isinstance(index.value, Tracer)


def conditions_among(places: tuple) -> list[BridgeTensor]:
    """The traced bools without dimensions: `x[…] = value` writes all or nothing by each of them."""
    bools = (i for i in places if isinstance(i, BridgeTensor) and not i.shape and i.dtype == torch.bool)
    return [i for i in bools if isinstance(i.value, Tracer)]


def is_window(index: Any) -> bool:
    """True if an index is `i : i + n` with a traced i and a number n."""
    if not isinstance(index, slice) or index.step not in (None, 1):
        return False
    if not is_traced_number(index.start) or not is_traced_number(index.stop):
        return False
    return distance(index.stop, index.start) is not None


def is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def places_of(index: Any) -> tuple:
    return index if type(index) is tuple else (index,)


def selected(tensor: BridgeTensor, places: tuple, error: Error) -> tuple[BridgeTensor, tuple]:
    """Returns the view at the traced integers and windows among `places`, and the other places as counted in it.

    Raises PyTorch's `IndexError` for too many of them, and `error(what, remedy)` for a window that may lie outside.
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
    windows = {i for i, p in enumerate(places) if is_window(p)}
    for i in windows:
        tensor = _narrow(tensor, dims[i] + skipped * (i > ellipsis), places[i], error)
    for dim, place in reversed(traced):
        tensor = _select(tensor, dim, place)
    rest = [slice(None) if i in windows else p for i, p in enumerate(places)]
    return tensor, tuple(p for p in rest if not is_traced_place(p))


def _dimensions(place: Any) -> int:
    if place is None or place is Ellipsis or isinstance(place, bool):
        return 0
    is_mask = isinstance(place, torch.Tensor) and place.dtype in (torch.bool, torch.uint8) and place.dim()
    return place.dim() if is_mask else 1


def _select(tensor: BridgeTensor, dim: int, place: BridgeTensor) -> BridgeTensor:
    shape, stride = [*tensor.shape], [*tensor._meta.stride()]
    del shape[dim], stride[dim]
    number = place.value

    def get(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, number, dim, keepdims=False)

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, jnp.asarray(new, x.dtype), number, dim)

    return _view(tensor, shape, stride, get, put)


def _narrow(tensor: BridgeTensor, dim: int, window: slice, error: Error) -> BridgeTensor:
    """Returns elements `i : i + n` of a dimension. Raises `error` unless all are there: PyTorch gives fewer."""
    start, size = window.start, tensor.shape[dim]
    length = max(distance(window.stop, start) or 0, 0)
    low, high = range_of(start)[:2]
    if low < 0 or high + length > size:
        raise error(
            f"`x[i : i + {length}]` of {size} elements has a traced i that may be from {low} to {high}",
            f"i.clamp(0, {max(size - length, 0)}), or another number that is within the dimension",
        )
    number = start.value

    def get(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, number, length, dim)

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, jnp.asarray(new, x.dtype), number, dim)

    shape = [*tensor.shape]
    shape[dim] = length
    return _view(tensor, shape, tensor._meta.stride(), get, put)


def _view(
    tensor: BridgeTensor,
    shape: Sequence[int],
    stride: Sequence[int],
    get: Callable[[jax.Array], jax.Array],
    put: Callable[[jax.Array, jax.Array], jax.Array],
) -> BridgeTensor:
    """Where it lies in memory is not known, so its offset is one that no element of the memory has."""
    layout = tensor._cell.storage.layout
    beyond = tensor._meta.storage_offset() + math.prod(layout.shape if layout is not None else tensor.shape) + 1
    meta = blank(shape, stride, tensor.dtype, int(beyond) * max([1, *tensor._meta.stride()]))
    on = torch.is_grad_enabled()
    view = View(get, put, base=None if on else tensor._cell, inference=torch.is_inference_mode_enabled())
    return as_view(tensor, meta, view, differentiable=on)
