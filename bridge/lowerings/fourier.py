"""Fourier transforms that torchax has for even lengths only."""

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import lowers

aten = torch.ops.aten

_NORMS = ("forward", "ortho", "backward")
"""By PyTorch's number: no factor, one over the root of the length, one over the length."""


@lowers(aten._fft_c2r.default)
def real_from_half(x: jax.Array, dims: list[int], norm: int, last: int) -> jax.Array:
    return jnp.fft.irfftn(x, [*(x.shape[d] for d in dims[:-1]), last], dims, _NORMS[norm])
