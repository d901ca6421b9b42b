"""`x[:, :n]` by a length n that is traced: attention over the filled part of a buffer of fixed size.

The tensor that PyTorch would make has a shape that depends on data. Here it is the whole buffer and the length. Code
may ask for its shape, whose traced size it can compare where the ranges decide (`bridge/traced_positions.py`), make a
mask of that size, and call `F.scaled_dot_product_attention`. That leaves out what lies beyond the length, also if it
is not finite. What needs the elements by themselves is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from bridge.errors import BridgeError, refusal
from bridge.indexing import is_traced_number
from bridge.masked import add_methods
from bridge.tensors import BridgeTensor

if TYPE_CHECKING:
    from bridge.traced_positions import Positions

_REMEDY = "give F.scaled_dot_product_attention both keys and values of this length, or mask the whole buffer"
SIZED = (torch.ones, torch.zeros)
"""Functions that make a tensor of a size, which may be traced."""


class Prefix:
    """What is a tensor in PyTorch: the first `length` elements of `whole` along `axis`, which counts from 0."""

    def __init__(self, whole: torch.Tensor, axis: int, length: BridgeTensor, positions: Positions, place: str):
        self.whole, self.axis, self.length = whole, axis, length
        self._positions, self._place = positions, place

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # As for `MaskedRows`: code may take another branch for what is no tensor.
        raise refused(f"a result, or a check of its type, {self._place}")

    @property
    def shape(self) -> tuple:
        """With the traced length, which a `torch.Size` cannot hold."""
        return (*self.whole.shape[: self.axis], self.length, *self.whole.shape[self.axis + 1 :])

    @property
    def ndim(self) -> int:
        return self.whole.dim()

    def dim(self) -> int:
        return self.whole.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def tril(self, diagonal: Any = 0) -> Prefix:
        """Which elements remain does not depend on the length."""
        rows, columns = (torch.arange(size) for size in self.whole.shape[-2:])
        kept = columns - rows[:, None] <= diagonal
        whole = torch.where(kept, self.whole, torch.zeros((), dtype=self.whole.dtype))
        return Prefix(whole, self.axis, self.length, self._positions, self._place)

    def same_length(self, other: Prefix) -> bool:
        """Whether both are known to have the same length, counted from the last dimension."""
        same_axis = self.axis - self.ndim == other.axis - other.ndim
        return same_axis and self._positions.distance(self.length, other.length) == 0

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return getattr(self.whole, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise refused(f"`.{name}`")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        raise refused(f"`{func.__name__}`")


def is_prefix(place: Any) -> bool:
    """Whether an index is `:n` with a traced n."""
    if not isinstance(place, slice) or not is_traced_number(place.stop):
        return False
    return place.step in (None, 1) and (place.start is None or (type(place.start) is int and place.start == 0))


def prefix(tensor: torch.Tensor, places: tuple, positions: Positions, error: Callable, place: str) -> Prefix | None:
    """`tensor[places]`, one of which is `:n` with a traced n among slices and integers; None for another index.

    Raises `BridgeError` for a length that is not known to be within the dimension, where PyTorch's slice is shorter.
    """
    (number,) = (i for i, each in enumerate(places) if is_prefix(each))
    if not all(isinstance(each, slice) or each is None or each is Ellipsis or type(each) is int for each in places):
        return None
    stop = places[number].stop
    whole = tensor[(*places[:number], slice(None), *places[number + 1 :])]
    after = places[number + 1 :]
    if Ellipsis in places[:number]:
        axis = whole.dim() - 1 - sum(each is None or isinstance(each, slice) for each in after)
    else:
        axis = sum(each is None or isinstance(each, slice) for each in places[:number])
    low, high = positions.of(stop).range
    if low < 0 or high > whole.shape[axis]:
        raise error(
            f"`x[:n]` of {whole.shape[axis]} elements has a traced n that may be from {low} to {high}",
            f"n.clamp(0, {whole.shape[axis]}), or another number that is within the dimension",
        )
    return Prefix(whole, axis, stop, positions, place)


def sized(func: Any, args: tuple, kwargs: dict, positions: Positions, error: Callable, place: str) -> Prefix | None:
    """`torch.ones(2, n)` with a traced n whose largest value is known; None if no size is traced.

    Raises `BridgeError` where nothing is known of n, or where several sizes are traced.
    """
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    traced = [i for i, size in enumerate(sizes) if is_traced_number(size)]
    if not traced:
        return None
    low, high = positions.of(sizes[traced[0]]).range
    if len(traced) > 1 or low < 0 or high >= 2**31 - 1:
        raise error(
            f"`torch.{func.__name__}` has {len(traced)} traced sizes, of which the first may be from {low} to {high}",
            "make it as large as it can become; or one traced size, of a number that was clamped: n.clamp(0, 128)",
        )
    axis = traced[0]
    return Prefix(func(*sizes[:axis], high, *sizes[axis + 1 :], **kwargs), axis, sizes[axis], positions, place)


def refused(what: str) -> BridgeError:
    """The error for `what`, which needs the elements by themselves."""
    return refusal(f"`x[:n]` makes a shape that depends on data, which {what} needs", _REMEDY)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention to the elements within the length. The others are made zero, because 0 times NaN is NaN."""
    if type(query) is Prefix or type(key) is not Prefix or type(value) is not Prefix:
        raise refused("attention in which not keys and values alone have a traced length")
    size = key.whole.shape[-2]
    if key.axis != key.ndim - 2 or not key.same_length(value) or value.whole.shape[-2] != size:
        raise refused("attention to keys and values of different lengths")
    valid = torch.arange(size) < key.length
    mask = _mask(attn_mask, key, valid)
    if is_causal:
        mask = mask & torch.ones(query.shape[-2], size, dtype=torch.bool).tril()
    keys, values = (
        torch.where(valid[:, None], each.whole, torch.zeros((), dtype=each.whole.dtype)) for each in (key, value)
    )
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
    )


def _mask(given: Any, key: Prefix, valid: torch.Tensor) -> torch.Tensor:
    """The mask of the code for the whole buffer, without what lies beyond the length."""
    if given is None:
        return valid[None]
    if type(given) is Prefix:
        if given.axis != given.ndim - 1 or key._positions.distance(given.length, key.length) != 0:
            raise refused("attention with a mask of another length")
        size, missing = len(valid), max(len(valid) - given.whole.shape[-1], 0)
        whole = F.pad(given.whole, (0, missing))[..., :size]
    elif given.shape[-1] == 1:
        whole = given
    else:
        raise refused("attention with a mask of another length")
    return whole & valid if whole.dtype == torch.bool else torch.where(valid, whole, float("-inf"))


add_methods(Prefix)
