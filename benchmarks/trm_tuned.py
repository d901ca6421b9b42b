"""The network of `trm_jnp` with everything that makes the bridged module fast on a TPU: the rival of the bridge."""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.trm_jnp import INNER, Latent, Network, Params, linear
from bridge.lowerings.attention import attention as attended
from models_torch.trm import TRMConfig
from train_jax.kernels.attention import fused_mix_by_attention
from train_jax.kernels.mix_positions import fused_mix_positions, mix_positions
from train_jax.kernels.normed_mlp import fused_normed_mlp, normed_mlp


def network(*, fused: bool) -> Network:
    """Returns the network; `fused` computes its MLPs and its attention by Pallas kernels."""
    return functools.partial(_level, fused=fused)


def _level(z: Latent, injection: Latent, params: Params, config: TRMConfig, *, fused: bool) -> Latent:
    mlp, mix = (fused_normed_mlp, fused_mix_positions) if fused else (normed_mlp, mix_positions)
    z = z + injection
    for index in range(config.L_layers):
        name = f"{INNER}L_level.layers.{index}"
        if config.mlp_t:
            z = mix(z, *_weights(params, f"{name}.mlp_t"))
        elif fused:
            z = _fused_attention(z, params, f"{name}.self_attn", config)
        else:
            z = z + _attention(z, params, f"{name}.self_attn", config)
        z = mlp(z, *_weights(params, f"{name}.mlp"), config.rms_norm_eps, dim=1 if config.mlp_t else -1)
    return z


def _weights(params: Params, name: str) -> tuple[Array, Array]:
    return params[f"{name}.gate_up_proj.weight"], params[f"{name}.down_proj.weight"]


def _attention(x: Latent, params: Params, name: str, config: TRMConfig) -> Latent:
    """With one product for each half of the channels of queries and keys."""
    query, key, value = jnp.split(params[f"{name}.qkv_proj.weight"], 3)
    heads, half = config.num_heads, config.hidden_size // config.num_heads // 2
    cos, sin = (table[:, None, :] for table in _turns(x.shape[1], config))

    def rotated(weight: Array) -> Array:
        parts = weight.reshape(heads, 2, half, -1)
        first, second = (
            linear(x, parts[:, i].reshape(heads * half, -1)).reshape(*x.shape[:2], heads, half).astype(jnp.float32)
            for i in (0, 1)
        )
        turned = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)

    plain = linear(x, value).reshape(*x.shape[:2], heads, 2 * half)
    mixed = attended(*(each.swapaxes(1, 2) for each in (rotated(query), rotated(key), plain))).swapaxes(1, 2)
    return linear(mixed.reshape(x.shape).astype(x.dtype), params[f"{name}.o_proj.weight"])


def _fused_attention(x: Latent, params: Params, name: str, config: TRMConfig) -> Latent:
    """`x` plus its attention by Pallas kernels."""
    weights = params[f"{name}.qkv_proj.weight"], params[f"{name}.o_proj.weight"]
    turns = _turns(x.shape[1], config)
    return fused_mix_by_attention(x, *weights, *turns, config.hidden_size // config.num_heads)


def _turns(positions: int, config: TRMConfig) -> tuple[Array, Array]:
    """Cosines and sines of the angles, `(positions, half the channels of a head)`."""
    half = config.hidden_size // config.num_heads // 2
    frequencies = 1 / config.rope_theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(jnp.arange(positions, dtype=jnp.float32), frequencies)
    return jnp.cos(angles), jnp.sin(angles)
