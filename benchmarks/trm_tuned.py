"""The network of `trm_jnp` with everything that makes the bridged module fast on a TPU: the rival of the bridge."""

import functools

from jaxtyping import Array

from benchmarks.trm_jnp import INNER, Latent, Network, Params, rotary_tables
from models_torch.trm import TRMConfig
from train_jax.core.kernels.attention import fused_mix_by_attention, mix_by_attention
from train_jax.core.kernels.mix_positions import fused_mix_positions, mix_positions
from train_jax.core.kernels.normed_mlp import fused_normed_mlp, normed_mlp


def network(*, fused: bool) -> Network:
    """Returns the network; `fused` computes its MLPs and its attention by Pallas kernels."""
    return functools.partial(_level, fused=fused)


def _level(z: Latent, injection: Latent, params: Params, config: TRMConfig, *, fused: bool) -> Latent:
    mlp, mix, attend = (
        (fused_normed_mlp, fused_mix_positions, fused_mix_by_attention)
        if fused
        else (normed_mlp, mix_positions, mix_by_attention)
    )
    z = z + injection
    for index in range(config.L_layers):
        name = f"{INNER}L_level.layers.{index}"
        if config.mlp_t:
            z = mix(z, *_weights(params, f"{name}.mlp_t"))
        else:
            qkv, output = (params[f"{name}.self_attn.{each}.weight"] for each in ("qkv_proj", "o_proj"))
            cos, sin = rotary_tables(z.shape[1], config.head_dim, config.rope_theta)
            z = attend(z, qkv, output, cos, sin, config.head_dim)
        z = mlp(z, *_weights(params, f"{name}.mlp"), config.rms_norm_eps, dim=1 if config.mlp_t else -1)
    return z


def _weights(params: Params, name: str) -> tuple[Array, Array]:
    return params[f"{name}.gate_up_proj.weight"], params[f"{name}.down_proj.weight"]
