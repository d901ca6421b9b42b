"""Sums, differences and products."""

import jax
import jax.numpy as jnp
import torch

from bridge.inlining import inlined
from bridge.lowerings.custom_gradients import converted
from bridge.lowerings.registry import lowers, widened

aten = torch.ops.aten


@lowers(aten.add.Tensor, aten.add.Scalar)
@inlined
def add(x, y, alpha=1):
    return x + y if alpha == 1 else _scaled_sum(x, y, alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
@inlined
def subtract(x, y, alpha=1):
    return x - y if alpha == 1 else _scaled_sum(x, y, -alpha)


def _scaled_sum(x, y, alpha):
    """`x + alpha * y`, with the product in the dtype of the sum, or in float32 where that is narrower."""
    dtype = jnp.result_type(x, y)
    x, y, alpha = (converted(a, dtype) for a in (x, y, alpha))  # numbers, too: PyTorch rounds them first
    if jnp.issubdtype(dtype, jnp.inexact):
        x, y, alpha = widened(x), widened(y), widened(jnp.asarray(alpha))
    return x + alpha * y


@lowers(aten.mul.Tensor, aten.mul.Scalar)
@inlined
def multiply(x, y):
    x, y = wide_beside_numbers(x, y)
    return x * y


@lowers(aten.addbmm.default)
def add_batch_of_products(x, a, b, *, beta=1, alpha=1):
    """The sum over the batch in float32 where the dtype is narrower."""
    x, a, b = map(_wide_if_floating, (x, a, b))
    return _scaled_and_added(x, jnp.einsum("bij,bjk->ik", a, b), beta, alpha)


@lowers(aten.addr.default)
def add_outer_product(x, a, b, *, beta=1, alpha=1):
    x, a, b = map(_wide_if_floating, (x, a, b))
    return _scaled_and_added(x, jnp.outer(a, b), beta, alpha)


def _wide_if_floating(x):
    return widened(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _scaled_and_added(x, product, beta, alpha):
    """Where `beta` is 0, a nan in `x` does not count."""
    return alpha * product if beta == 0 else beta * x + alpha * product


def wide_beside_numbers(x, y):
    """An array in float32 beside a Python number, which PyTorch does not round to a narrow dtype before the result."""
    if isinstance(x, (int, float)) and isinstance(y, jax.Array):
        return x, _wide_if_floating(y)
    return (_wide_if_floating(x), y) if isinstance(y, (int, float)) and isinstance(x, jax.Array) else (x, y)


@lowers(aten.gcd.default)
def gcd(x, y):
    """Without signs: the smallest integer of a type has no absolute value in it, and JAX's loop does not end there."""
    dtype = jnp.promote_types(x.dtype, y.dtype)
    unsigned = jnp.dtype(f"uint{8 * dtype.itemsize}")
    return jnp.gcd(*(jnp.abs(v.astype(dtype)).astype(unsigned) for v in (x, y))).astype(dtype)
