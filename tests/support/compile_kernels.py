"""Compiles the kernels of `--compute.mlp fused` and `--compute.attention fused` for a TPU.

Arguments are `batchxpositionsxhiddenxwidth`, with `--positions` before them those of the MLP over positions. With
`--attention` or `--attention-without-rotation` they are `batchxpositionsxhiddenxhead_dim`.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train_jax.core.kernels.attention import fused_mix_by_attention, heads_of
from train_jax.core.kernels.blocks import blocks_of
from train_jax.core.kernels.mix_positions import examples_of, fused_mix_positions
from train_jax.core.kernels.normed_mlp import fused_normed_mlp
from train_jax.pods.topologies import topology, use_host_backend

use_host_backend()
MESH = Mesh(np.array(topology("v4:2x2x1").devices[:1]), ("devices",))


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, PartitionSpec()))


def mlp(x, width):
    assert blocks_of(x, width)
    hidden = x.shape[2]
    return functools.partial(fused_normed_mlp, epsilon=1e-5), array(2 * width, hidden), array(hidden, width)


def mlp_over_positions(x, width):
    assert examples_of(x, width)
    positions = x.shape[1]
    return fused_mix_positions, array(2 * width, positions), array(positions, width)


def attention(x, head_dim, rotated=True):
    hidden = x.shape[2]
    qkv = array(3 * hidden, hidden)
    assert heads_of(x, qkv, head_dim)
    tables = [np.ones((x.shape[1], head_dim // 2), np.float32) if rotated else None] * 2
    return lambda *given: fused_mix_by_attention(*given, *tables, head_dim), qkv, array(hidden, hidden)


kinds = {
    "--positions": mlp_over_positions,
    "--attention": attention,
    "--attention-without-rotation": functools.partial(attention, rotated=False),
}
kind = kinds.get(sys.argv[1], mlp)
for size in sys.argv[1 + (sys.argv[1] in kinds) :]:
    *shape, last = map(int, size.split("x"))
    x = array(*shape, dtype=jnp.bfloat16)
    fused, *weights = kind(x, last)

    def loss(*given, fused=fused):
        return jnp.sum(jnp.square(fused(*given).astype(jnp.float32)))

    text = str(jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, *weights).compile().as_text())
    assert text.count('custom_call_target="tpu_custom_call"') == 2, size
