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
    if jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.promote_types(dtype, jnp.float32)
    x, y, alpha = (converted(a, dtype) for a in (x, y, alpha))
    return x + alpha * y


@lowers(aten.mul.Tensor, aten.mul.Scalar)
@inlined
def multiply(x, y):
    x, y = wide_beside_numbers(x, y)
    return x * y


def wide_beside_numbers(x, y):
    """An array in float32 beside a Python number, which PyTorch does not round to a narrow dtype before the result."""
    if isinstance(x, float) and isinstance(y, jax.Array):
        return x, widened(y)
    return (widened(x), y) if isinstance(y, float) and isinstance(x, jax.Array) else (x, y)
