"""Linear layers and attention."""

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from bridge.lowerings_registry import DECOMPOSITIONS, FUNCTIONS, METAS, lowers

aten = torch.ops.aten

FUNCTIONS[F.scaled_dot_product_attention] = aten.scaled_dot_product_attention.default
FUNCTIONS[F.linear] = aten.linear.default


@lowers(aten.linear.default)
def linear(x, weight, bias=None):
    """One contraction over the last axis of both; PyTorch's own path adds a transpose and two reshapes."""
    out = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return out if bias is None else out + bias


@lowers(aten.scaled_dot_product_attention.default)
def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention over `(..., heads, length, width)` with scores and softmax in float32 whatever the input dtype.

    A row that may attend to nothing yields zeros, as PyTorch's does.
    """
    if dropout_p:
        raise NotImplementedError("attention dropout is drawn by the decomposition")
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (jnp.repeat(x, query.shape[-3] // x.shape[-3], axis=-3) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=wide) * scale
    allowed = None
    if is_causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is not None:
        if attn_mask.dtype == bool:
            allowed = attn_mask if allowed is None else allowed & attn_mask
        else:
            scores = scores + attn_mask
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(value.dtype)
    return jnp.einsum("...qk,...kd->...qd", weights, value, preferred_element_type=wide)


def attention_meta(query, key, value, *_args, **_kwargs):
    """Laid out as the fused kernels do, (batch, length, heads, width): models `.view` the transposed result."""
    batch, heads, length = query.shape[:-2], query.shape[-3:-2], query.shape[-2:-1]
    if query.dim() != 4:
        return query.new_empty((*query.shape[:-1], value.shape[-1]))
    return query.new_empty((*batch[:1], *length, *heads, value.shape[-1])).transpose(1, 2)


METAS[aten.scaled_dot_product_attention.default] = attention_meta


def attention_with_dropout(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """The same attention in torch operations, for the one case that draws random numbers."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(~ones.tril(), float("-inf"))
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if masked else scores + attn_mask
    weights = torch.dropout(torch.softmax(scores, dim=-1), dropout_p, train=True)
    return (weights.to(value.dtype) @ value).to(query.dtype)


DECOMPOSITIONS[aten.scaled_dot_product_attention.default] = attention_with_dropout
