"""Indices that are traced: `x[i]`, `x[i : i + n]`, `x[:n]`, `x[mask]`, and writes to them.

PyTorch asks a traced integer for its number and takes a view; here the place is an operand of the view. The shape of
`x[:n]` and `x[mask]` depends on data: `Rows` stands for such a result in what can be computed on all elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from bridge._compat.jax import Tracer, same_values
from bridge._compat.torch import UncompiledDispatchMode, arguments, below_modes, in_transform
from bridge.errors import BridgeError, refusal
from bridge.symbolic.ranges import distance, range_of
from bridge.tensor.tensor import BridgeTensor, View, as_view, blank

aten = torch.ops.aten

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


# ---- rows by a mask or a length

SIZED = (torch.ones, torch.zeros)
"""Functions that make a tensor of a size, which may be traced."""
_ELEMENTWISE = {aten._to_copy.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default}
"""Operations beside those that PyTorch calls pointwise."""
_SUMS = (torch.sum, torch.Tensor.sum)
_MEANS = (torch.mean, torch.Tensor.mean)
_SHAPE_REMEDY = "keep shapes independent of data: torch.where for a branch, a mask and a sum for a selection"
_ONE_MASK = "compute the mask once and use it on both sides, or choose with torch.where"
_LENGTH_REMEDY = (
    "give F.scaled_dot_product_attention both keys and values of this length, or mask the whole buffer with "
    "torch.arange(size) < n"
)


class Rows:
    """A tensor in PyTorch: the elements of `whole` that the mask selects.

    `behind`: how many dimensions of `whole` come after those of the mask. `place`: where the code has read them.
    `length`: of `x[:n]`, which has one traced size.
    """

    def __init__(
        self, whole: torch.Tensor, mask: torch.Tensor, behind: int, place: str, length: BridgeTensor | None = None
    ):
        self.whole, self._mask, self._behind, self._place, self.length = whole, mask, behind, place, length

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # No answer is right: code may take another branch for what is no tensor, and C++ code crashes on what is none.
        raise self._refused(f"a result, or a check of its type, {self._place}")

    @property
    def axis(self) -> int:
        """The dimension of the length, counted from the last one."""
        return -1 - self._behind

    @property
    def shape(self) -> tuple:
        """With the traced length, which a `torch.Size` cannot hold."""
        if self.length is None:
            raise self._refused("`.shape`")
        sizes: list[Any] = [*self.whole.shape]
        sizes[self.axis] = self.length
        return tuple(sizes)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)

    def tril(self, diagonal: Any = 0) -> Rows:
        """Which elements remain does not depend on the length."""
        if self.length is None:
            raise self._refused("`tril`")
        rows, columns = (torch.arange(size) for size in self.whole.shape[-2:])
        whole = torch.where(columns - rows[:, None] <= diagonal, self.whole, torch.zeros((), dtype=self.dtype))
        return self._with(whole)

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return getattr(self.whole, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refused(f"`.{name}`")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        rows = [v for v in (*args, *kwargs.values()) if type(v) is cls]
        if func is F.scaled_dot_product_attention and all(each.length is not None for each in rows):
            return _attention(*args, **kwargs)
        if func is torch.Tensor.__setitem__ and type(args[2]) is cls and type(args[0]) is not cls:
            return args[2]._write(args[0], args[1])
        if func in (*_SUMS, *_MEANS) and len(args) == 1 and kwargs.keys() <= {"dtype"}:
            return args[0]._total(func, kwargs.get("dtype"))
        if not rows:  # they are in a list
            raise refused(f"`{func.__name__}`")
        if in_transform() or func is F.scaled_dot_product_attention:
            raise rows[0]._refused(f"`{func.__name__}`")
        return rows[0]._elementwise(rows, func, args, kwargs)

    def _refused(self, what: str, remedy: str = "") -> BridgeError:
        if self.length is not None:
            return refused(what, remedy or _LENGTH_REMEDY, "x[:n]")
        return refused(what, remedy or _SHAPE_REMEDY)

    def _with(self, whole: torch.Tensor) -> Rows:
        return Rows(whole, self._mask, self._behind, self._place, self.length)

    def _elementwise(self, rows: list[Rows], func: Any, args: tuple, kwargs: dict) -> Any:
        """`func`, which has to be made of elementwise operations, on the whole tensors."""
        others = [v for v in (*args, *kwargs.values()) if type(v) is not Rows and isinstance(v, torch.Tensor)]
        dtypes = [v.dtype for v in rows] + [v.dtype for v in others if v.dim()]
        whole = functools.partial(self._whole_of, func, functools.reduce(torch.promote_types, dtypes))
        args, kwargs = tuple(map(whole, args)), {key: whole(value) for key, value in kwargs.items()}
        try:
            with _ElementwiseOnly(lambda: self._refused(f"`{func.__name__}`"), [each.whole for each in rows]):
                result = func(*args, **kwargs)
        except RuntimeError as error:  # such as PyTorch's for the truth of several numbers
            raise error if isinstance(error, BridgeError) else self._refused(f"`{func.__name__}`") from error
        for each in rows:
            if result is each.whole:
                return each
        if not isinstance(result, torch.Tensor) or result.dim() < self._behind + self._mask.dim():
            raise self._refused(f"`{func.__name__}`")
        return self._with(result)

    def _whole_of(self, func: Any, common: torch.dtype, value: Any) -> Any:
        """An operand for all rows. `common`: the dtype of the operands that have dimensions, which the rest follows."""
        if type(value) is Rows:
            if not self._selects_as(value):
                where = f", read {self._place} and {value._place}" if value._place != self._place else ""
                raise self._refused(f"`{func.__name__}` of rows by two masks{where}", _ONE_MASK)
            # Of `x[:n]`, which attention reads by itself, the other rows are what is in the buffer.
            return value.whole if value.length is None else _selected(self._mask, self._behind, value.whole, 1)
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() > self._behind:
            raise self._refused(f"`{func.__name__}` beside a tensor with rows of its own")
        if not value.dim() and torch.result_type(torch.empty(1, dtype=common), value) == common:
            value = value.to(common)
        return _selected(self._mask, self._behind, value, 1)

    def _selects_as(self, other: Rows) -> bool:
        """True if both are known to be the same rows, counted from the last dimension."""
        if self._behind != other._behind or (self.length is None) != (other.length is None):
            return False
        if self.length is None or other.length is None:
            return same_values(self._mask.value, other._mask.value)  # pyright: ignore[reportAttributeAccessIssue]
        return distance(self.length, other.length) == 0 and len(self._mask) == len(other._mask)

    def _write(self, target: torch.Tensor, index: Any) -> None:
        """`target[index] = self`, where the index has the mask of `self`."""
        view, mask, behind = mask_in(target, index) or (target, None, 0)
        if mask is None or not self._selects_as(Rows(view, mask, behind, "")):
            raise self._refused("an assignment by another mask", _ONE_MASK)
        if target.dtype != self.dtype:
            with below_modes():  # PyTorch's error; a single value would be cast
                torch.zeros(2, dtype=target.dtype)[torch.ones(2, dtype=torch.bool)] = torch.zeros(2, dtype=self.dtype)
        view.copy_(torch.where(_wide(mask, behind), self.whole, view))

    def _total(self, func: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """The sum or mean of all that is selected."""
        selected = _selected(self._mask, self._behind, self.whole, 0)
        result = self.dtype if dtype is None else dtype
        if func in _SUMS or not (result.is_floating_point or result.is_complex):
            return func(selected, dtype=dtype)
        count = self._mask.sum() * (selected.numel() // self._mask.numel())
        return (selected.to(result).sum(dtype=torch.promote_types(result, torch.float32)) / count).to(result)


class _ElementwiseOnly(UncompiledDispatchMode):
    """Refuses operations that are not elementwise, and those that write anything else than `wholes`."""

    def __init__(self, error: Callable[[], BridgeError], wholes: list[torch.Tensor]):
        super().__init__()
        self._error, self._wholes = error, wholes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        declared = {a.name: a for a in arguments(func)}
        given = [*zip(declared.values(), args, strict=False), *((declared[name], v) for name, v in kwargs.items())]
        written = [v for a, v in given if a.alias_info is not None and a.alias_info.is_write]
        elementwise = torch.Tag.pointwise in func.tags or func in _ELEMENTWISE
        if not elementwise or any(all(target is not whole for whole in self._wholes) for target in written):
            raise self._error()
        return func(*args, **kwargs)


def refused(what: str, remedy: str = _SHAPE_REMEDY, rows: str = "x[mask]") -> BridgeError:
    """Returns the error for `what`, which needs the number of rows."""
    return refusal(f"`{rows}` makes a shape that depends on data, which {what} needs", remedy)


# By a mask.


def is_mask(place: Any) -> bool:
    return isinstance(place, BridgeTensor) and place.dtype == torch.bool and bool(place.dim())


def rows_by_mask(tensor: torch.Tensor, index: Any, place: str) -> Rows | None:
    """Returns `tensor[index]` by one traced mask among integers and slices; None for another index."""
    known = mask_in(tensor, index)
    if known is None or not isinstance(known[1].value, Tracer):
        return None
    view, mask, behind = known
    return Rows(_selected(mask, behind, view, 1), mask, behind, place)


def mask_in(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, BridgeTensor, int] | None:
    """The view that a mask in `tensor[index]` selects from, the mask, and how many dimensions come after it."""
    places = places_of(index)
    masks = [i for i, place in enumerate(places) if is_mask(place)]
    if len(masks) != 1 or not all(i in masks or _is_basic(place) for i, place in enumerate(places)):
        return None
    mask, before, after = places[masks[0]], places[: masks[0]], places[masks[0] + 1 :]
    view = tensor[(*before, *[slice(None)] * mask.dim(), *after)]
    behind = _sliced_dimensions(after)
    if not any(place is Ellipsis for place in before):
        behind = view.dim() - _sliced_dimensions(before) - mask.dim()
    first = view.dim() - behind - mask.dim()
    return (view, mask, behind) if mask.shape == view.shape[first : first + mask.dim()] else None


def _is_basic(place: Any) -> bool:
    return (
        place is None or place is Ellipsis or isinstance(place, slice) or type(place) is int or is_traced_place(place)
    )


def _sliced_dimensions(places: tuple) -> int:
    """How many dimensions of the result come from `None` and slices."""
    return sum(place is None or isinstance(place, slice) for place in places)


def _selected(mask: torch.Tensor, behind: int, value: torch.Tensor, otherwise: int) -> torch.Tensor:
    return torch.where(_wide(mask, behind), value, torch.full((), otherwise, dtype=value.dtype))


def _wide(mask: torch.Tensor, behind: int) -> torch.Tensor:
    return mask[(..., *[None] * behind)]


# By a length.


def is_prefix(place: Any) -> bool:
    """True if an index is `:n` with a traced n."""
    if not isinstance(place, slice) or not is_traced_number(place.stop):
        return False
    return place.step in (None, 1) and (place.start is None or (type(place.start) is int and place.start == 0))


def rows_by_length(tensor: torch.Tensor, places: tuple, error: Error, place: str) -> Rows | None:
    """Returns `tensor[places]`, one of which is `:n` with a traced n among slices and integers; None for another index.

    Raises `BridgeError` for a length that is not known to be within the dimension, where PyTorch's slice is shorter.
    """
    (number,) = (i for i, each in enumerate(places) if is_prefix(each))
    before, stop, after = places[:number], places[number].stop, places[number + 1 :]
    if any(is_traced_place(each) or not _is_basic(each) for each in places):
        return None
    whole = tensor[(*before, slice(None), *after)]
    behind = _sliced_dimensions(after) if Ellipsis in before else whole.dim() - 1 - _sliced_dimensions(before)
    size = whole.shape[whole.dim() - 1 - behind]
    low, high = range_of(stop)[:2]
    if low < 0 or high > size:
        raise error(
            f"`x[:n]` of {size} elements has a traced n that may be from {low} to {high}",
            f"n.clamp(0, {size}), or another number that is within the dimension",
        )
    return Rows(whole, torch.arange(size) < stop, behind, place, stop)


def sized(func: Any, args: tuple, kwargs: dict, error: Error, place: str) -> Rows | None:
    """Returns `torch.ones(2, n)` with a traced n whose largest value is known; None if no size is traced.

    Raises `BridgeError` where nothing is known of n, or where several sizes are traced.
    """
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    traced = [i for i, size in enumerate(sizes) if is_traced_number(size)]
    if not traced:
        return None
    low, high = range_of(sizes[traced[0]])[:2]
    if len(traced) > 1 or low < 0 or high >= 2**31 - 1:
        raise error(
            f"`torch.{func.__name__}` has {len(traced)} traced sizes, of which the first may be from {low} to {high}",
            "make it as large as it can become; or one traced size, of a number that was clamped: n.clamp(0, 128)",
        )
    (at,), length = traced, sizes[traced[0]]
    whole = func(*sizes[:at], high, *sizes[at + 1 :], **kwargs)
    return Rows(whole, torch.arange(int(high)) < length, len(sizes) - 1 - at, place, length)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> torch.Tensor:
    """Attention to the elements within the length. The others are made zero, because 0 times NaN is NaN."""
    if type(query) is Rows or type(key) is not Rows or type(value) is not Rows:
        raise refused("attention in which not keys and values alone have a traced length", _LENGTH_REMEDY, "x[:n]")
    if key._behind != 1 or not key._selects_as(value):
        raise key._refused("attention to keys and values of different lengths")
    valid = key._mask
    mask = _mask(attn_mask, key)
    if is_causal:
        mask = mask & torch.ones(query.shape[-2], len(valid), dtype=torch.bool).tril()
    keys, values = (_selected(valid, 1, each.whole, 0) for each in (key, value))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=dropout_p, **rest)


def _mask(given: Any, key: Rows) -> torch.Tensor:
    """The mask of the code for the whole buffer, without what lies beyond the length."""
    valid = key._mask
    if given is None:
        return valid[None]
    if type(given) is Rows:
        if given._behind or given.length is None or key.length is None or distance(given.length, key.length) != 0:
            raise key._refused("attention with a mask of another length")
        size = len(valid)
        whole = F.pad(given.whole, (0, max(size - given.whole.shape[-1], 0)))[..., :size]
    elif given.shape[-1] == 1:
        whole = given
    else:
        raise key._refused("attention with a mask of another length")
    return whole & valid if whole.dtype == torch.bool else torch.where(valid, whole, float("-inf"))


def _method(function: Callable) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.overrides.handle_torch_function(function, (self,), self, *args, **kwargs)

    return method


for _name in dir(torch.Tensor):  # all methods of tensors, as calls of `__torch_function__`
    _function = getattr(torch.Tensor, _name)
    _is_of_every_object = _name in vars(Rows) or _name in ("__dir__", "__hash__", "__new__", "__repr__")
    if callable(_function) and not _is_of_every_object and _function is not getattr(object, _name, None):
        setattr(Rows, _name, _method(_function))
