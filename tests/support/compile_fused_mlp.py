"""Compiles the kernels of `--compute.mlp fused` for a TPU; arguments are `batchxpositionsxhiddenxwidth`.

With `--positions` before them, those of the MLP over positions.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train_jax.core.fused_mixing import examples_of, fused_mix_positions
from train_jax.core.fused_mlp import blocks_of, fused_normed_mlp
from train_jax.pod.topology import topology, use_host_backend

use_host_backend()


over_positions = sys.argv[1] == "--positions"


@jax.jit
def gradients(x, gate_up, down):
    def loss(*given):
        out = fused_mix_positions(*given) if over_positions else fused_normed_mlp(*given, 1e-5)
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
    text = gradients.lower(x, array(2 * width, mixed), array(mixed, width)).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2, size
