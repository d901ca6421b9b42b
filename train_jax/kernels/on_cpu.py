"""The MLPs of a block in the order of operations that XLA's compiler for CPUs does best, in operations of JAX.

Gate and up are one product, and positions are mixed on transposed activations. On a TPU both cost more than they save:
the gradients of the parts are concatenated there, and channels leave the last axis.
"""

import functools

from jaxtyping import Array, Float

from train_jax.kernels.normed_mlp import normed_mlp, swiglu
from train_jax.kernels.registers import Latent

joined_normed_mlp = functools.partial(normed_mlp, joined=True)


def joined_mix_positions(
    x: Latent, gate_up: Float[Array, "twice_width positions"], down: Float[Array, "positions width"]
) -> Latent:
    """As `mix_positions`."""
    return x + swiglu(x.swapaxes(1, 2), gate_up, down, joined=True).swapaxes(1, 2)
