"""Elements picked and written by an index. Where one index occurs often, values are summed in float32."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._compat.torchax import torchax_embedding, torchax_index_put
from bridge.lowerings.creation import NARROW, broadcast
from bridge.lowerings.registry import BY_LAYOUT, DECOMPOSITIONS, METAS, decomposes, is_known, lowers, widened
from bridge.tensor.tensor import regraft

aten = torch.ops.aten


def picked(pick: Callable, x: jax.Array, index: Any) -> jax.Array:
    """Returns `pick(x, index)`, which is linear in `x`; `index` is an array, or several."""
    if x.dtype in NARROW:
        return _picked_of_narrow(pick, x, index)
    return pick(x, index)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _picked_of_narrow(pick: Callable, x: jax.Array, index: Any) -> jax.Array:
    return pick(x, index)


@_picked_of_narrow.defjvp
def _picked_of_narrow_jvp(pick, primals, tangents):
    """Only the transpose of this tangent is compiled for a gradient: the sum in float32, rounded once."""
    x, index = primals
    dx, _ = tangents
    return _picked_of_narrow(pick, x, index), pick(widened(dx), index).astype(x.dtype)


@lowers(aten.index_select.default)
def index_select(x, dim, index):
    """An index without dimensions selects one slice and keeps the dimension."""
    if x.ndim:
        return picked(lambda x, index: jnp.take(x, jnp.reshape(index, -1), dim), x, index)
    return x


@lowers(aten.take.default)
def take(x, index):
    return picked(lambda x, index: jnp.reshape(x, -1)[index], x, index)


METAS[aten.take.default] = lambda x, index: x.new_empty(index.shape)


@lowers(aten.nonzero_static.default)
def nonzero_static(x, *, size, fill_value=-1):
    """Returns the first `size` places, a shape that does not depend on data."""
    places = jnp.nonzero(jnp.atleast_1d(x), size=size, fill_value=fill_value)[: x.ndim]
    if places:
        return jnp.stack(places, -1)
    return jnp.zeros((size, 0), int)


Place = tuple[Any, ...]
"""The index that `x.at[…]` takes."""


def _along(index: jax.Array, dim: int, repeated: tuple[int, ...] = ()) -> Place:
    """Returns the place of each entry of `index`, which counts along `dim` and is the same all along `repeated`.

    Such dimensions are slices: XLA then moves whole rows, with one index each.
    """
    own = [each for each in range(index.ndim) if each == dim or each not in repeated]
    block = range(own[0], own[-1] + 1)  # a slice between two arrays would move the dimensions of the result
    rows = index[tuple(slice(None) if each in block else 0 for each in range(index.ndim))]
    place: list[Any] = [slice(size) for size in index.shape]
    place[block.start : block.stop] = jnp.indices(rows.shape, sparse=True)
    place[dim] = rows
    return tuple(place)


def _repeated(x: torch.Tensor, dim: int, index: torch.Tensor, *_rest: Any, **_named: Any) -> dict[str, tuple[int, ...]]:
    """Returns the dimensions in which the index was expanded, as graph networks do for the features of an edge."""
    sizes = zip(index.shape, index.stride(), strict=True)
    return {"repeated": tuple(each for each, (size, stride) in enumerate(sizes) if size > 1 and not stride)}


for _op in (aten.gather.default, aten.scatter_add.default, aten.scatter_reduce.two):
    BY_LAYOUT[_op] = _repeated


@lowers(aten.gather.default)
def gather(x, dim, index, *, repeated=()):
    if not index.size:
        return jnp.zeros(index.shape, x.dtype)
    dim = dim % max(x.ndim, 1)
    values = picked(lambda x, index: x[_along(index, dim, repeated)], jnp.atleast_1d(x), jnp.atleast_1d(index))
    return jnp.reshape(values, index.shape)


_METHODS = {"prod": "multiply", "amax": "max", "amin": "min"}
"""Methods of `x.at[…]` by PyTorch's name of a reduction."""


def _neutral(reduce: str, dtype: Any) -> Any:
    """Returns the neutral element of the reduction."""
    if reduce not in ("amax", "amin"):
        if reduce == "prod":
            return 1
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        if reduce == "amax":
            return -jnp.inf
        return jnp.inf
    if reduce == "amax":
        return jnp.iinfo(dtype).min
    return jnp.iinfo(dtype).max


def _combine(x: jax.Array, at: Place, src: jax.Array, reduce: str, include_self: bool) -> jax.Array:
    if x.dtype == bool:
        return _combine(x.astype(jnp.int32), at, src.astype(jnp.int32), reduce, include_self).astype(bool)
    if jnp.issubdtype(x.dtype, jnp.inexact):  # otherwise there are as many roundings as entries
        x = widened(x)
        src = widened(src)
    start = x
    kept = True
    if not include_self:
        kept = ~jnp.zeros(x.shape, bool).at[at].set(True)
        start = jnp.where(kept, x, _neutral(reduce, x.dtype))
    if reduce == "sum":
        return start.at[at].add(src)
    if reduce == "mean":
        total = start.at[at].add(src)
        count = jnp.maximum(int(include_self) + jnp.zeros(x.shape, x.dtype).at[at].add(1), 1)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return total / count
        return total // count
    start, fixed, fixed_src = map(jax.lax.stop_gradient, (start, x, src))
    value = getattr(start.at[at], _METHODS[reduce])(fixed_src)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return value
    slopes = _slopes_of_product if reduce == "prod" else _slopes_of_extreme
    to_self, to_src = slopes(fixed, fixed_src, value, at, start)
    return regraft(value, x * jnp.where(kept, to_self, 0) + jnp.zeros_like(x).at[at].add(src * to_src))


def _slopes_of_product(x, src, value, at, start):
    """Returns d value / d x and d value / d src; beside a factor that is zero, the slopes of all others are zero."""
    others = jnp.where(src == 0, 1, src)
    zeros = jnp.zeros_like(x).at[at].add((src == 0).astype(x.dtype))[at]
    rest = start.at[at].multiply(others)[at] / others
    return jnp.ones_like(x).at[at].multiply(src), jnp.where(zeros > (src == 0), 0, rest)


def _slopes_of_extreme(x, src, value, at, start):
    """Shares the gradient of the extreme evenly among the entries that are equal to it."""
    own = _alike(x, value)
    chosen = _alike(src, value[at])
    share = jnp.zeros_like(x).at[at].add(chosen.astype(x.dtype)) + own
    return jnp.where(own, 1 / share, 0), jnp.where(chosen, 1 / share[at], 0)


def _alike(x: jax.Array, value: jax.Array) -> jax.Array:
    """True if they are equal up to rounding: XLA may compute `x` again, and round it differently from `value`."""
    return (x == value) | (jnp.abs(x - value) <= 8 * jnp.finfo(x.dtype).eps * jnp.abs(value))


@lowers(aten.scatter_reduce.two)
def scatter_reduce(x, dim, index, src, reduce, *, include_self=True, repeated=()):
    if not index.size:
        return x
    shape = x.shape
    x = jnp.atleast_1d(x)
    index = jnp.atleast_1d(index)
    src = jnp.atleast_1d(src)
    at = _along(index, dim % x.ndim, repeated)
    return jnp.reshape(_combine(x, at, src[tuple(map(slice, index.shape))], reduce, include_self), shape)


@lowers(aten.scatter_add.default)
def scatter_add(x, dim, index, src, *, repeated=()):
    return scatter_reduce(x, dim, index, src, "sum", repeated=repeated)


@lowers(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_by(x, dim, index, src, *, reduce):
    if not isinstance(src, jax.Array):
        src = jnp.full(index.shape, src, x.dtype)
    return scatter_reduce(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@lowers(aten.index_put.default)
def index_put(x, indices, values, accumulate=False):
    if accumulate and x.dtype == bool:  # JAX cannot add bools
        return index_put(x.astype(jnp.int32), indices, values.astype(jnp.int32), True).astype(bool)
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) == 1 and given[0][1].dtype == bool and given[0][1].ndim:
        selected = _at_mask(x, *given[0], values)
        if selected is not None:
            mask, values = selected
            values = broadcast(values, x.shape)
            return jnp.where(mask, x + values if accumulate else values, x)
    if all(index.dtype != bool for _, index in given):
        places = tuple(slice(None) if index is None else index for index in indices)
        values = broadcast(values, jax.eval_shape(lambda x: x[places], x).shape)
    return torchax_index_put(x, indices, values, accumulate)


def _at_mask(x: jax.Array, dim: int, mask: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Returns mask from dimension `dim` on, and values, broadcast against `x`; None if selected rows' values differ.

    torchax assigns values in the order of the rows, even if all rows should get the same.
    """
    behind = x.ndim - dim - mask.ndim
    rows = values.ndim - behind - 1
    if rows < 0:
        wide = values.shape
    else:
        wide = (*values.shape[:rows], *(1,) * mask.ndim, *values.shape[rows + 1 :])
    if any(mine not in (1, of_x) for mine, of_x in zip(wide[::-1], x.shape[::-1], strict=False)):
        raise NotImplementedError(f"values of shape {values.shape} do not fit what the mask selects of {x.shape}")
    if rows >= 0 and values.shape[rows] != 1:
        return None
    return jnp.reshape(mask, (*mask.shape, *(1,) * behind)), jnp.reshape(values, wide)


@lowers(aten.index_reduce.default)
def index_reduce(x, dim, index, source, reduce, *, include_self=True):
    if not index.size:
        return x
    shape = x.shape
    x = jnp.atleast_1d(x)
    index = jnp.atleast_1d(index)
    dim = dim % x.ndim
    at = (slice(None),) * dim + (index,)
    source = jnp.broadcast_to(jnp.reshape(source, source.shape or (1,)), x[at].shape)
    if reduce == "add":
        reduce = "sum"
    return jnp.reshape(_combine(x, at, source, reduce, include_self), shape)


@lowers(aten.index_add.default)
def index_add(x, dim, index, source, *, alpha=1):
    if not is_known(alpha, 1):
        source = (widened(source) if jnp.issubdtype(source.dtype, jnp.inexact) else source) * alpha
    return index_reduce(x, dim, index, source, "add")


@lowers(aten.index_copy.default)
def index_copy(x, dim, index, source):
    whole = jnp.atleast_1d(x)
    index = jnp.atleast_1d(index)
    at = (slice(None),) * (dim % whole.ndim) + (index,)
    return jnp.reshape(whole.at[at].set(jnp.reshape(source, whole[at].shape)), x.shape)


def _written(view: Any, x: torch.Tensor, src: torch.Tensor, *place: Any) -> torch.Tensor:
    """Returns a copy of `x` in which `src` is written into the view at `place`."""
    out = x.clone()
    view(out, *place).copy_(src)
    return out


DECOMPOSITIONS[aten.slice_scatter.default] = functools.partial(_written, aten.slice.Tensor)
DECOMPOSITIONS[aten.diagonal_scatter.default] = functools.partial(_written, aten.diagonal.default)


@decomposes(aten.as_strided_scatter.default)
def as_strided_scatter(*args, **kwargs):
    raise NotImplementedError("PyTorch's own gradient of it is wrong; use clone(), as_strided() and copy_()")


@lowers(aten.embedding.default)
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    rows = torchax_embedding(weight, indices, padding_idx)
    if not scale_grad_by_freq:
        return rows
    count = jnp.zeros(weight.shape[0], jnp.promote_types(weight.dtype, jnp.float32)).at[indices].add(1)
    path = torchax_embedding(widened(weight), indices, padding_idx) / count[indices][..., None]
    return regraft(rows, path.astype(rows.dtype))


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(values, boundaries, *, out_int32=False, right=False):
    return searchsorted(boundaries, values, right=right)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(boundaries, values, *, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        boundaries = jnp.take_along_axis(boundaries, sorter, -1)
    values = jnp.asarray(values)
    side = "right" if right or side == "right" else "left"
    if boundaries.ndim == 1:
        return jnp.searchsorted(boundaries, values, side=side)
    if not boundaries.size or not values.size:
        return jnp.zeros(values.shape, jnp.int32)
    search = functools.partial(jnp.searchsorted, side=side)
    return jnp.vectorize(search, signature="(n),(m)->(m)")(boundaries, values)


@lowers(aten.put.default)
def put(x, index, source, accumulate=False):
    flat = index_put(jnp.reshape(x, -1), [jnp.reshape(index, -1)], jnp.reshape(source, -1), accumulate)
    return jnp.reshape(flat, x.shape)


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(gradient, mask, sizes):
    """Returns the gradient of the source, whose first elements went to the true places of the mask, in order."""
    flat = jnp.reshape(jnp.broadcast_to(mask, gradient.shape), -1)
    size = math.prod(sizes)
    place = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, size)
    return jnp.reshape(jnp.zeros(size, gradient.dtype).at[place].set(jnp.reshape(gradient, -1), mode="drop"), sizes)


def _places_of_largest(rows: torch.Tensor, bag: torch.Tensor, keep: torch.Tensor, bags: int) -> torch.Tensor:
    """Returns the place among `rows` of the largest number of each bag and column, any place for an empty bag.

    As in PyTorch's kernel, which replaces a number by a larger one, it is the first of equal numbers, and NaN only
    where it comes first.
    """
    size = len(rows)
    positions = torch.arange(size)
    in_bag = bag.unsqueeze(1).expand(rows.shape)
    numbers = keep.unsqueeze(1) & ~rows.isnan()
    filled = torch.where(numbers, rows, float("-inf"))
    top = filled.new_full((bags, rows.shape[1]), float("-inf")).scatter_reduce(0, in_bag, filled, "amax")
    is_top = numbers & (filled == top[bag])
    ends = torch.full((bags, rows.shape[1]), size)
    places = ends.scatter_reduce(0, in_bag, torch.where(is_top, positions.unsqueeze(1), size), "amin")
    first = ends[:, 0].scatter_reduce(0, bag, torch.where(keep, positions, size), "amin").clamp(max=size - 1)
    return torch.where(rows[first].isnan(), first.unsqueeze(1), places).clamp(max=size - 1)


@decomposes(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight, indices, offsets, by_frequency=False, mode=0, _sparse=False, factors=None, with_end=False, padding_idx=-1
):
    if by_frequency:
        raise NotImplementedError("scale_grad_by_freq is not followed")
    starts = offsets[:-1] if with_end else offsets
    bag = torch.searchsorted(starts, torch.arange(indices.numel()), right=True) - 1
    if padding_idx >= 0:
        keep = indices != padding_idx
    else:
        keep = torch.ones_like(indices, dtype=torch.bool)
    count = torch.zeros(starts.numel(), dtype=torch.int64).index_add(0, bag, keep.to(torch.int64))
    if mode == 2 and len(indices):
        with torch.no_grad():
            places = _places_of_largest(weight[indices], bag, keep, len(starts))
        largest = indices[places]
        out = torch.where(count.unsqueeze(1) > 0, weight.gather(0, largest), 0)
        return out, bag, count, largest
    rows = weight[indices].to(torch.promote_types(weight.dtype, torch.float32))
    if factors is not None:
        rows = rows * factors.unsqueeze(1)
    out = rows.new_zeros(starts.numel(), weight.shape[1]).index_add(0, bag, rows * keep.unsqueeze(1))
    if mode == 1:
        out = out / count.clamp(min=1).unsqueeze(1)
    return out.to(weight.dtype), bag, count, count
