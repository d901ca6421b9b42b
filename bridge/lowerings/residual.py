"""A sum whose gradient XLA computes once on a CPU.

The gradient of a residual stream is the sum of what all later layers add to it. On a CPU, XLA fuses this sum into each
of its consumers, so that each layer adds up the gradients of all later layers again: in the backward pass of a ViT with
12 blocks, three loops for each layer read up to 177 arrays. Other platforms get the same program as without this file.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

SMALLEST = 1 << 14
"""Number of entries from which the gradient of a sum is kept: computing a smaller one again costs little."""


def sum_of(x: Any, y: Any) -> Any:
    """Returns `x + y`. If it may be a residual stream, its gradient is an array in memory on a CPU."""
    if _may_be_residual(x, y):
        return _residual.bind(x + y, is_gradient=False)
    return x + y


def _may_be_residual(x: Any, y: Any) -> bool:
    """Returns whether these are two arrays of the same shape, as a residual stream and what a layer adds to it."""
    are_arrays = isinstance(x, jax.Array) and isinstance(y, jax.Array)
    return are_arrays and x.shape == y.shape and x.size >= SMALLEST and jnp.issubdtype(x.dtype, jnp.floating)


def _computed_once(x: jax.Array) -> jax.Array:
    """Returns `x` as the result of a conditional, which XLA fuses with nothing; it removes a barrier before it fuses.

    The other branch is never taken, because no program has 2 ** 31 replicas; XLA does not know that.
    """
    is_replica = _replica_id.bind() < np.uint32(2**31)
    return lax.cond(is_replica, lambda x: x, lax.neg, x)


def _lowered_on_a_cpu(x: jax.Array, *, is_gradient: bool) -> jax.Array:
    return _computed_once(x) if is_gradient else x


def _transposed(gradient: Any, _: Any, *, is_gradient: bool) -> list[Any]:
    return [_residual.bind(gradient, is_gradient=not is_gradient)]


_residual = Primitive("residual_sum")
"""A linear function that returns its operand. `is_gradient`: whether it is the transposed one."""
_residual.def_impl(lambda x, *, is_gradient: x)
_residual.def_abstract_eval(lambda x, *, is_gradient: x)
ad.deflinear2(_residual, _transposed)
batching.defvectorized(_residual)
mlir.register_lowering(_residual, lambda _, x, *, is_gradient: [x])
mlir.register_lowering(_residual, mlir.lower_fun(_lowered_on_a_cpu, multiple_results=False), platform="cpu")

_replica_id = Primitive("replica_id")
_replica_id.def_abstract_eval(lambda: jax.typeof(np.uint32(0)))
mlir.register_lowering(_replica_id, lambda _: [stablehlo.ReplicaIdOp().result])
