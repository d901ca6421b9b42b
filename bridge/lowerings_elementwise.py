"""Functions of single elements: inside in float32, whatever the dtype they are given."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings_registry import LOWERINGS, lowers, widened

aten = torch.ops.aten


def _inside_float32(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def lowering(x):
        """Integers and bools become floats; the dispatcher rounds the result to PyTorch's dtype."""
        return function(widened(x))

    return lowering


for _op, _function in {
    aten.sigmoid.default: jax.lax.logistic,
    aten.rsqrt.default: jax.lax.rsqrt,
    aten.erf.default: jax.lax.erf,
    aten.erfc.default: jax.lax.erfc,
    aten.erfinv.default: jax.lax.erf_inv,
    aten.special_log_ndtr.default: jax.scipy.special.log_ndtr,
    aten.silu.default: lambda x: x * jax.lax.logistic(x),
}.items():
    LOWERINGS[_op] = _inside_float32(_function)


@lowers(aten.sign.default, aten.sgn.default)
def sign(x):
    return x if x.dtype == bool else jnp.sign(x)
