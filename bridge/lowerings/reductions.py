"""Reductions, selections and scans, with PyTorch's gradient at ties, at zero, at infinities and beside nan.

Under `jit`, XLA may compute the entries a second time, with different rounding, to compare them with their maximum, and
then none may be equal to it. So the position of the maximum is computed, too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.lowerings.creation import to_copy
from bridge.lowerings.elementwise import absolute
from bridge.lowerings.indexing import picked
from bridge.lowerings.registry import lowers, widened
from bridge.tensor.arrays import jax_dtype

aten = torch.ops.aten


def _place_of(reduce: Callable, x: jax.Array, axes: tuple[int, ...]) -> jax.Array | None:
    """Returns a mask of the largest or smallest entry along the axes; None for other reductions."""
    argument = {jnp.max: jnp.argmax, jnp.min: jnp.argmin}.get(reduce)
    if argument is None or not x.size:
        return None
    ordered = sorted(axes)
    last = jnp.moveaxis(x, ordered, range(x.ndim - len(ordered), x.ndim))
    place = argument(jnp.reshape(last, (*last.shape[: x.ndim - len(ordered)], -1)), -1)
    place, index = jnp.expand_dims(place, ordered), jnp.zeros((), place.dtype)
    for axis in ordered:
        index = index * x.shape[axis] + jax.lax.broadcasted_iota(place.dtype, x.shape, axis)
    return index == place


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def extreme(x: jax.Array, reduce: Callable, axes: tuple[int, ...], nan: bool) -> jax.Array:
    """Keeps the reduced dimensions."""
    return reduce(x, axes, keepdims=True)


@extreme.defjvp
def _extreme_jvp(reduce, axes, nan, primals, tangents):
    """Equal entries share the gradient. `nan`: whether nan equals itself; otherwise its share is 0 / 0."""
    (x,) = primals
    (dx,) = tangents
    out = extreme(x, reduce, axes, nan)
    same = x == out
    place = _place_of(reduce, x, axes)
    if place is not None:
        same = same | (place & ~jnp.isnan(out))
    if nan:
        same = same | (jnp.isnan(x) & jnp.isnan(out))
    count = jnp.sum(same, axes, keepdims=True).astype(x.dtype)
    share = jnp.where(same, 1 / count, jnp.where(count == 0, jnp.nan, 0)).astype(x.dtype)  # XLA computes 0 for 0 / 0
    return out, jnp.sum(dx * share, axes, keepdims=True)


def _reduced(x, dim=(), keepdim=False, *, reduce, nan=False):
    axes = tuple(d % x.ndim for d in dim) if dim else tuple(range(x.ndim))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, axes, keepdims=keepdim)
    out = extreme(x, reduce, axes, nan)
    if keepdim:
        return out
    return jnp.squeeze(out, axes)


lowers(aten.amax.default)(functools.partial(_reduced, reduce=jnp.max))
lowers(aten.amin.default)(functools.partial(_reduced, reduce=jnp.min))
lowers(aten.max.default)(functools.partial(_reduced, reduce=jnp.max, nan=True))
lowers(aten.min.default)(functools.partial(_reduced, reduce=jnp.min, nan=True))


def _picked(x: jax.Array, index: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    values = jnp.take_along_axis(x, index, dim)
    if keepdim:
        return (values, index)
    return (jnp.squeeze(values, dim), jnp.squeeze(index, dim))


def _extreme_along(x, dim, keepdim=False, *, place):
    """Among equal entries the first has the index and the whole gradient; `amax` shares it."""
    return _picked(x, place(x, dim, keepdims=True), dim, keepdim)


lowers(aten.max.dim)(functools.partial(_extreme_along, place=jnp.argmax))
lowers(aten.min.dim)(functools.partial(_extreme_along, place=jnp.argmin))


def _middle(x: jax.Array, dim: int, skip_nan: bool) -> jax.Array:
    """Returns the place of the lower of the two middle entries, or of the first nan unless nans are skipped."""
    order = jnp.argsort(x, dim, stable=True)
    size = x.shape[dim]
    count = jnp.sum(~jnp.isnan(x), dim, keepdims=True)  # nan is sorted last
    if skip_nan:
        middle = jnp.maximum(count - 1, 0) // 2
    else:
        middle = jnp.where(count < size, count, (size - 1) // 2)
    return jnp.take_along_axis(order, middle, dim)


def _median_along(x, dim=-1, keepdim=False, *, skip_nan):
    return _picked(x, _middle(jax.lax.stop_gradient(x), dim, skip_nan), dim, keepdim)


def _median_of_all(x: jax.Array, *, skip_nan: bool) -> jax.Array:
    """Equal entries share the gradient."""
    if not x.size:
        return jnp.full((), jnp.nan, x.dtype)

    def value(x: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
        flat = jnp.ravel(x)
        return jnp.reshape(flat[_middle(flat, 0, skip_nan)], (1,) * x.ndim if keepdims else ())

    return _reduced(x, reduce=value, nan=True)


for _skip_nan, _packet in ((False, aten.median), (True, aten.nanmedian)):
    lowers(_packet.dim)(functools.partial(_median_along, skip_nan=_skip_nan))
    lowers(_packet.default)(functools.partial(_median_of_all, skip_nan=_skip_nan))


@lowers(aten.kthvalue.default)
def kthvalue(x, k, dim=-1, keepdim=False):
    order = jnp.argsort(jax.lax.stop_gradient(x), dim)
    return _picked(x, jax.lax.slice_in_dim(order, k - 1, k, axis=dim), dim, keepdim)


@lowers(aten.mode.default)
def mode(x, dim=-1, keepdim=False):
    """Returns the smallest of the most frequent values, and its last place."""
    fixed = jax.lax.stop_gradient(x)
    value = jax.scipy.stats.mode(fixed, axis=dim % x.ndim, keepdims=True)[0]
    last = x.shape[dim] - 1 - jnp.argmax(jnp.flip(fixed == value, dim), dim, keepdims=True)
    return _picked(x, last, dim, keepdim)


@lowers(aten.sort.default, aten.sort.stable)
def sort(x, dim=-1, descending=False, *, stable=None):
    """If `stable`, equals keep their order, in a descending sort, too; nan is larger than all."""
    order = jnp.argsort(jax.lax.stop_gradient(x), dim, stable=bool(stable), descending=bool(descending))
    return _picked(x, order, dim, keepdim=True)


@lowers(aten.topk.default)
def topk(x, k, dim=-1, largest=True, sorted=True):
    """Treats nan as larger than all. Integers are reversed by their complement, which works for the smallest, too."""
    fixed = jnp.moveaxis(jax.lax.stop_gradient(x), dim, -1)
    if largest or jnp.issubdtype(x.dtype, jnp.integer):
        places = jax.lax.top_k(fixed if largest else ~fixed, k)[1]
    else:
        places = jnp.argsort(fixed)[..., :k]
    return _picked(x, jnp.moveaxis(places, -1, dim), dim, keepdim=True)


def _running(x, dim, *, scan):
    """Takes values by index, so that the gradient goes to one entry only: the last of equal ones."""
    if not x.ndim or not x.size:
        return x, jnp.zeros(x.shape, jnp.int32)
    dim = dim % x.ndim
    wide = x.astype(jnp.int32) if x.dtype == bool else x
    extreme = scan(jax.lax.stop_gradient(wide), axis=dim)
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
    hits = (wide == extreme) | jnp.isnan(wide)
    index = jax.lax.cummax(jnp.where(hits, places, 0), axis=dim)
    return picked(lambda x, index: jnp.take_along_axis(x, index, dim), x, index), index


lowers(aten.cummax.default)(functools.partial(_running, scan=jax.lax.cummax))
lowers(aten.cummin.default)(functools.partial(_running, scan=jax.lax.cummin))


def _accumulated(x, dim, *, dtype=None, scan):
    """Computes in float32, since the roundings of all steps add up in a narrow dtype."""
    if dtype is not None:
        x = x.astype(jax_dtype(dtype))
    if not x.ndim:
        return x
    return scan(widened(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jax_dtype(torch.int64)), dim)


lowers(aten.cumsum.default)(functools.partial(_accumulated, scan=jnp.cumsum))
lowers(aten.cumprod.default)(functools.partial(_accumulated, scan=jnp.cumprod))


def _without_ones(reduce: Callable, x: jax.Array, dim: Sequence[int] | None, keepdim: bool) -> jax.Array:
    """Reduces without the dimensions of size one, with which XLA's sums on a CPU take up to 20 times as long."""
    axes = {axis % x.ndim for axis in dim} if dim and x.ndim else set(range(x.ndim))
    ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    if not ones:
        return reduce(x, tuple(axes), keepdims=keepdim)
    wide = [axis for axis in range(x.ndim) if axis not in ones]
    out = reduce(jax.lax.squeeze(x, ones), tuple(wide.index(axis) for axis in axes.difference(ones)))
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape) if keepdim or axis not in axes]
    return jnp.reshape(out, shape)


@lowers(aten.sum.default, aten.sum.dim_IntList)
def total(x, dim=None, keepdim=False, *, dtype=None):
    return _without_ones(jnp.sum, to_copy(x, dtype=dtype), dim, keepdim)


@lowers(aten.mean.default, aten.mean.dim)
def mean(x, dim=None, keepdim=False, *, dtype=None):
    if dtype is not None:
        x = x.astype(jax_dtype(dtype))
    return _without_ones(jnp.mean, x, dim, keepdim)


_LEAST = -1e30
"""Replaces the logarithm of zero among complex numbers, where JAX's sum of two such logarithms is nan."""


@lowers(aten.logcumsumexp.default)
def logcumsumexp(x, dim):
    if not x.ndim or not x.size:
        return x
    if not jnp.iscomplexobj(x):
        return jax.lax.associative_scan(jnp.logaddexp, widened(x), axis=dim % x.ndim)
    finite = jnp.where(jnp.isneginf(jnp.real(x)), _LEAST, x)
    out = jax.lax.associative_scan(jnp.logaddexp, finite, axis=dim % x.ndim)
    return jnp.where(jnp.real(out) < _LEAST / 2, -jnp.inf, out)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _variance(x: jax.Array, axes: tuple[int, ...], ddof: float) -> jax.Array:
    """Keeps the reduced dimensions. No degrees of freedom make it infinite."""
    squares = jnp.sum(jnp.square(x - jnp.mean(x, axes, keepdims=True)), axes, keepdims=True)
    return squares / jnp.asarray(max(_count(x, axes) - ddof, 0), x.dtype)


@_variance.defjvp
def _variance_jvp(axes, ddof, primals, tangents):
    """Leaves the mean out, so that entries beside an infinite one have a gradient."""
    (x,) = primals
    (dx,) = tangents
    freedom = _count(x, axes) - ddof  # PyTorch's formula also divides by negative numbers
    slope = jnp.asarray(2 / freedom if freedom else jnp.inf, x.dtype) * (x - jnp.mean(x, axes, keepdims=True))
    return _variance(x, axes, ddof), jnp.sum(dx * slope, axes, keepdims=True)


def _count(x: jax.Array, axes: tuple[int, ...]) -> int:
    return math.prod(x.shape[a] for a in axes)


def _square_root(x: jax.Array) -> jax.Array:
    """Returns the square root, with a gradient of zero at zero."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def _spread(x, dim=None, *, correction=None, keepdim=False, root, with_mean):
    """Returns variance or deviation, with zero gradient where all entries are equal; and the mean, if asked."""
    x = widened(x)
    if dim is None or dim == [] or not x.ndim:
        axes = tuple(range(x.ndim))
    else:
        axes = tuple(d % x.ndim for d in dim)
    ddof = 1 if correction is None else correction
    if jnp.iscomplexobj(x):
        var = jnp.var(x, axes, ddof=ddof, keepdims=True)
    else:
        var = _variance(x, axes, ddof)
    out = _square_root(var) if root else var
    if not keepdim:
        out = jnp.squeeze(out, axes)
    if with_mean:
        return (out, jnp.mean(x, axes, keepdims=keepdim))
    return out


for _packet, _root, _with_mean in (
    (aten.var, False, False),
    (aten.var_mean, False, True),
    (aten.std, True, False),
    (aten.std_mean, True, True),
):
    lowers(_packet.correction)(functools.partial(_spread, root=_root, with_mean=_with_mean))


@lowers(aten.linalg_vector_norm.default)
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """Its gradient at zero is zero, PyTorch's choice among the subgradients; `jnp.linalg.norm` gives NaN."""
    x = widened(x if dtype is None else x.astype(jax_dtype(dtype)))
    if dim is None or dim == [] or not x.ndim:
        axes = tuple(range(x.ndim))
    else:
        axes = tuple(dim)
    if ord == 2:  # not from absolute values, whose derivative at zero is constant
        if jnp.iscomplexobj(x):
            squares = jnp.square(x.real) + jnp.square(x.imag)
        else:
            squares = jnp.square(x)
        return _square_root(jnp.sum(squares, axes, keepdims=keepdim))
    x = absolute(x)
    if abs(ord) == float("inf"):
        return _reduced(x, axes, keepdim, reduce=jnp.max if ord > 0 else jnp.min, nan=True)
    if ord == 0:
        return jnp.sum(jax.lax.stop_gradient(x) != 0, axes, keepdims=keepdim).astype(x.dtype)
    if ord == 1:
        return jnp.sum(x, axes, keepdims=keepdim)
    at_zero = 0.0 if ord > 0 else jnp.inf
    powers = jnp.where(x == 0, at_zero, jnp.where(x == 0, 1, x) ** ord)
    total = jnp.sum(powers, axes, keepdims=keepdim)
    return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / ord))


lowers(aten.dist.default)(lambda x, y, p=2: vector_norm(x - y, p))


@lowers(aten._cdist_forward.default)
def cdist(x, y, p, _compute_mode):
    """Computes by differences, exact for close points, where PyTorch's product of large sets is not."""
    return vector_norm(x[..., :, None, :] - y[..., None, :, :], p, (-1,))


@lowers(aten._pdist_forward.default)
def pdist(x, p=2):
    first, second = np.triu_indices(x.shape[0], 1)
    return vector_norm(x[first] - x[second], p, (-1,))


@lowers(aten._euclidean_dist.default)
def euclidean_dist(x, y):
    """Returns `torch.cdist` of large sets by a matrix product. The gradient at a distance of zero is zero."""
    squares = [jnp.sum(jnp.square(each), -1, keepdims=True) for each in (x, y)]
    product = -2 * jnp.matmul(x, jnp.swapaxes(y, -1, -2))
    return _square_root(jnp.maximum(squares[0] + product + jnp.swapaxes(squares[1], -1, -2), 0))


@lowers(aten.histc.default)
def histc(x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0) -> jax.Array:
    """Finds the bins as PyTorch's kernel does, also of values at an edge; torchax compares with rounded edges."""
    values = x.ravel()
    if not values.size:
        return jnp.zeros(bins, x.dtype)
    low = jnp.asarray(min, x.dtype)
    high = jnp.asarray(max, x.dtype)
    low, high = jnp.where(low == high, values.min(), low), jnp.where(low == high, values.max(), high)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    inside = (values >= low) & (values <= high)
    width = jax.lax.optimization_barrier(jnp.full_like(values, high - low))  # XLA would multiply by 1 / width instead
    places = ((values - low) * bins / width).astype(jnp.int32)
    places = jnp.where(inside, jnp.minimum(places, bins - 1), bins)  # the last bin has its right edge, too
    return jnp.zeros(bins, x.dtype).at[places].add(1, mode="drop")
