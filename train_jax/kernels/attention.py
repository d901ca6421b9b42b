"""A block's attention with its residual sum, by Pallas kernels for TPU.

XLA computes `x + output(softmax(q k) v)`, with rotated queries and keys, by about ten kernels and writes the scores of
all heads to memory. Here the forward pass is one kernel, and so is the backward pass. Both keep the weights in the
vector memory and go through the examples once. The backward pass computes the scores again from queries and keys.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bridge.lowerings.attention import attention
from train_jax.kernels.attention_passes import backward, forward
from train_jax.kernels.heads import Heads, heads_of
from train_jax.kernels.registers import LANES, Latent

Table = Float[Array, "positions half_head_dim"]


def mix_by_attention(
    x: Latent,
    qkv: Float[Array, "three_hidden hidden"],
    output: Float[Array, "hidden hidden"],
    cos: Table | None,
    sin: Table | None,
    head_dim: int,
) -> Latent:
    """Returns `x` plus its attention by operations of JAX, as `models_torch.layers.Attention` computes it."""

    def heads(weight: Array, width: int) -> Float[Array, "batch positions heads width"]:
        products = jnp.einsum("bph,wh->bpw", x, weight.astype(x.dtype))
        return products.reshape(*x.shape[:2], -1, width)

    def rotated(weight: Array) -> Float[Array, "batch positions heads head_dim"]:
        if cos is None or sin is None:
            return heads(weight, head_dim)
        half = head_dim // 2
        parts = weight.reshape(-1, 2, half, x.shape[2])
        first, second = (heads(parts[:, i].reshape(-1, x.shape[2]), half).astype(cos.dtype) for i in (0, 1))
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate((first * c - second * s, second * c + first * s), -1).astype(x.dtype)

    query, key, value = jnp.split(qkv, 3)
    of_heads = (each.swapaxes(1, 2) for each in (rotated(query), rotated(key), heads(value, head_dim)))
    attended = attention(*of_heads).astype(x.dtype).swapaxes(1, 2).reshape(*x.shape[:2], -1)
    return x + jnp.einsum("bpw,hw->bph", attended, output.astype(x.dtype))


def fused_mix_by_attention(
    x: Latent,
    qkv: Float[Array, "three_hidden hidden"],
    output: Float[Array, "hidden hidden"],
    cos: Table | None,
    sin: Table | None,
    head_dim: int,
    *,
    interpret: bool = False,
) -> Latent:
    """`mix_by_attention` by Pallas kernels for TPU, where `heads_of` has a result; elsewhere by operations of JAX.

    Rotated queries and keys, values, weights of attention and what they make of the values are rounded to bfloat16
    before the next product; scores and sums are float32. The kernels give `cos` and `sin` no gradient. For derivatives
    and `interpret`, see `train_jax.kernels.normed_mlp.fused_normed_mlp`.
    """
    heads = heads_of(x, qkv, head_dim)
    of_table = x.shape[1], head_dim // 2
    fit = output.shape == (x.shape[2],) * 2 and all(each is None or each.shape == of_table for each in (cos, sin))
    if heads is None or not fit:
        return mix_by_attention(x, qkv, output, cos, sin, head_dim)
    if cos is None or sin is None:
        return _fused(heads, interpret, x, qkv, output, None)
    tables = _tables(heads, *jax.lax.stop_gradient((cos, sin)))
    return _fused(heads, interpret, x, _halves_first(heads, qkv), output, tables)


def _halves_first(heads: Heads, qkv: Array) -> Array:
    """Reorders the weights of queries and keys: in each 128 channels, first halves of all heads, then second halves.

    Then a roll by 64 channels pairs each channel with its partner. Scores do not depend on the order.
    """
    hidden = qkv.shape[1]
    parts = qkv.reshape(3, hidden // LANES, heads.in_a_group, 2, heads.head_dim // 2, hidden)
    swapped = parts[:2].swapaxes(2, 3).reshape(2 * hidden, hidden)
    return jnp.concatenate([swapped, qkv[2 * hidden :]])


def _tables(heads: Heads, cos: Table, sin: Table) -> Float[Array, "two rows lanes"]:
    """Cosines, and sines with the sign of their term, for 128 channels and the rows of a step; zeros in added rows."""
    wide = jnp.tile(cos, (1, 2 * heads.in_a_group)), jnp.tile(sin, (1, heads.in_a_group))
    tables = jnp.stack([wide[0], jnp.concatenate([-wide[1], wide[1]], -1)]).astype(jnp.float32)
    padded = jnp.pad(tables, ((0, 0), (0, heads.blocks.padded - cos.shape[0]), (0, 0)))
    return jnp.tile(padded, (1, heads.blocks.examples, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(heads: Heads, interpret: bool, x: Latent, qkv: Array, output: Array, tables: Array | None) -> Latent:
    return forward(heads, interpret, x, qkv, output, tables, keep=False)[0]


def _fused_fwd(heads, interpret, x, qkv, output, tables):
    out, *kept = forward(heads, interpret, x, qkv, output, tables, keep=True)
    return out, (x, *kept, qkv, output, tables)


def _fused_bwd(heads, interpret, residuals, cotangent):
    tables = residuals[-1]
    by_tables = None if tables is None else jnp.zeros_like(tables)  # constants
    return *backward(heads, interpret, residuals, cotangent), by_tables


_fused.defvjp(_fused_fwd, _fused_bwd)
