"""Broadcasting of narrow types: the gradient is a sum over the copies, added in float32 and rounded once."""

import functools
import operator

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import lowers, widened

aten = torch.ops.aten

NARROW = (jnp.bfloat16, jnp.float16)


def broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `x` with that shape. JAX adds its gradient in the dtype of `x`: ones, in bfloat16, only up to 256."""
    if x.shape == shape or x.dtype not in NARROW:
        return jnp.broadcast_to(x, shape)
    return _broadcast_narrow(shape, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _broadcast_narrow(shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, shape)


@_broadcast_narrow.defjvp
def _broadcast_narrow_jvp(shape, primals, tangents):
    """Only the transpose of this tangent is compiled for a gradient."""
    (x,), (dx,) = primals, tangents
    return _broadcast_narrow(shape, x), jnp.broadcast_to(widened(dx), shape).astype(x.dtype)


@lowers(aten.repeat.default)
def repeat(x, repeats):
    shape = (1,) * (len(repeats) - x.ndim) + x.shape
    copies = tuple(size for sizes in zip(repeats, shape, strict=True) for size in sizes)
    apart = jnp.reshape(x, tuple(each for size in shape for each in (1, size)))
    return jnp.reshape(broadcast(apart, copies), tuple(map(operator.mul, repeats, shape)))
