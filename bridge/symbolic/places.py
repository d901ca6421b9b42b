"""Traced places: `x[i]`, `x[i : i + n]`, and writes to them.

PyTorch asks a traced integer for its number and makes a view; here the place is an operand of the view.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._compat.jax import Tracer
from bridge.symbolic.constants import as_constant
from bridge.symbolic.numbers import as_operand
from bridge.symbolic.ranges import distance, range_of
from bridge.tensor.tensor import BridgeTensor, View, as_view, empty_meta

Error = Callable[[str, str], Exception]
"""Makes the error of the traced call from a description and a remedy."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_traced_place(index: Any) -> bool:
    """True for a traced integer; a bool without dimensions is a mask."""
    return isinstance(index, BridgeTensor) and not index.shape and index.dtype in _INTEGERS


def is_traced_number(index: Any) -> bool:
    """True for a traced integer whose value cannot be passed to PyTorch."""
    return is_traced_place(index) and isinstance(index.value, Tracer)


def is_mask(index: Any) -> bool:
    return isinstance(index, BridgeTensor) and index.dtype == torch.bool and bool(index.dim())


def is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def is_window(index: Any) -> bool:
    """True if an index is `i : i + n` with a traced i and a number n."""
    if not isinstance(index, slice) or index.step not in (None, 1):
        return False
    traced = is_traced_number(index.start) and is_traced_number(index.stop)
    return traced and distance(index.stop, index.start) is not None


def is_prefix(index: Any) -> bool:
    """True if an index is `:n` with a traced n."""
    if not isinstance(index, slice) or index.step not in (None, 1) or not is_traced_number(index.stop):
        return False
    return not isinstance(index.start, torch.Tensor) and not index.start


def conditions_among(places: tuple) -> list[BridgeTensor]:
    """Returns the traced bools without dimensions: `x[…] = value` writes all or nothing by each of them."""
    bools = (i for i in places if isinstance(i, BridgeTensor) and not i.shape and i.dtype == torch.bool)
    return [i for i in bools if isinstance(i.value, Tracer)]


def place_of_tensors(index: Any) -> Any:
    """Returns an index with the tensors behind traced numbers."""
    if isinstance(index, slice):
        return slice(as_operand(index.start), as_operand(index.stop), as_operand(index.step))
    if type(index) is tuple:
        return tuple(map(place_of_tensors, index))
    return as_operand(index)


def places_of(index: Any) -> tuple:
    if type(index) is tuple:
        return index
    return (index,)


def selected(tensor: BridgeTensor, places: tuple, error: Error) -> tuple[BridgeTensor, tuple]:
    """Returns the view at the traced integers and windows among `places`, and the other places as counted in it.

    Raises PyTorch's `IndexError` for too many of them, and `error(what, remedy)` for a window that may lie outside.
    """
    taken = [dimensions_of(place) for place in places]
    skipped = tensor.dim() - sum(taken)
    if skipped < 0:
        raise IndexError(f"too many indices for tensor of dimension {tensor.dim()}")
    rest = [*places]
    if any(place is Ellipsis for place in places):
        dim = tensor.dim()
    else:
        dim = sum(taken)
    for i, place in reversed([*enumerate(places)]):
        dim -= skipped if place is Ellipsis else taken[i]
        if is_traced_place(place):
            tensor = _view(tensor, dim, place.value)
            del rest[i]
        elif is_window(place):
            length = max(distance(place.stop, place.start) or 0, 0)
            size = tensor.shape[dim]
            check_within(place.start, "i", size - length, f"`x[i : i + {length}]` of {size} elements", error)
            tensor = _view(tensor, dim, place.start.value, length)
            rest[i] = slice(None)
    return tensor, tuple(rest)


def dimensions_of(place: Any) -> int:
    if place is None or place is Ellipsis or isinstance(place, bool):
        return 0
    if isinstance(place, torch.Tensor) and place.dtype == torch.bool:
        return place.dim()
    return 1


def check_within(number: BridgeTensor, name: str, most: int, what: str, error: Error) -> None:
    """Raises `error` unless the number is known to be from 0 to `most`: otherwise PyTorch's slice is shorter."""
    low, high = range_of(number)[:2]
    if low < 0 or high > most:
        top = max(most, 0)
        remedy = f"{name}.clamp(0, {top}), for a number min(max({name}, 0), {top}), or another one within the dimension"
        raise error(
            f"{what} has a traced {name} that may be from {low} to {high}",
            as_constant(number.value, remedy),
        )


def _view(tensor: BridgeTensor, dim: int, place: jax.Array, length: int | None = None) -> BridgeTensor:
    """Returns the element at a traced place of a dimension, or `length` elements from there on."""
    shape = [*tensor.shape]
    stride = [*tensor._meta.stride()]
    layout = tensor._handle.storage.layout
    # Its place in memory is not known, so it gets an offset that no element of the memory has.
    beyond = tensor._meta.storage_offset() + math.prod(shape if layout is None else layout.shape) + 1
    offset = int(beyond) * max([1, *stride])
    if length is None:
        del shape[dim], stride[dim]
        get = functools.partial(jax.lax.dynamic_index_in_dim, index=place, axis=dim, keepdims=False)
        write = jax.lax.dynamic_update_index_in_dim
    else:
        shape[dim] = length
        get = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=place, slice_size=length, axis=dim)
        write = jax.lax.dynamic_update_slice_in_dim

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return write(x, jnp.asarray(new, x.dtype), place, dim)

    on = torch.is_grad_enabled()
    view = View(get, put, base=None if on else tensor._handle, inference=torch.is_inference_mode_enabled())
    return as_view(tensor, empty_meta(shape, stride, tensor.dtype, offset), view, differentiable=on)
