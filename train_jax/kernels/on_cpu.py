"""The MLPs of a block in the order of operations that XLA's compiler for CPUs does best, in operations of JAX.

Gate and up are one product, and positions are mixed on transposed activations. On a TPU both cost more than they save:
the gradients of the parts are concatenated there, and channels leave the last axis.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from train_jax.kernels.normed_mlp import rms_norm
from train_jax.kernels.registers import Latent


def joined_normed_mlp(
    x: Latent,
    gate_up: Float[Array, "twice_width hidden"],
    down: Float[Array, "hidden width"],
    epsilon: float,
    dim: int = -1,
) -> Latent:
    """As `normed_mlp`."""
    x = rms_norm(x, epsilon, dim)
    return rms_norm(x + _gated_mlp(x, gate_up, down), epsilon, -1)


def joined_mix_positions(
    x: Latent, gate_up: Float[Array, "twice_width positions"], down: Float[Array, "positions width"]
) -> Latent:
    """As `mix_positions`."""
    return x + _gated_mlp(x.swapaxes(1, 2), gate_up, down).swapaxes(1, 2)


def _gated_mlp(x: Array, gate_up: Array, down: Array) -> Array:
    """`down(silu(gate) * up)` over the last axis."""
    gate, up = jnp.split(jnp.einsum("...h,wh->...w", x, gate_up.astype(x.dtype)), 2, axis=-1)
    return jnp.einsum("...w,hw->...h", jax.nn.silu(gate) * up, down.astype(x.dtype))
