"""Elements picked by an index, which may pick one of them many times: its gradient is a sum, added in float32."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from bridge.internals import torchax_gather
from bridge.lowerings.registry import lowers, widened

aten = torch.ops.aten


def _picked(pick: Callable, x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    """`pick(x, dim, index)`, which is linear in `x`."""
    narrow = x.dtype in (jnp.bfloat16, jnp.float16)
    return _picked_of_narrow(pick, dim, x, index) if narrow else pick(x, dim, index)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _picked_of_narrow(pick: Callable, dim: int, x: jax.Array, index: jax.Array) -> jax.Array:
    return pick(x, dim, index)


@_picked_of_narrow.defjvp
def _picked_of_narrow_jvp(pick, dim, primals, tangents):
    """Only the transpose of this tangent is compiled for a gradient: the sum in float32, rounded once."""
    (x, index), (dx, _) = primals, tangents
    return _picked_of_narrow(pick, dim, x, index), pick(widened(dx), dim, index).astype(x.dtype)


def _slices(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    return jnp.take(x, jnp.reshape(index, -1), dim)


@lowers(aten.index_select.default)
def index_select(x, dim, index):
    """An index without dimensions selects one slice and leaves the dimension."""
    return _picked(_slices, x, dim, index) if x.ndim else x


@lowers(aten.gather.default)
def gather(x, dim, index):
    return _picked(torchax_gather, x, dim, index)
