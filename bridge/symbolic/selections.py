"""Rows by a traced mask or length, `x[mask]` and `x[:n]`, whose shape depends on data.

`Rows` represents such a result where it can be computed on all elements; a loop over rows takes all of them in turn.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from math import inf, isinf
from typing import Any

import jax.numpy as jnp
import torch
import torch.nn.functional as F

from bridge._compat.jax import Tracer, same_values
from bridge._compat.torch import UncompiledDispatchMode, in_transform, schema_name
from bridge.context import current, refusal
from bridge.errors import BridgeError
from bridge.symbolic.bytecode import only_writes
from bridge.symbolic.constants import as_constant
from bridge.symbolic.places import (
    Error,
    check_within,
    dimensions_of,
    is_mask,
    is_prefix,
    is_traced_number,
    is_whole,
    places_of,
)
from bridge.symbolic.ranges import distance, range_of
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten
SIZED = (torch.ones, torch.zeros)
"""Functions that make a tensor of a size, which may be traced and is then at most `_LARGEST`."""
_LARGEST = 2**20
_ELEMENTWISE = {aten._to_copy.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default}
"""Elementwise operations besides those that PyTorch calls pointwise."""
_NEUTRAL: dict[str, float] = {
    "sum": 0, "mean": 0, "prod": 1, "any": 0, "all": 1, "logsumexp": -inf,
    "amax": -inf, "max": -inf, "amin": inf, "min": inf,
}  # fmt: skip
"""Reduction -> its neutral number."""
_REDUCTIONS = {getattr(owner, name) for name in _NEUTRAL for owner in (torch, torch.Tensor)}
_LOSSES = {
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
}  # fmt: skip
"""Losses of each element."""
_LAST_DIM = {F.linear, F.layer_norm, F.rms_norm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
"""Functions that act on the last dimensions of each row."""
_JOINS = {torch.stack, torch.cat, torch.concat, torch.concatenate}
_NUMBERS = {
    torch.is_nonzero, torch.Tensor.is_nonzero, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__,
    torch.Tensor.__complex__, torch.Tensor.__bool__, torch.Tensor.__index__,
}  # fmt: skip
"""Functions of a tensor with one element that return its number."""
ROW_WISE = {F.cross_entropy, F.ctc_loss, *_LOSSES, *_LAST_DIM}
"""Functions of rows whose own lowering would see all rows."""
SHAPE_REMEDY = "keep shapes independent of data: torch.where for a branch, a mask and a sum for a selection"
_ONE_MASK = "compute the mask once and use it on both sides, or choose with torch.where"
_DROPOUT_REMEDY = "drop before the selection, or set p to 0: as many numbers are drawn as there are rows"
_LOOP_REMEDY = "loop over all places, with torch.where(mask[i]) for the rows of each"
_NUMBER_REMEDY = (
    "mask.to(torch.uint8).argmax() is the place of the only true element and works as an index; "
    "torch.where(mask, x, 0).sum() is the only element of x[mask]; torch.stack makes one tensor of a list of them"
)
_LENGTH_REMEDY = "give attention keys and values of this length, or mask the whole buffer by torch.arange(size) < n"


def refused(what: str, remedy: str = SHAPE_REMEDY, rows: str = "x[mask]", made: str = "") -> BridgeError:
    """Returns the error for `what`, which needs the number of rows."""
    return refusal(f"`{rows}` makes a shape that depends on data, which {what} needs{made}", remedy)


class Rows:
    """A tensor in PyTorch: the elements of `whole` that the mask selects.

    `behind`: number of dimensions of `whole` after those of the mask. `place`: where the code has read the rows.
    `length`: the length n of `x[:n]`, which has one traced size.
    """

    is_place = False
    """True for the result of `torch.where(mask)`."""

    def __init__(self, whole: torch.Tensor, mask: Any, behind: int, place: str, length: Any = None):
        self.whole = whole
        self._mask = mask
        self._behind = behind
        self._place = place
        self.length = length
        self._selector = mask if length is None else length

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # No answer is right: code may branch differently for an object that is no tensor, and C++ code crashes on one.
        raise self._refused(
            "a result, or a check of its type,", made=f"; it was made {self._place}, and its type is asked for"
        )

    @property
    def _first(self) -> int:
        """The index of the dimension of the rows; in `whole`, the dimensions of the mask begin there."""
        return self.whole.dim() - self._behind - self._mask.dim()

    @property
    def shape(self) -> tuple:
        """The shape with the traced number of rows, which a `torch.Size` cannot hold."""
        sizes = [*self.whole.shape]
        count = self._mask.sum() if self.length is None else self.length
        return (*sizes[: self._first], count, *sizes[len(sizes) - self._behind :])

    def size(self, dim: int | None = None) -> Any:
        if dim is None:
            return self.shape
        return self.shape[dim]

    def dim(self) -> int:
        return self._first + 1 + self._behind

    @property
    def ndim(self) -> int:
        return self.dim()

    def numel(self) -> Any:
        return math.prod(self.shape)

    def tril(self, diagonal: Any = 0) -> Rows:
        """The elements that remain do not depend on the length."""
        if self.length is None:
            raise self._refused("`tril`")
        rows, columns = map(torch.arange, self.whole.shape[-2:])
        return self._with(self.whole.masked_fill(columns - rows[:, None] > diagonal, 0))

    def unsqueeze(self, dim: int) -> Rows:
        back = dim % (self.dim() + 1) - self.dim() - 1
        if back < -1 - self._behind:
            raise self._refused("`unsqueeze` before the rows")
        return Rows(self.whole.unsqueeze(back), self._mask, self._behind + 1, self._place, self.length)

    def reshape(self, *sizes: Any) -> Rows:
        """Returns `rows.reshape(-1, …)`, where one index of the dimensions before the rows remains."""
        if not isinstance(sizes[0], int):
            sizes = tuple(sizes[0])
        behind = self.whole.shape[self.whole.dim() - self._behind :]
        if sizes[0] != -1 or self.whole.numel() != self._mask.numel() * math.prod(sizes[1:]) or not math.prod(behind):
            raise self._refused("`reshape` but of what is behind the rows")
        whole = self.whole.reshape(*self._mask.shape, *sizes[1:])
        return Rows(whole, self._mask, len(sizes) - 1, self._place, self.length)

    view = reshape

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yields all rows in turn; the turn of a row that is not selected writes nothing."""
        call = current()
        if call is None or self._mask.dim() != 1 or self._first or not only_writes(sys._getframe(1), self):
            raise self._refused("a loop that does anything else than write into tensors", _LOOP_REMEDY)
        outer = call.condition
        for row, selected in zip(self.whole.unbind(), self._mask.unbind(), strict=True):
            call.condition = selected if outer is None else selected & outer
            try:
                yield row
            finally:
                call.condition = outer

    def __getitem__(self, index: Any) -> Any:
        places = self._places_behind(index)
        if places is None:
            return _call(self, torch.Tensor.__getitem__, index)
        part = self.whole[places]
        behind = part.dim() - (self.whole.dim() - self._behind)
        return Rows(part, self._mask, behind, self._place, self.length)

    def __setitem__(self, index: Any, value: Any) -> None:
        places = self._places_behind(index)
        if places is None:
            raise self._refused("an assignment to some of the rows")
        self.whole[places] = self[index]._whole_of(value, "an assignment")

    def _places_behind(self, index: Any) -> tuple | None:
        """Returns the index into `whole` for one that takes all rows; None for another one."""
        places = places_of(index)
        if not all(_is_basic(each) and not _holds_tensor(each) for each in places):
            return None
        ellipses = [i for i, each in enumerate(places) if each is Ellipsis]
        if len(ellipses) == 1:
            at = ellipses[0]
            taken = sum(each is not None for each in places) - 1
            places = (*places[:at], *[slice(None)] * (self.dim() - taken), *places[at + 1 :])
        ahead = self._first + 1
        if ellipses[1:] or not all(map(is_whole, places[:ahead])):
            return None
        return (*[slice(None)] * (self.whole.dim() - self._behind), *places[ahead:])

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad"):
            return getattr(self.whole, name)
        raise AttributeError(name) if name.startswith("__") else self._refused(f"`.{name}`")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        rows = [v for v in (*args, *kwargs.values()) if type(v) is cls]
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in _OF_TARGETS and type(args[0]) is not cls and not in_transform():
            return _OF_TARGETS[func](func, *args, **kwargs)
        if func in _JOINS and not in_transform():
            return _joined(func, *args, **kwargs)
        if not rows or in_transform():  # without rows, they are in a list
            raise refused(f"`{func.__name__}`")
        if func in _REDUCTIONS and type(args[0]) is cls and not any(isinstance(v, torch.Tensor) for v in args[1:]):
            return args[0]._reduced(func.__name__, *args[1:], **kwargs)
        if func in _PARTS:
            return _PARTS[func](rows[0], func, *args[1:], **kwargs)
        if func in _LOSSES:
            return rows[0]._loss(func, args, kwargs)
        if func in _LAST_DIM and len(rows) == 1 and rows[0] is args[0]:
            return rows[0]._last_dim(func, *args[1:], **kwargs)
        if func in _OF_CLASSES:
            return _OF_CLASSES[func](rows[0], *args, **kwargs)
        return rows[0]._elementwise(rows, func, args, kwargs)

    def _refused(self, what: str, remedy: str = "", made: str = "") -> BridgeError:
        if self.length is not None:
            return refused(what, remedy or _LENGTH_REMEDY, "x[:n]", made)
        return refused(what, as_constant(self._mask.value, remedy or SHAPE_REMEDY), made=made)

    def _with(self, whole: torch.Tensor) -> Rows:
        return Rows(whole, self._mask, self._behind, self._place, self.length)

    def _elementwise(self, rows: list[Rows], func: Any, args: tuple, kwargs: dict) -> Any:
        """Runs `func`, which has to consist of elementwise operations, on the whole tensors."""
        name = f"`{func.__name__}`"
        wholes = [each.whole for each in rows]
        if func in _NUMBERS:
            raise self._refused(name, _NUMBER_REMEDY)
        args = tuple(self._whole_of(value, name) for value in args)
        kwargs = {key: self._whole_of(value, name) for key, value in kwargs.items()}
        with _ElementwiseOnly(lambda: self._refused(name, _DROPOUT_REMEDY * ("dropout" in name)), wholes):
            result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or result.dim() < self._behind + self._mask.dim():
            raise self._refused(name)
        shares = any(result is whole or _memory_of(result) is _memory_of(whole) for whole in wholes)
        return self._with(result) if shares else self._settled(result)

    def _settled(self, whole: torch.Tensor) -> Rows:
        """Returns new rows, with ones again where the mask selects nothing.

        There a function may have made infinity or NaN of the ones, and a gradient of zero times infinity would reach
        its other operands.
        """
        made = self._with(whole)
        if self.length is None and whole.is_floating_point():
            made.whole = made._only(whole, 1)
        return made

    def _whole_of(self, value: Any, name: str) -> Any:
        """Returns the operand for all rows."""
        if type(value) is Rows:
            if not self._selects_as(value):
                raise self._refused(f"{name} of rows by two masks", _ONE_MASK)
            # Attention handles `x[:n]` by itself; elsewhere the other rows would be arbitrary content of the buffer.
            if value.length is None:
                return value.whole
            return self._only(value.whole, 1)
        if isinstance(value, torch.Tensor) and value.dim() > self._behind:
            at = value.dim() - self._behind - 1
            if value.shape[at] != 1:
                raise self._refused(f"{name} beside a tensor with rows of its own")
            # Its one row is that of every place of the mask.
            return value.reshape(*value.shape[:at], *[1] * self._mask.dim(), *value.shape[at + 1 :])
        return value

    def _only(self, value: torch.Tensor, otherwise: float) -> torch.Tensor:
        return torch.where(self._wide(), value, torch.full((), otherwise, dtype=value.dtype))

    def _wide(self) -> torch.Tensor:
        return self._mask[(..., *[None] * self._behind)]

    def _selects_as(self, other: Rows, beside: int = 0) -> bool:
        """True if both are known to be the same rows, counted from the last dimension.

        `beside`: number of dimensions behind the rows of `self` in excess of those behind the rows of `other`.
        """
        mine = self._behind - beside, self.length is None, self._mask.shape
        theirs = other._behind, other.length is None, other._mask.shape
        return mine == theirs and same_values(self._selector.value, other._selector.value)

    def _write(self, target: torch.Tensor, index: Any) -> None:
        """Runs `target[index] = self`, where the index has the mask of `self`."""
        rows = rows_by_mask(target, index, "", is_read=False)
        if rows is None or not self._selects_as(rows) or target.dtype != self.dtype:
            raise self._refused("an assignment by another mask, or of another dtype,", _ONE_MASK)
        rows.whole.copy_(torch.where(rows._wide(), self.whole, rows.whole))

    def _as_mask(self) -> Any:
        """Returns the index that `self` is: positions without duplicates."""
        if not self.is_place or self._mask.dim() != 1:
            raise self._refused("an assignment at positions that may be there twice", "use index_add_")
        return self._mask

    def _loss(self, func: Any, args: tuple, kwargs: dict) -> Any:
        reduction = kwargs.get("reduction", "mean")
        name = f"`{func.__name__}`"
        given = {key: self._whole_of(value, name) for key, value in kwargs.items()} | {"reduction": "none"}
        each = self._settled(func(*(self._whole_of(value, name) for value in args), **given))
        if reduction == "none":
            return each
        return each._reduced(reduction)

    def _last_dim(self, func: Any, other: Any, *rest: Any, **kwargs: Any) -> Rows:
        """Runs a function of `self` that does not reach the rows: a product with a matrix, or a normalization."""
        if isinstance(other, (tuple, list)):
            reached = len(other)
        elif other.dim() == 2:
            reached = 1
        else:
            reached = math.inf
        if reached > self._behind:
            raise self._refused(f"`{func.__name__}`")
        return self._settled(func(self.whole, other, *rest, **kwargs))

    def _parts(self, func: Any, size: Any, dim: int = 0) -> tuple[Rows, ...]:
        back = dim % self.dim() - self.dim()
        if back < -self._behind:
            raise self._refused(f"`{func.__name__}` along the rows")
        return tuple(map(self._with, func(self.whole, size, back)))

    def _unbound(self, func: Any, dim: int = 0) -> tuple[Rows, ...]:
        back = dim % self.dim() - self.dim()
        if back < -self._behind:
            raise self._refused(f"`{func.__name__}` along the rows")
        parts = func(self.whole, back)
        return tuple(Rows(part, self._mask, self._behind - 1, self._place, self.length) for part in parts)

    def _cross_entropy(self, logits: Any, target: Any, weight: Any = None, *rest: Any, **kwargs: Any) -> torch.Tensor:
        """The targets are classes for each row; rows that are not selected are ignored."""
        alike = type(target) is Rows and type(logits) is Rows and logits._selects_as(target, 1)
        if (
            not alike
            or target._behind
            or self._first
            or rest
            or target.dtype.is_floating_point
            or kwargs.get("reduction") == "none"
        ):
            raise self._refused("`cross_entropy` but of rows of logits and their classes,")
        ignored = target._only(target.whole, kwargs.get("ignore_index", -100))
        return F.cross_entropy(logits._only(logits.whole, 1).flatten(0, -2), ignored.flatten(), weight, **kwargs)

    def _ctc_loss(self, scores: Any, targets: Any, input_lengths: Any, lengths: Any, **settings: Any) -> torch.Tensor:
        """The targets are rows of labels, padded anywhere; the lengths are the numbers selected in each row."""
        counted = targets is self and not self._behind and self._mask.dim() == 2 and isinstance(lengths, BridgeTensor)
        if not counted or not same_values(lengths.value, self._mask.sum(-1).value):
            raise self._refused("`ctc_loss` but of labels[mask] whose lengths are mask.sum(-1)")
        first = torch.argsort((~self._mask).to(torch.uint8), dim=-1, stable=True)
        return F.ctc_loss(scores, self.whole.gather(1, first), input_lengths, lengths, **settings)

    def _reduced(self, name: str, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        """Reduces each row by itself, over the rows, or everything that is selected."""
        reduce = getattr(torch, name)
        settings = {} if dtype is None else {"dtype": dtype}
        size = self.dim()
        if dim is None:
            dims = range(size)
        else:
            dims = [d % size for d in (dim if isinstance(dim, (tuple, list)) else [dim])]
        given = () if dim is None else (dim, keepdim)
        if self._first not in dims:
            places = [d if d < self._first else d - size for d in dims]  # counted as in `whole`
            result = reduce(self.whole, places if len(places) > 1 else places[0], keepdim, **settings)
            values = result if isinstance(result, torch.Tensor) else result[0]
            behind = self._behind - (0 if keepdim else sum(d > self._first for d in dims))
            made = [Rows(v, self._mask, behind, self._place, self.length)._settled(v) for v in (values, *result[1:2])]
            if result is values:
                return made[0]
            return type(result)(made)
        fill = _NEUTRAL[name]
        if isinf(fill) and not self.dtype.is_floating_point:
            ends = jnp.iinfo(jax_dtype(self.dtype))
            fill = int(ends.min if fill < 0 else ends.max)
        wide = self._mask.dim()
        mask = self._mask.flatten()
        rows = self._only(self.whole, fill).flatten(self._first, self._first + wide - 1)
        if name == "mean":
            dtype = dtype or self.dtype
            torch.ones(1, dtype=dtype).mean()  # raises PyTorch's error for integers
            count = mask.sum() * math.prod(rows.shape[d] for d in dims if d != self._first)
            total = rows.to(dtype).sum(*given, dtype=torch.promote_types(dtype, torch.float32))
            return (total / count).to(dtype)
        if name in ("max", "min") and given:
            return self._extreme(name, rows, mask, fill, dims[0], keepdim)
        return reduce(rows, *given, **settings)

    def _extreme(self, name: str, rows: torch.Tensor, mask: torch.Tensor, fill: float, dim: int, keepdim: bool) -> Any:
        """Reduces along the rows, with the place among the selected ones; the first one if all of them are `fill`."""
        result = getattr(torch, name)(rows, dim, True)
        place = torch.where(result.values == fill, mask.to(torch.uint8).argmax(), result.indices)
        found = rows.gather(dim, place), (mask.cumsum(0) - 1)[place]
        return type(result)(found if keepdim else [each.squeeze(dim) for each in found])


_PARTS = {
    **dict.fromkeys((torch.chunk, torch.Tensor.chunk, torch.split, torch.Tensor.split), Rows._parts),
    **dict.fromkeys((torch.unbind, torch.Tensor.unbind), Rows._unbound),
}
_OF_CLASSES: dict[Any, Callable] = {F.cross_entropy: Rows._cross_entropy, F.ctc_loss: Rows._ctc_loss}


class _ElementwiseOnly(UncompiledDispatchMode):
    """Refuses operations that are not elementwise, and those that write into anything but `wholes`."""

    def __init__(self, error: Callable[[], BridgeError], wholes: list[torch.Tensor]):
        super().__init__()
        self._error = error
        self._wholes = wholes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        elementwise = torch.Tag.pointwise in func.tags or func in _ELEMENTWISE
        elsewhere = schema_name(func).endswith("_") and all(args[0] is not whole for whole in self._wholes)
        if not elementwise or elsewhere or "out" in kwargs:
            raise self._error()
        return func(*args, **kwargs)


def _memory_of(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, BridgeTensor):
        return tensor._handle.storage
    return tensor


def rows_by_mask(tensor: torch.Tensor, index: Any, place: str, is_read: bool = True) -> Rows | None:
    """Returns `tensor[index]` by one traced mask among integers and slices; None for another index.

    The whole has ones where the mask selects nothing; for a write, it is the view that is written.
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
    rows = Rows(view, mask, behind, place)
    if is_read:
        return rows._with(rows._only(view, 1))
    return rows


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
    return Rows(whole, torch.arange(size) < length, behind, place, length)


def positions_of(mask: torch.Tensor, place: str) -> tuple[Rows, ...]:
    """Returns `torch.where(mask)`: the positions where the mask is true, one result for each of its dimensions."""
    made = []
    for dim, size in enumerate(mask.shape):
        made.append(Rows(torch.arange(size).view(-1, *[1] * (mask.dim() - 1 - dim)).expand(mask.shape), mask, 0, place))
        made[-1].is_place = True
    return tuple(made)


def _at_positions(_func: Any, tensor: torch.Tensor, index: Any) -> Rows:
    """Returns `tensor[index]` for adjacent positions of one mask among None and slices, with ones where it is false."""
    places = places_of(index)
    at = [i for i, each in enumerate(places) if type(each) in (Rows, int)]
    rows = next(each for each in places if type(each) is Rows)
    alike = all(type(p) is not Rows or (rows._selects_as(p) and not p._behind) for p in places)
    adjacent = at[-1] - at[0] == len(at) - 1
    if not alike or not adjacent or not all(i in at or _is_basic(p) for i, p in enumerate(places)):
        raise rows._refused("an index beside others")
    whole = tensor[tuple(each.whole if type(each) is Rows else each for each in places)]
    behind = whole.dim() - at[0] - rows._mask.dim()
    made = Rows(whole, rows._mask, behind, rows._place, rows.length)
    return made._with(made._only(whole, 1))


def _assigned(func: Any, target: torch.Tensor, index: Any, value: Any) -> None:
    """Runs `target[index] = value`, where one of them is rows or their positions."""
    index = tuple(each._as_mask() if type(each) is Rows else each for each in places_of(index))
    if type(value) is Rows:
        return value._write(target, index)
    return func(target, index, value)


def _added(func: Any, target: torch.Tensor, dim: int, index: Any, source: Any, **kwargs: Any) -> torch.Tensor:
    """Runs `index_add` of rows at positions of the same mask."""
    alike = type(index) is Rows and type(source) is Rows and source._selects_as(index, source._behind)
    if not alike or index._behind or source._first != dim % target.dim() or source.dim() != target.dim():
        rows = source if type(source) is Rows else index
        raise rows._refused(f"`{func.__name__}` but of rows at their positions")
    last = source._first + source._mask.dim() - 1
    added = source._only(source.whole, 0).flatten(source._first, last)
    return func(target, dim, index.whole.flatten(), added, **kwargs)


def _joined(func: Any, tensors: Any, dim: int = 0) -> Rows:
    """Runs `stack` or `cat` of rows by one mask, along a dimension behind the rows."""
    first = next(each for each in tensors if type(each) is Rows)
    name = f"`{func.__name__}`"
    new = func is torch.stack
    size = first.dim() + new
    back = dim % size - size
    alike = all(type(each) is Rows and each.dim() == first.dim() for each in tensors)
    if not alike or back < -first._behind - new:
        raise first._refused(f"{name} but of rows by one mask, along a dimension behind the rows,")
    whole = func([first._whole_of(each, name) for each in tensors], back)
    return Rows(whole, first._mask, first._behind + new, first._place, first.length)


_OF_TARGETS: dict[Any, Callable] = {
    torch.Tensor.__getitem__: _at_positions,
    torch.Tensor.__setitem__: _assigned,
    **dict.fromkeys((torch.index_add, torch.Tensor.index_add, torch.Tensor.index_add_), _added),
}
"""Functions of a tensor followed by rows or their positions."""


def _holds_tensor(place: Any) -> bool:
    return isinstance(place, slice) and any(isinstance(v, torch.Tensor) for v in (place.start, place.stop, place.step))


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


def sized(func: Any, args: tuple, kwargs: dict, error: Error, place: str) -> Rows | None:
    """Returns `torch.ones(2, n)` with one traced n; None if no size is traced, or several are.

    Raises `BridgeError` for a length whose largest value is not known.
    """
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        sizes = args[0]
    else:
        sizes = args
    traced = [i for i, size in enumerate(sizes) if is_traced_number(size)]
    if len(traced) != 1:
        return None
    at = traced[0]
    length = sizes[traced[0]]
    check_within(length, "n", _LARGEST, f"`torch.{func.__name__}(…, n)`", error)
    most = int(range_of(length).high)
    whole = func(*sizes[:at], most, *sizes[at + 1 :], **kwargs)
    return Rows(whole, torch.arange(most) < length, len(sizes) - 1 - at, place, length)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **rest
) -> torch.Tensor:
    """Attends to the elements within the length. The others are made zero, because 0 times NaN is NaN."""
    if type(query) is Rows or type(key) is not Rows or type(value) is not Rows or key.length is None:
        raise refused("attention in which not keys and values alone have a traced length", _LENGTH_REMEDY, "x[:n]")
    if key._behind != 1 or not key._selects_as(value):
        raise key._refused("attention to keys and values of different lengths")
    mask = _mask(attn_mask, key)
    if is_causal:
        mask = mask & torch.ones(query.shape[-2], mask.shape[-1], dtype=torch.bool).tril()
    keys = key._only(key.whole, 0)
    values = key._only(value.whole, 0)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=dropout_p, **rest)


def _mask(given: Any, key: Rows) -> torch.Tensor:
    """Returns the code's mask for the whole buffer, without the part beyond the length."""
    valid = key._mask
    whole = given
    if given is None:
        return valid[None]
    if type(given) is Rows and not given._behind and distance(given.length, key.length) == 0:
        whole = F.pad(given.whole, (0, len(valid) - given.whole.shape[-1]))
    elif type(given) is Rows or given.shape[-1] != 1:
        raise key._refused("attention with a mask of another length")
    if whole.dtype == torch.bool:
        return whole & valid
    return torch.where(valid, whole, float("-inf"))


def _call(self: Rows, function: Callable, *args: Any, **kwargs: Any) -> Any:
    return torch.overrides.handle_torch_function(function, (self,), self, *args, **kwargs)


for _name in dir(torch.Tensor):  # all methods of tensors, as calls of `__torch_function__`
    _function = getattr(torch.Tensor, _name)
    _is_of_every_object = _name in vars(Rows) or _name in ("__dir__", "__hash__", "__new__", "__repr__")
    if callable(_function) and not _is_of_every_object and _function is not getattr(object, _name, None):
        setattr(Rows, _name, functools.partialmethod(_call, _function))
