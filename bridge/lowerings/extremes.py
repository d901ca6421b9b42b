"""Selections: largest, smallest, median, mode, sorted; among equals and beside nan with the gradient of PyTorch.

XLA may compute the entries again, with another rounding, where they are compared with their largest one. So none may
be equal to it, and its place is asked for as well.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import lowers

aten = torch.ops.aten


def _place_of(reduce: Callable, x: jax.Array, axes: tuple[int, ...]) -> jax.Array | None:
    """Whether an entry is at the place of the largest or smallest one along the axes; None for other reductions."""
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
    """With the reduced dimensions kept."""
    return reduce(x, axes, keepdims=True)


@extreme.defjvp
def _extreme_jvp(reduce, axes, nan, primals, tangents):
    """Equals share the gradient. `nan`: whether nan is equal to itself; otherwise its share is 0 / 0."""
    (x,), (dx,) = primals, tangents
    out = extreme(x, reduce, axes, nan)
    same, place = x == out, _place_of(reduce, x, axes)
    if place is not None:
        same = same | (place & ~jnp.isnan(out))
    if nan:
        same = same | (jnp.isnan(x) & jnp.isnan(out))
    count = jnp.sum(same, axes, keepdims=True).astype(x.dtype)
    share = jnp.where(same, 1 / count, jnp.where(count == 0, jnp.nan, 0)).astype(x.dtype)  # XLA takes 0 / 0 for 0
    return out, jnp.sum(dx * share, axes, keepdims=True)


def _reduced(x, reduce, dim, keepdim, nan=False):
    axes = tuple(d % x.ndim for d in dim) if dim else tuple(range(x.ndim))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, axes, keepdims=keepdim)
    out = extreme(x, reduce, axes, nan)
    return out if keepdim else jnp.squeeze(out, axes)


@lowers(aten.amax.default)
def amax(x, dim=(), keepdim=False):
    return _reduced(x, jnp.max, dim, keepdim)


@lowers(aten.amin.default)
def amin(x, dim=(), keepdim=False):
    return _reduced(x, jnp.min, dim, keepdim)


@lowers(aten.aminmax.default)
def aminmax(x, *, dim=None, keepdim=False):
    dim = () if dim is None else (dim,)
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


@lowers(aten.max.default)
def max_of_all(x):
    return _reduced(x, jnp.max, (), False, nan=True)


@lowers(aten.min.default)
def min_of_all(x):
    return _reduced(x, jnp.min, (), False, nan=True)


def _picked(x: jax.Array, index: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(index, dim))


@lowers(aten.max.dim)
def max_along(x, dim, keepdim=False):
    """Among equals the first has the index and the whole gradient; `amax` shares it."""
    return _picked(x, jnp.argmax(x, dim, keepdims=True), dim, keepdim)


@lowers(aten.min.dim)
def min_along(x, dim, keepdim=False):
    return _picked(x, jnp.argmin(x, dim, keepdims=True), dim, keepdim)


def _middle(x: jax.Array, dim: int, skip_nan: bool) -> jax.Array:
    """The place of the lower of the two in the middle, of the first nan if there is one and it is not to be skipped."""
    order, nan = jnp.argsort(x, dim, stable=True), jnp.isnan(x)
    count = jnp.sum(~nan, dim, keepdims=True) if skip_nan else jnp.full_like(order, x.shape[dim], shape=())
    middle = jnp.take_along_axis(order, jnp.broadcast_to(jnp.maximum(count - 1, 0) // 2, _kept(x, dim)), dim)
    return (
        middle if skip_nan else jnp.where(jnp.any(nan, dim, keepdims=True), jnp.argmax(nan, dim, keepdims=True), middle)
    )


def _kept(x: jax.Array, dim: int) -> tuple[int, ...]:
    return tuple(1 if d == dim % x.ndim else n for d, n in enumerate(x.shape))


@lowers(aten.median.dim)
def median_along(x, dim=-1, keepdim=False):
    return _picked(x, _middle(jax.lax.stop_gradient(x), dim, skip_nan=False), dim, keepdim)


@lowers(aten.nanmedian.dim)
def nanmedian_along(x, dim=-1, keepdim=False):
    return _picked(x, _middle(jax.lax.stop_gradient(x), dim, skip_nan=True), dim, keepdim)


@lowers(aten.kthvalue.default)
def kthvalue(x, k, dim=-1, keepdim=False):
    order = jnp.argsort(jax.lax.stop_gradient(x), dim)
    return _picked(x, jax.lax.slice_in_dim(order, k - 1, k, axis=dim), dim, keepdim)


def _median_of_all(x: jax.Array, skip_nan: bool) -> jax.Array:
    if not x.size:
        return jnp.full((), jnp.nan, x.dtype)

    def value(x: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
        flat = jnp.ravel(x)
        return jnp.reshape(flat[_middle(flat, 0, skip_nan)], (1,) * x.ndim if keepdims else ())

    return _reduced(x, value, (), False, nan=True)


@lowers(aten.median.default)
def median(x):
    """Equals share the gradient."""
    return _median_of_all(x, skip_nan=False)


@lowers(aten.nanmedian.default)
def nanmedian(x):
    return _median_of_all(x, skip_nan=True)


@lowers(aten.mode.default)
def mode(x, dim=-1, keepdim=False):
    """The smallest of the most frequent values, and its last place."""
    fixed = jax.lax.stop_gradient(x)
    value = jax.scipy.stats.mode(fixed, axis=dim % x.ndim, keepdims=True)[0]
    last = x.shape[dim] - 1 - jnp.argmax(jnp.flip(fixed == value, dim), dim, keepdims=True)
    return _picked(x, last, dim, keepdim)


@lowers(aten.sort.default, aten.sort.stable)
def sort(x, dim=-1, descending=False, *, stable=None):
    """Where `stable`, equals keep their order, in a descending sort, too; nan is larger than all."""
    fixed = jax.lax.stop_gradient(x)
    if not stable:
        order = jnp.argsort(fixed, dim, stable=False, descending=bool(descending))
    elif descending:
        order = x.shape[dim] - 1 - jnp.flip(jnp.argsort(jnp.flip(fixed, dim), dim, stable=True), dim)
    else:
        order = jnp.argsort(fixed, dim, stable=True)
    return _picked(x, order, dim, keepdim=True)


@lowers(aten.topk.default)
def topk(x, k, dim=-1, largest=True, sorted=True):
    """Nan is larger than all. Integers are turned round by their complement, which holds for the smallest one, too."""
    fixed = jnp.moveaxis(jax.lax.stop_gradient(x), dim, -1)
    if largest or jnp.issubdtype(x.dtype, jnp.integer):
        places = jax.lax.top_k(fixed if largest else ~fixed, k)[1]
    else:
        places = jnp.argsort(fixed)[..., :k]
    return _picked(x, jnp.moveaxis(places, -1, dim), dim, keepdim=True)
