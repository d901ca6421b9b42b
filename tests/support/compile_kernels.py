"""Compiles the kernels of `--compute.mlp fused` for a TPU; arguments are `batchxpositionsxhiddenxwidth`.

With `--positions` before them, those of the MLP over positions.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train_jax.kernels.blocks import blocks_of
from train_jax.kernels.mix_positions import examples_of, fused_mix_positions
from train_jax.kernels.normed_mlp import fused_normed_mlp
from train_jax.pod.topology import topology, use_host_backend

use_host_backend()


over_positions = sys.argv[1] == "--positions"


@jax.jit
def gradients(x, gate_up, down):
    def loss(x, gate_up, down):
        fused = fused_mix_positions if over_positions else functools.partial(fused_normed_mlp, epsilon=1e-5)
        out = fused(x, gate_up, down)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    return jax.grad(loss, (0, 1, 2))(x, gate_up, down)


mesh = Mesh(np.array(topology("v4:2x2x1").devices[:1]), ("devices",))
for size in sys.argv[1 + over_positions :]:
    batch, positions, hidden, width = map(int, size.split("x"))

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    x = array(batch, positions, hidden, dtype=jnp.bfloat16)
    assert (examples_of if over_positions else blocks_of)(x, width), f"no kernel for {size}"
    mixed = positions if over_positions else hidden
    text = str(gradients.lower(x, array(2 * width, mixed), array(mixed, width)).compile().as_text())
    assert text.count('custom_call_target="tpu_custom_call"') == 2, size
