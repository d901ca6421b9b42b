"""`benchmarks/trm_tuned.py`: the network of the hand-written TRM with everything that makes the bridge fast."""

import jax
import numpy as np
import pytest

from benchmarks import trm_jnp, trm_tuned
from models_torch.trm import TRMConfig

HIDDEN, EXPANDED, POSITIONS = 64, 128, 9


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mlp_t", [False, True])
def test_it_is_the_same_network(mlp_t, fused):
    """The kernels leave float32 to operations of JAX."""
    config = TRMConfig(
        seq_len=9, hidden_size=HIDDEN, num_heads=4, puzzle_emb_ndim=0, puzzle_emb_len=0, L_layers=2, mlp_t=mlp_t,
        pos_encodings="none" if mlp_t else "rope", forward_dtype="float32",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    sizes = {"mlp": (HIDDEN, EXPANDED)} | ({"mlp_t": (POSITIONS, EXPANDED)} if mlp_t else {})
    params = {}
    for layer in range(2):
        name = f"{trm_jnp.INNER}L_level.layers.{layer}"
        for mlp, (size, width) in sizes.items():
            params[f"{name}.{mlp}.gate_up_proj.weight"] = rng.normal(size=(2 * width, size)) * size**-0.5
            params[f"{name}.{mlp}.down_proj.weight"] = rng.normal(size=(size, width)) * width**-0.5
        if not mlp_t:
            params[f"{name}.self_attn.qkv_proj.weight"] = rng.normal(size=(3 * HIDDEN, HIDDEN)) * HIDDEN**-0.5
            params[f"{name}.self_attn.o_proj.weight"] = rng.normal(size=(HIDDEN, HIDDEN)) * HIDDEN**-0.5
    params = jax.tree.map(np.float32, params)
    z, injection = (np.float32(rng.normal(size=(2, POSITIONS, HIDDEN))) for _ in range(2))

    def loss(network):
        return lambda params: (network(z, injection, params, config) * injection).sum()

    expected = jax.value_and_grad(loss(trm_jnp.level))(params)
    for ours, theirs in zip(
        jax.tree.leaves(jax.value_and_grad(loss(trm_tuned.network(fused=fused)))(params)),
        jax.tree.leaves(expected),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())
