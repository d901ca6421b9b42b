"""What makes rows whose number depends on data: `x[mask]`, `x[:n]`, `torch.where(mask)` and `torch.ones(n)`."""

from __future__ import annotations

from collections.abc import Callable
from math import isinf
from typing import Any

import torch

from bridge._compat.jax import Tracer
from bridge.symbolic.numbers import NUMBERS, as_operand
from bridge.symbolic.places import Error, check_within, dimensions_of, is_mask, is_prefix, is_traced_number, places_of
from bridge.symbolic.ranges import range_of
from bridge.symbolic.rows import Rows, rows_of

_LARGEST = 2**20
"""The largest number of rows of a tensor that is made with a traced length."""


def flattened(whole: torch.Tensor, mask: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both with one dimension for those of the mask, which begin at `first` in `whole`."""
    if mask.dim() == 1:
        return whole, mask
    return whole.flatten(first, first + mask.dim() - 1), mask.flatten()


def view_by_mask(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """Takes `tensor[index]` apart, whose index is one traced mask among integers and slices.

    Returns the view with all elements in place of the mask, the mask, and the dimension where it begins; None for
    another index.
    """
    places = places_of(index)
    masks = [i for i, each in enumerate(places) if is_mask(each)]
    if len(masks) != 1 or not all(i in masks or _is_basic(each) for i, each in enumerate(places)):
        return None
    mask = places[masks[0]]
    view, behind = _without(tensor, places, masks[0])
    first = view.dim() - behind - mask.dim()
    if mask.shape != view.shape[first : first + mask.dim()] or not isinstance(mask.value, Tracer):
        return None
    return view, mask, first


def rows_by_mask(tensor: torch.Tensor, index: Any, place: str) -> Rows | None:
    """Returns `tensor[index]` by one traced mask among integers and slices; None for another index."""
    found = view_by_mask(tensor, index)
    if found is None:
        return None
    view, mask, first = found
    rows = rows_of(*flattened(view, mask, first), first, place, origin=mask)
    return rows.like(rows.only(1))


def rows_by_length(tensor: torch.Tensor, places: tuple, error: Error, place: str) -> Rows | None:
    """Returns `tensor[places]`, one of which is `:n` with a traced n among slices and integers; None for another index.

    Raises `BridgeError` for a length that is not known to be within the dimension.
    """
    at = [i for i, each in enumerate(places) if is_prefix(each)]
    if len(at) != 1 or not all(map(_is_basic, places)):
        return None
    whole, behind = _without(tensor, places, at[0])
    length = places[at[0]].stop
    size = whole.shape[-1 - behind]
    check_within(length, "n", size, f"`x[:n]` of {size} elements", error)
    return rows_of(whole, torch.arange(size) < length, whole.dim() - 1 - behind, place, length)


def positions_of(mask: torch.Tensor, place: str) -> tuple[Rows, ...]:
    """Returns `torch.where(mask)`: the positions where the mask is true, one result for each of its dimensions."""
    selected = mask if mask.dim() == 1 else mask.flatten()
    made = []
    for dim, size in enumerate(mask.shape):
        places = torch.arange(size).view(-1, *[1] * (mask.dim() - 1 - dim)).expand(mask.shape).flatten()
        made.append(rows_of(places, selected, 0, place, origin=mask, are_places=True))
    return tuple(made)


def sized(make: Callable[[tuple], torch.Tensor], sizes: tuple, name: str, error: Error, place: str) -> Rows | None:
    """Returns `make(sizes)` with one traced size among them; None if no size is traced, or several are,
    or if nothing is known of the traced one.

    `make` must give all elements the same number. Raises `BridgeError` for a length whose largest value is not known.
    """
    given = sizes
    sizes = tuple(map(as_operand, given))
    traced = [i for i, size in enumerate(sizes) if is_traced_number(size)]
    if len(traced) != 1:
        return None
    at = traced[0]
    number = sizes[at]
    mask = getattr(number, "rows_mask", None)
    if mask is not None:
        return rows_of(make((*sizes[:at], len(mask), *sizes[at + 1 :])), mask, at, place)
    if type(given[at]) in NUMBERS and isinf(range_of(number).high):
        return None  # PyTorch asks for the number, and the error says what it is needed for
    check_within(number, "n", _LARGEST, f"`torch.{name}(…, n)`", error)
    most = int(range_of(number).high)
    return rows_of(make((*sizes[:at], most, *sizes[at + 1 :])), torch.arange(most) < number, at, place, number)


def _is_basic(place: Any) -> bool:
    return place is None or place is Ellipsis or isinstance(place, slice) or type(place) is int


def _without(tensor: torch.Tensor, places: tuple, at: int) -> tuple[torch.Tensor, int]:
    """Returns `tensor[places]` with all elements in place of mask or slice `at`, and the number of later dimensions."""
    before = places[:at]
    after = places[at + 1 :]
    dims = dimensions_of(places[at])
    view = tensor[(*before, *[slice(None)] * dims, *after)]
    ahead, behind = (sum(p is None or isinstance(p, slice) for p in part) for part in (before, after))
    return view, behind if any(p is Ellipsis for p in before) else view.dim() - ahead - dims
