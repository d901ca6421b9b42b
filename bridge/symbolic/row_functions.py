"""What functions of PyTorch do with rows whose number depends on data: a function for each, by `@handles`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from math import inf, isinf
from typing import Any

import jax.numpy as jnp
import torch
import torch.nn.functional as F

from bridge._compat.jax import same_values
from bridge.context import current
from bridge.symbolic.bytecode import only_writes
from bridge.symbolic.numbers import as_operand
from bridge.symbolic.places import is_traced_number, places_of
from bridge.symbolic.ranges import distance
from bridge.symbolic.rows import (
    LENGTH_REMEDY,
    ONE_MASK,
    Rows,
    elementwise,
    handles,
    ranks,
    refused,
    rows_of,
    settled,
    whole_of,
)
from bridge.symbolic.selections import flattened, view_by_mask
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.tensor import BridgeTensor

_NEUTRAL: dict[str, float] = {
    "sum": 0, "mean": 0, "prod": 1, "any": 0, "all": 1, "logsumexp": -inf,
    "amax": -inf, "max": -inf, "amin": inf, "min": inf,
}  # fmt: skip
"""Reduction -> its neutral number."""
_LOSSES = {
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
}  # fmt: skip
"""Losses of each element."""
_LAST_DIM = {F.linear, F.layer_norm, F.rms_norm}
"""Functions that act on the last dimensions of each row."""
_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}
_WITHIN_ROWS = (
    "softmax",
    "log_softmax",
    "cumsum",
    "cumprod",
    "argmax",
    "argmin",
    "sort",
    "argsort",
    "topk",
    "std",
    "var",
)
"""Names of functions along one dimension, which each row has for itself if it is not that of the rows."""
_ALONG_ROWS = {"softmax": -inf, "log_softmax": -inf, "cumsum": 0, "cumprod": 1, "argmax": -inf, "argmin": inf}
"""Those that are computed along the rows, too -> what the rows that the mask leaves out are then."""
WHOLE = {F.cross_entropy, F.ctc_loss, F.embedding, F.one_hot, *_LOSSES, *_LAST_DIM, *_PRODUCTS}
"""Functions with a lowering of their own, which would see all rows, and with a handler here."""
_LOOP_REMEDY = "loop over all places, with torch.where(mask[i]) for the rows of each"


def _named(*names: str) -> set:
    """Returns the functions of these names, in `torch` and of tensors, those that write in place among them."""
    owners = (torch, torch.Tensor)
    return {getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)}


def _dim_of(rows: Rows, dim: int) -> int:
    """Returns the number of a dimension of rows, counted from the first one. Raises PyTorch's `IndexError`."""
    dims = rows.whole.dim()
    if not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")
    return dim % dims


# ---- facts


@handles(torch.Tensor.size)
def _size(_func: Any, rows: Rows, dim: int | None = None) -> Any:
    if dim is None:
        return rows.shape
    return rows.shape[dim]


@handles(*_named("dim", "ndimension"), torch.Tensor.ndim.__get__)  # pyright: ignore[reportAttributeAccessIssue]
def _dims(_func: Any, rows: Rows) -> int:
    return rows.whole.dim()


@handles(*_named("numel", "nelement"))
def _numel(_func: Any, rows: Rows) -> Any:
    return math.prod(rows.shape)


@handles(*_named("is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "is_same_size"))
def _fact(func: Any, rows: Rows) -> Any:
    return func(rows.whole)


@handles(torch.Tensor.__len__)
def _len(_func: Any, rows: Rows) -> int:
    """Python insists on an integer here; converted code asks for the size instead."""
    number = as_operand(rows.shape[0])
    call = current()
    if call is None or not isinstance(number, torch.Tensor):
        return int(number)
    return call.value_for_python(number)


# ---- views: the dimensions change, and with them that of the rows


@handles(torch.Tensor.contiguous)
def _contiguous(_func: Any, rows: Rows, **_settings: Any) -> Rows:
    return rows


@handles(*_named("clone"))
def _clone(_func: Any, rows: Rows, **_settings: Any) -> Rows:
    return rows.like(rows.whole.clone())


@handles(*_named("unsqueeze"))
def _unsqueeze(_func: Any, rows: Rows, dim: int) -> Rows:
    place = dim % (rows.whole.dim() + 1)
    return rows.like(rows.whole.unsqueeze(place), rows.first + (place <= rows.first))


@handles(*_named("squeeze"))
def _squeeze(_func: Any, rows: Rows, dim: Any = None) -> Rows:
    if not isinstance(dim, int) or _dim_of(rows, dim) == rows.first:
        raise rows.refused("`squeeze` but of a dimension that is not that of the rows")
    place = _dim_of(rows, dim)
    removed = rows.whole.shape[place] == 1
    return rows.like(rows.whole.squeeze(place), rows.first - (removed and place < rows.first))


def _permuted(rows: Rows, order: list[int]) -> Rows:
    return rows.like(rows.whole.permute(order), order.index(rows.first))


@handles(*_named("transpose", "swapaxes", "swapdims"))
def _transpose(_func: Any, rows: Rows, dim0: int, dim1: int) -> Rows:
    order = [*range(rows.whole.dim())]
    one = _dim_of(rows, dim0)
    other = _dim_of(rows, dim1)
    order[one] = other
    order[other] = one
    return _permuted(rows, order)


@handles(*_named("t"), torch.Tensor.T.__get__)  # pyright: ignore[reportAttributeAccessIssue]
def _t(_func: Any, rows: Rows) -> Rows:
    return _permuted(rows, [*range(rows.whole.dim())][::-1])


@handles(*_named("permute"))
def _permute(_func: Any, rows: Rows, *dims: Any) -> Rows:
    order = dims if isinstance(dims[0], int) else dims[0]
    return _permuted(rows, [_dim_of(rows, dim) for dim in order])


@handles(*_named("flatten"))
def _flatten(_func: Any, rows: Rows, start_dim: int = 0, end_dim: int = -1) -> Rows:
    start = _dim_of(rows, start_dim)
    end = _dim_of(rows, end_dim)
    sizes = [*rows.shape]
    sizes[start : end + 1] = [math.prod(sizes[start : end + 1])]
    if start <= rows.first <= end:
        sizes[start] = -1
    return _reshape(torch.Tensor.reshape, rows, *sizes)


@handles(torch.Tensor.view, torch.reshape, torch.Tensor.reshape)
def _reshape(_func: Any, rows: Rows, *sizes: Any) -> Rows:
    """Reshapes what is before the rows and what is behind them; a row may become several rows."""
    if isinstance(sizes[0], torch.dtype):
        return rows.like(rows.whole.view(sizes[0]))
    if isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    ours = [i for i, size in enumerate(sizes) if _is_number_of_rows(size)]
    if len(ours) != 1:
        raise rows.refused("`reshape` to sizes of which not one alone is the number of rows or -1")
    place = ours[0]
    before = math.prod(rows.whole.shape[: rows.first])
    behind = math.prod(rows.whole.shape[rows.first + 1 :])
    parts, rest = divmod(behind, max(math.prod(sizes[place + 1 :]), 1))
    if math.prod(sizes[:place]) != before or rest or not parts:
        raise rows.refused("`reshape` but of what is before the rows, or behind them,")
    whole = rows.whole.reshape(*sizes[:place], len(rows.mask) * parts, *sizes[place + 1 :])
    if parts == 1:
        return rows.like(whole, place)
    mask = rows.mask[:, None].expand(-1, parts).flatten()
    return rows_of(whole, mask, place, rows.made, None if rows.length is None else rows.length * parts)


def _is_number_of_rows(size: Any) -> bool:
    """True for a traced size and for -1, which PyTorch computes from the number of rows."""
    return isinstance(as_operand(size), torch.Tensor) or size == -1


@handles(torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to, torch.Tensor.broadcast_to)
def _expand(func: Any, rows: Any, *sizes: Any) -> Rows:
    if isinstance(sizes[0], (tuple, list, torch.Tensor)) and not is_traced_number(sizes[0]):
        sizes = tuple(sizes[0].shape if isinstance(sizes[0], torch.Tensor) else sizes[0])
    if type(rows) is not Rows:
        raise refused(f"`{func.__name__}`")
    first = len(sizes) - 1 - rows.behind
    if first < 0 or not _is_number_of_rows(sizes[first]):
        raise rows.refused("`expand` of the rows")
    return rows.like(rows.whole.expand(*sizes[:first], len(rows.mask), *sizes[first + 1 :]), first)


@handles(*_named("tile"), torch.Tensor.repeat)
def _repeat(func: Any, rows: Rows, *times: Any) -> Rows:
    if isinstance(times[0], (tuple, list)):
        times = tuple(times[0])
    first = len(times) - 1 - rows.behind
    if first < 0 or times[first] != 1:
        raise rows.refused(f"`{func.__name__}` of the rows")
    return rows.like(rows.whole.repeat(*times), first)


@handles(*_named("flip"))
def _flip(_func: Any, rows: Rows, *dims: Any) -> Rows:
    places = [_dim_of(rows, dim) for dim in (dims if isinstance(dims[0], int) else dims[0])]
    if rows.first in places:
        raise rows.refused("`flip` along the rows")
    return rows.like(rows.whole.flip(places))


@handles(*_named("unbind"))
def _unbind(_func: Any, rows: Rows, dim: int = 0) -> tuple[Rows, ...]:
    place = _dim_of(rows, dim)
    if place == rows.first:
        raise rows.refused("`unbind` of the rows", _LOOP_REMEDY)
    return tuple(rows.like(part, rows.first - (place < rows.first)) for part in rows.whole.unbind(place))


@handles(*_named("chunk", "split", "tensor_split"))
def _parts(func: Any, rows: Rows, size: Any, dim: int = 0) -> tuple[Rows, ...]:
    if _dim_of(rows, dim) == rows.first:
        raise rows.refused(f"`{func.__name__}` along the rows")
    return tuple(rows.like(part) for part in func(rows.whole, size, dim))


@handles(*_named("tril"))
def _tril(_func: Any, rows: Rows, diagonal: Any = 0) -> Rows:
    """The elements that remain do not depend on the length."""
    if rows.length is None:
        raise rows.refused("`tril`")
    lines, columns = map(torch.arange, rows.whole.shape[-2:])
    return rows.like(rows.whole.masked_fill(columns - lines[:, None] > diagonal, 0))


@handles(torch.Tensor.__iter__)
def _iterate(_func: Any, rows: Rows) -> Iterator[torch.Tensor]:
    """Iterates over what is before the rows, or over all rows; the turn of one that is not selected writes nothing."""
    if rows.first:
        return iter(_unbind(torch.unbind, rows))
    return _turns(rows)


def _turns(rows: Rows) -> Iterator[torch.Tensor]:
    call = current()
    if call is None or not only_writes(sys._getframe(1), rows):  # runs when the loop asks for its first row
        raise rows.refused("a loop that does anything else than write into tensors", _LOOP_REMEDY)
    outer = call.condition
    for row, selected in zip(rows.whole.unbind(), rows.mask.unbind(), strict=True):
        call.condition = selected if outer is None else selected & outer
        try:
            yield row
        finally:
            call.condition = outer


# ---- several tensors


@handles(torch.cat, torch.concat, torch.concatenate)
def _cat(func: Any, tensors: Any, dim: int = 0) -> Rows:
    rows = next(each for each in tensors if type(each) is Rows)
    place = _dim_of(rows, dim)
    if place != rows.first:
        wholes = [whole_of(rows, each, f"`{func.__name__}`") for each in tensors]
        return rows.like(torch.cat(wholes, place))
    if any(type(each) is Rows and each.first != place for each in tensors):
        raise rows.refused(f"`{func.__name__}` of rows in different dimensions")
    parts = [each.whole if type(each) is Rows else each for each in tensors]
    masks = [each.mask if type(each) is Rows else torch.ones(each.shape[place], dtype=torch.bool) for each in tensors]
    return rows_of(torch.cat(parts, place), torch.cat(masks), place, rows.made)


@handles(torch.stack)
def _stack(func: Any, tensors: Any, dim: int = 0) -> Rows:
    rows = next(each for each in tensors if type(each) is Rows)
    if any(type(each) is not Rows or each.first != rows.first for each in tensors):
        raise rows.refused("`stack` beside a tensor with rows of its own")
    wholes = [whole_of(rows, each, f"`{func.__name__}`") for each in tensors]
    place = dim % (rows.whole.dim() + 1)
    return rows.like(torch.stack(wholes, place), rows.first + (place <= rows.first))


# ---- reductions, and functions along a dimension


@handles(*_named(*_NEUTRAL))
def _reduction(func: Any, rows: Any, *rest: Any, **settings: Any) -> Any:
    if type(rows) is not Rows or any(isinstance(each, torch.Tensor) for each in rest):
        return elementwise(func, (rows, *rest), settings)
    return _reduced(rows, func.__name__, *rest, **settings)


def _reduced(rows: Rows, name: str, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Reduces each row by itself, over the rows, or everything that is selected."""
    reduce = getattr(torch, name)
    settings = {} if dtype is None else {"dtype": dtype}
    size = rows.whole.dim()
    if dim is None:
        dims = [*range(size)]
    else:
        dims = [_dim_of(rows, d) for d in (dim if isinstance(dim, (tuple, list)) else [dim])]
    given = () if dim is None else (dim, keepdim)
    if rows.first not in dims:
        result = reduce(rows.whole, dims if len(dims) > 1 else dims[0], keepdim, **settings)
        first = rows.first - (0 if keepdim else sum(d < rows.first for d in dims))
        if isinstance(result, torch.Tensor):
            return settled(rows.like(result, first))
        return type(result)([settled(rows.like(part, first)) for part in result])
    fill = _number(_NEUTRAL[name], rows.dtype)
    whole = rows.only(fill)
    if name == "mean":
        return _mean(rows, whole, dims, given, dtype)
    if name in ("max", "min") and given:
        return _extreme(rows, name, whole, fill, dims[0], keepdim)
    return reduce(whole, *given, **settings)


def _number(number: float, dtype: torch.dtype) -> float:
    """Returns a number of a dtype that is as large or as small as infinity."""
    if not isinf(number) or dtype.is_floating_point:
        return number
    if dtype == torch.bool:
        return number > 0
    ends = jnp.iinfo(jax_dtype(dtype))
    return int(ends.min if number < 0 else ends.max)


def _mean(rows: Rows, whole: torch.Tensor, dims: list[int], given: tuple, dtype: Any) -> torch.Tensor:
    dtype = dtype or rows.dtype
    torch.ones(1, dtype=dtype).mean()  # raises PyTorch's error for integers
    count = rows.mask.sum() * math.prod(whole.shape[d] for d in dims if d != rows.first)
    total = whole.to(dtype).sum(*given, dtype=torch.promote_types(dtype, torch.float32))
    return (total / count).to(dtype)


def _extreme(rows: Rows, name: str, whole: torch.Tensor, fill: float, dim: int, keepdim: bool) -> Any:
    """Reduces along the rows, with the place among the selected ones; the first one if all of them are `fill`."""
    result = getattr(torch, name)(whole, dim, True)
    place = torch.where(result.values == fill, rows.mask.to(torch.uint8).argmax(), result.indices)
    found = whole.gather(dim, place), ranks(rows.mask)[place]
    return type(result)(found if keepdim else [each.squeeze(dim) for each in found])


@handles(*_named(*_WITHIN_ROWS), F.softmax, F.log_softmax)
def _along(func: Any, rows: Rows, *args: Any, **kwargs: Any) -> Any:
    """Runs a function along one dimension of each row, or along the rows."""
    name = func.__name__
    place = 1 if name == "topk" else 0
    default = -1 if name in ("sort", "argsort", "topk") else None
    given = kwargs.get("dim", args[place] if len(args) > place else default)
    if not isinstance(given, int):
        raise rows.refused(f"`{name}` without one dimension")
    dim = _dim_of(rows, given)
    if dim != rows.first:
        return _of_each(rows, func(rows.whole, *args, **kwargs), dim)
    if name not in _ALONG_ROWS:
        raise rows.refused(f"`{name}` along the rows")
    result = func(rows.only(_number(_ALONG_ROWS[name], rows.dtype)), *args, **kwargs)
    if name in ("argmax", "argmin"):
        return ranks(rows.mask)[result]
    return rows.like(result)


def _of_each(rows: Rows, result: Any, dim: int) -> Any:
    """Returns the rows of what a function along another dimension has made of all rows."""
    if not isinstance(result, torch.Tensor):
        return type(result)([_of_each(rows, part, dim) for part in result])
    removed = result.dim() < rows.whole.dim()
    return settled(rows.like(result, rows.first - (removed and dim < rows.first)))


# ---- layers and losses


@handles(*_LAST_DIM)
def _last_dim(func: Any, rows: Any, other: Any, *rest: Any, **kwargs: Any) -> Rows:
    """Runs a layer that does not reach the rows: a product with a matrix, or a normalization."""
    tensors = [value for value in (other, *rest, *kwargs.values()) if type(value) is Rows]
    if type(rows) is not Rows or tensors:
        return elementwise(func, (rows, other, *rest), kwargs)
    if isinstance(other, (tuple, list)):
        reached = len(other)
    else:
        reached = 1 if other.dim() == 2 else math.inf
    if reached > rows.behind:
        raise rows.refused(f"`{func.__name__}`")
    return settled(rows.like(func(rows.whole, other, *rest, **kwargs)))


@handles(*_PRODUCTS)
def _product(func: Any, one: Any, other: Any) -> Rows:
    """Multiplies each row by a matrix, or by the matrix of the same row."""
    rows = one if type(one) is Rows else other
    reaches = rows.behind < (2 if type(one) is type(other) or rows is other else 1)
    if reaches or (type(one) is not type(other) and (rows is other or other.dim() != 2)):
        raise rows.refused(f"`{func.__name__}`")
    wholes = [whole_of(rows, each, f"`{func.__name__}`") if type(each) is Rows else each for each in (one, other)]
    return settled(rows.like(func(*wholes)))


@handles(*_LOSSES)
def _loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    reduction = kwargs.get("reduction", "mean")
    name = f"`{func.__name__}`"
    rows = next(each for each in (*args, *kwargs.values()) if type(each) is Rows)
    given = {key: whole_of(rows, value, name) for key, value in kwargs.items()} | {"reduction": "none"}
    each = settled(rows.like(func(*(whole_of(rows, value, name) for value in args), **given)))
    if reduction == "none":
        return each
    return _reduced(each, reduction)


@handles(F.cross_entropy)
def _cross_entropy(_func: Any, logits: Any, target: Any, weight: Any = None, *rest: Any, **kwargs: Any) -> torch.Tensor:
    """The targets are classes for each row; rows that are not selected are ignored."""
    rows = logits if type(logits) is Rows else target
    alike = type(target) is Rows and type(logits) is Rows and logits.selects_as(target)
    if (
        not alike
        or target.whole.dim() != 1
        or logits.whole.dim() != 2
        or logits.first
        or rest
        or target.dtype.is_floating_point
        or kwargs.get("reduction") == "none"
    ):
        raise rows.refused("`cross_entropy` but of rows of logits and their classes,")
    ignored = target.only(kwargs.get("ignore_index", -100))
    return F.cross_entropy(logits.only(1), ignored, weight, **kwargs)


@handles(F.ctc_loss)
def _ctc_loss(_func: Any, scores: Any, targets: Any, input_lengths: Any, lengths: Any, **settings: Any) -> torch.Tensor:
    """The targets are rows of labels, padded anywhere; the lengths are the numbers selected in each row."""
    rows = next(each for each in (targets, scores, input_lengths, lengths) if type(each) is Rows)
    origin: Any = rows.origin
    is_counted = rows is targets and getattr(origin, "ndim", 0) == 2 and not rows.behind
    if not is_counted or type(lengths) is not BridgeTensor or not same_values(lengths.value, origin.sum(-1).value):
        raise rows.refused("`ctc_loss` but of labels[mask] whose lengths are mask.sum(-1)")
    first = torch.argsort((~origin).to(torch.uint8), dim=-1, stable=True)
    labels = rows.whole.reshape(origin.shape)
    return F.ctc_loss(scores, labels.gather(1, first), input_lengths, lengths, **settings)


@handles(F.one_hot)
def _one_hot(_func: Any, rows: Rows, num_classes: int = -1) -> Rows:
    if num_classes == -1:
        raise rows.refused("`one_hot` without a number of classes", "give num_classes")
    return rows.like(F.one_hot(rows.whole, num_classes))


@handles(F.embedding)
def _embedding(_func: Any, rows: Any, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Rows:
    if type(rows) is not Rows or type(weight) is Rows:
        raise refused("`embedding` by a table of rows")
    whole = F.embedding(rows.only(0), weight, *args, **kwargs)
    return settled(rows.like(whole, rows.first))


# ---- tensors of the size of rows


@handles(*_named("zeros_like", "ones_like", "full_like", "empty_like"))
def _filled_like(func: Any, rows: Rows, *args: Any, **kwargs: Any) -> Rows:
    return rows.like(func(rows.whole, *args, **kwargs))


@handles(torch.Tensor.new_ones, torch.Tensor.new_zeros, torch.Tensor.new_full, torch.Tensor.new_tensor)
def _new(func: Any, rows: Rows, *args: Any, **kwargs: Any) -> Any:
    return func(rows.whole, *args, **kwargs)


# ---- rows as indices


@handles(torch.Tensor.__getitem__)
def _get_item(func: Any, tensor: Any, index: Any) -> Any:
    places = places_of(index)
    if type(tensor) is Rows:
        return _of_rows(tensor, places)
    return _at_places(tensor, places)


def _of_rows(rows: Rows, places: tuple) -> Rows:
    """Returns `rows[…]` by slices, integers and None, with `:` or a mask of rows at the place of the rows."""
    taken = sum(place is not None and place is not Ellipsis for place in places)
    others = [slice(None)] * (rows.whole.dim() - taken)
    if not any(place is Ellipsis for place in places):
        places = (*places, Ellipsis)
    index: list[Any] = []
    for place in places:
        index += others if place is Ellipsis else [place]
    first = dim = 0
    mask = rows.mask
    for i, place in enumerate(index):
        if dim == rows.first and place is not None:
            mask = mask & _mask_of_rows(rows, place)
            index[i] = slice(None)
            first = sum(not isinstance(each, (int, torch.Tensor)) for each in index[:i])
        elif isinstance(place, torch.Tensor) and not is_traced_number(place):
            raise rows.refused("an index beside the rows")
        dim += place is not None
    whole = rows.whole[tuple(index)]
    if not any(type(place) is Rows for place in places):
        return rows.like(whole, first)
    return settled(rows_of(whole, mask, first, rows.made))


def _mask_of_rows(rows: Rows, place: Any) -> torch.Tensor:
    if isinstance(place, slice) and place == slice(None):
        return rows.mask
    if type(place) is Rows and place.dtype == torch.bool and place.whole.dim() == 1 and place.selects_as(rows):
        return place.whole
    raise rows.refused("an index of the rows")


def _at_places(tensor: torch.Tensor, places: tuple) -> Rows:
    """Returns `tensor[…]` for adjacent rows of integers by one mask, among None and slices."""
    at = [i for i, each in enumerate(places) if type(each) in (Rows, int)]
    rows = next(each for each in places if type(each) is Rows)
    alike = all(type(each) is not Rows or _fits(rows, each) for each in places)
    adjacent = at[-1] - at[0] == len(at) - 1
    others = (each for i, each in enumerate(places) if i not in at)
    if not alike or not adjacent or not all(p is None or p is Ellipsis or isinstance(p, slice) for p in others):
        raise rows.refused("an index beside others")
    if rows.dtype == torch.bool:
        raise rows.refused("a mask of rows as an index of another tensor")
    whole = tensor[tuple(each.only(0) if type(each) is Rows else each for each in places)]
    first = _before(tensor, places, at[0]) + rows.first
    return settled(rows_of(whole, rows.mask, first, rows.made, rows.length, rows.origin))


def _fits(rows: Rows, other: Rows) -> bool:
    return other.whole.shape == rows.whole.shape and other.first == rows.first and rows.selects_as(other)


def _before(tensor: torch.Tensor, places: tuple, at: int) -> int:
    """Returns the number of dimensions of `tensor[places]` before those of the index `at`."""
    ahead = places[:at]
    if not any(place is Ellipsis for place in ahead):
        return len(ahead)
    taken = sum(place is not None and place is not Ellipsis for place in places)
    return len(ahead) - 1 + tensor.dim() - taken


@handles(*_named("index_select"))
def _index_select(_func: Any, tensor: Any, dim: int, index: Any) -> Rows:
    if type(tensor) is Rows:
        if type(index) is Rows or _dim_of(tensor, dim) == tensor.first:
            raise tensor.refused("`index_select` of rows")
        return tensor.like(tensor.whole.index_select(dim, index))
    return _at_places(tensor, (*[slice(None)] * (dim % tensor.dim()), index))


@handles(*_named("gather", "take_along_dim"))
def _gather(func: Any, tensor: Any, dim: int, index: Any) -> Rows:
    """Takes elements of each row, or elements of a tensor by rows of places along its dimension `dim`."""
    if type(tensor) is Rows and type(index) is Rows:
        if _dim_of(tensor, dim) == tensor.first or not tensor.selects_as(index) or index.first != tensor.first:
            raise tensor.refused(f"`{func.__name__}` along the rows")
        return settled(index.like(func(tensor.whole, dim, index.only(0))))
    if type(index) is not Rows or index.first != dim % tensor.dim():
        raise (index if type(index) is Rows else tensor).refused(f"`{func.__name__}`")
    return settled(index.like(func(tensor, dim, index.only(0))))


# ---- writes


@handles(torch.Tensor.__setitem__)
def _set_item(func: Any, target: Any, index: Any, value: Any) -> None:
    """Runs `target[index] = value`, where one of them is rows or their positions."""
    if type(target) is Rows:
        return _set_part(target, places_of(index), value)
    places = places_of(index)
    rows = [each for each in places if type(each) is Rows]
    if any(each.are_places and each.origin.dim() == 1 for each in rows) and len(rows) == 1:
        # The positions of one mask differ from each other, so that the mask says the same.
        return _write(func, target, tuple(rows[0].origin if each is rows[0] else each for each in places), value)
    if rows:
        return _put(target, places, rows[0], value, accumulate=False)
    return _write(func, target, places, value)


def _set_part(rows: Rows, places: tuple, value: Any) -> None:
    """Runs `rows[:, …] = value`, which assigns a part of every row, or `rows[mask] = value` by a mask of them."""
    if len(places) == 1 and type(places[0]) is Rows:
        chosen = rows_of(rows.whole, rows.mask & _mask_of_rows(rows, places[0]), rows.first, rows.made)
        source = torch.as_tensor(whole_of(chosen, value, "an assignment"), dtype=rows.dtype)
        rows.whole.copy_(torch.where(chosen.wide(), source, rows.whole))
        return
    part = _of_rows(rows, places)
    if part.mask is not rows.mask:
        raise rows.refused("an assignment to some of the rows", "choose with torch.where")
    part.whole.copy_(torch.as_tensor(whole_of(part, value, "an assignment"), dtype=rows.dtype))


def _write(func: Any, target: torch.Tensor, index: tuple, value: Any) -> None:
    """Writes rows, or one value, where the mask among the places selects."""
    if type(value) is not Rows:
        return func(target, index, value)
    found = view_by_mask(target, index)
    if found is None or target.dtype != value.dtype:
        raise value.refused("an assignment by another mask, or of another dtype,", ONE_MASK)
    view, mask, first = found
    rows = rows_of(*flattened(view, mask, first), first, value.made)
    if value.behind != rows.behind or not rows.selects_as(value):
        raise value.refused("an assignment by another mask, or of another dtype,", ONE_MASK)
    source = value.whole.expand(rows.whole.shape).reshape(view.shape)
    view.copy_(torch.where(mask[(..., *[None] * rows.behind)], source, view))


@handles(torch.Tensor.index_put_, torch.Tensor.index_put, torch.index_put)
def _index_put(func: Any, target: Any, indices: Any, values: Any, accumulate: bool = False) -> torch.Tensor:
    rows = next((each for each in indices if type(each) is Rows), None)
    if rows is None or type(target) is Rows:
        raise refused(f"`{func.__name__}`")
    if not func.__name__.endswith("_"):
        target = target.clone()
    _put(target, tuple(slice(None) if each is None else each for each in indices), rows, values, accumulate)
    return target


def _with_one_place_more(target: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the target with a place at the end of a dimension, for rows that the mask leaves out."""
    return torch.cat([target, target.new_zeros([*target.shape[:dim], 1, *target.shape[dim + 1 :]])], dim)


def _put(target: torch.Tensor, places: tuple, rows: Rows, value: Any, accumulate: bool) -> None:
    """Writes at places, of which the last one counts where there are several; rows left out go to one place more."""
    if any(type(each) not in (Rows, slice, int) for each in places) or type(places[0]) is not Rows:
        raise rows.refused("an assignment at places beside others", "use index_add_")
    if not all(type(each) is not Rows or _fits(rows, each) for each in places) or rows.dtype == torch.bool:
        raise rows.refused("an assignment at places by two masks", "use index_add_")
    behind = target.dim() - len(places)
    if type(value) is Rows:
        if not rows.selects_as(value) or value.behind != behind + rows.behind:
            raise rows.refused("an assignment of rows by another mask", ONE_MASK)
        value = value.whole
    elif isinstance(value, torch.Tensor) and value.dim() > behind and value.shape[-1 - behind] != 1:
        raise rows.refused("an assignment of a tensor with rows of its own", "select its rows by the same mask")
    padded = _with_one_place_more(target, 0)
    given = [each.only(0) if type(each) is Rows else each for each in places]
    size = len(target)
    first = places[0].whole
    given[0] = torch.where(places[0].wide(), torch.where(first < 0, first + size, first), size)
    if accumulate:
        padded.index_put_(tuple(given), torch.as_tensor(value, dtype=target.dtype), accumulate=True)
    else:
        padded[tuple(given)] = value
    target.copy_(padded[:size])


@handles(*_named("index_add", "index_add_"))
def _index_add(func: Any, target: torch.Tensor, dim: int, index: Any, source: Any, **kwargs: Any) -> torch.Tensor:
    """Adds rows at rows of places; those that the mask leaves out add 0."""
    rows = source if type(source) is Rows else index
    alike = type(index) is Rows and type(source) is Rows and source.selects_as(index)
    if not alike or index.whole.dim() != 1 or source.first != dim % target.dim():
        raise rows.refused(f"`{func.__name__}` but of rows at their positions")
    return func(target, dim, index.only(0), source.only(0), **kwargs)


@handles(*_named("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"))
def _scatter(func: Any, target: Any, dim: int, index: Any, src: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Scatters rows along their dimension; those that the mask leaves out go to one place more."""
    src = kwargs.pop("value", src)
    rows: Any = index if type(index) is Rows else src
    alike = type(src) is not Rows or (type(index) is Rows and src.selects_as(index) and src.first == index.first)
    if type(target) is Rows or type(index) is not Rows or not alike or index.first != dim % target.dim():
        raise rows.refused(f"`{func.__name__}` but of rows along their dimension")
    dim = index.first
    if isinstance(src, torch.Tensor) and type(src) is not Rows and src.dim():
        raise rows.refused(f"`{func.__name__}` of a tensor with rows of its own")
    size = target.shape[dim]
    padded = _with_one_place_more(target, dim)
    places = torch.where(index.wide(), index.whole, size)
    outside = func.__name__.removesuffix("_")
    source = src.whole if type(src) is Rows else src
    done = getattr(torch, outside)(padded, dim, places, source, *args, **kwargs).narrow(dim, 0, size)
    if func.__name__.endswith("_"):
        return target.copy_(done)
    return done


# ---- attention


@handles(F.scaled_dot_product_attention)
def _attention(
    _func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest,
) -> torch.Tensor:
    """Attends to the elements within the length. The others are made zero, because 0 times NaN is NaN."""
    if type(query) is Rows or type(key) is not Rows or type(value) is not Rows or key.length is None:
        raise refused("attention in which not keys and values alone have a traced length", LENGTH_REMEDY, "x[:n]")
    if key.behind != 1 or value.behind != 1 or not key.selects_as(value):
        raise key.refused("attention to keys and values of different lengths")
    mask = _attention_mask(attn_mask, key)
    if is_causal:
        mask = mask & torch.ones(query.shape[-2], mask.shape[-1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(
        query, key.only(0), value.only(0), attn_mask=mask, dropout_p=dropout_p, **rest
    )


def _attention_mask(given: Any, key: Rows) -> torch.Tensor:
    """Returns the code's mask for the whole buffer, without the part beyond the length."""
    valid = key.mask
    whole = given
    if given is None:
        return valid[None]
    if type(given) is Rows and not given.behind and distance(given.length, key.length) == 0:
        whole = F.pad(given.whole, (0, len(valid) - given.whole.shape[-1]))
    elif type(given) is Rows or given.shape[-1] != 1:
        raise key.refused("attention with a mask of another length")
    if whole.dtype == torch.bool:
        return whole & valid
    return torch.where(valid, whole, float("-inf"))
