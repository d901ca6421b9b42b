"""Elements picked by an index, which may pick one of them many times: its gradient is a sum, added in float32."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.internals import torchax_gather
from bridge.lowerings.broadcasting import NARROW
from bridge.lowerings.registry import METAS, lowers, widened

aten = torch.ops.aten


def picked(pick: Callable, x: jax.Array, index: Any) -> jax.Array:
    """`pick(x, index)`, which is linear in `x`; `index` is an array, or several."""
    return _picked_of_narrow(pick, x, index) if x.dtype in NARROW else pick(x, index)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _picked_of_narrow(pick: Callable, x: jax.Array, index: Any) -> jax.Array:
    return pick(x, index)


@_picked_of_narrow.defjvp
def _picked_of_narrow_jvp(pick, primals, tangents):
    """Only the transpose of this tangent is compiled for a gradient: the sum in float32, rounded once."""
    (x, index), (dx, _) = primals, tangents
    return _picked_of_narrow(pick, x, index), pick(widened(dx), index).astype(x.dtype)


@lowers(aten.index_select.default)
def index_select(x, dim, index):
    """An index without dimensions selects one slice and leaves the dimension."""
    return picked(lambda x, index: jnp.take(x, jnp.reshape(index, -1), dim), x, index) if x.ndim else x


@lowers(aten.take.default)
def take(x, index):
    return picked(lambda x, index: jnp.reshape(x, -1)[index], x, index)


METAS[aten.take.default] = lambda x, index: x.new_empty(index.shape)


@lowers(aten.gather.default)
def gather(x, dim, index):
    return picked(lambda x, index: torchax_gather(x, dim, index), x, index)


@lowers(aten.nonzero_static.default)
def nonzero_static(x, *, size, fill_value=-1):
    """The first `size` places, which is a shape that does not depend on data."""
    places = jnp.nonzero(jnp.atleast_1d(x), size=size, fill_value=fill_value)[: x.ndim]
    return jnp.stack(places, -1) if places else jnp.zeros((size, 0), int)
