"""Fused attention of cuDNN, emulated in operations of JAX: masks, roundings, and what JAX refuses of it."""

import functools

import jax
import jax.numpy as jnp


def cudnn_attention(
    query,
    key,
    value,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    implementation=None,
) -> jax.Array:
    """Stands for `jax.nn.dot_product_attention`: arrays are `(batch, length, heads, width)`.

    As in the kernel, scores and sums are in float32 or wider, weights are rounded to the dtype of the values before
    they are divided by their sum, and the backward pass computes them again. As in JAX, the gradient of an odd length
    raises `NotImplementedError`.
    """
    assert implementation == "cudnn"
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    keys = jnp.arange(key.shape[1])
    allowed = jnp.ones((query.shape[0], 1, query.shape[1], key.shape[1]), bool)
    if key_value_seq_lengths is not None:
        allowed &= keys < key_value_seq_lengths[:, None, None, None]
    if is_causal:
        allowed &= keys <= jnp.arange(query.shape[1])[:, None]
    out = _kernel(float(query.shape[-1] ** -0.5 if scale is None else scale), query, key, value, allowed)
    if query_seq_lengths is None:
        return out
    known = jnp.arange(query.shape[1])[:, None, None] < query_seq_lengths[:, None, None, None]
    return jnp.where(known, out, jnp.nan)  # rows of the kernel that have no specified value


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(scale, query, key, value, allowed):
    return _forward(scale, query, key, value, allowed)[0]


def _forward(scale, query, key, value, allowed):
    scores = jnp.where(allowed, _product("btnh,bsnh->bnts", query, key) * scale, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = _product("bnts,bsnh->btnh", weights.astype(value.dtype), value) / jnp.swapaxes(total, 1, 2)
    return out.astype(query.dtype), top + jnp.log(total)


def _forward_for_gradient(scale, query, key, value, allowed):
    if query.shape[1] % 2 or key.shape[1] % 2:
        raise NotImplementedError(f"Unsupported sequence length Q {query.shape[1]}, KV {key.shape[1]}.")
    out, logsumexp = _forward(scale, query, key, value, allowed)
    return out, (query, key, value, allowed, out, logsumexp)


def _backward(scale, residuals, cotangent):
    query, key, value, allowed, out, logsumexp = residuals
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.where(allowed, _product("btnh,bsnh->bnts", query, key) * scale, -jnp.inf)
    weights = jnp.exp(scores - logsumexp)
    mean = jnp.swapaxes((cotangent.astype(wide) * out.astype(wide)).sum(-1), 1, 2)[..., None]
    slopes = weights * (_product("btnh,bsnh->bnts", cotangent, value) - mean) * scale
    slopes = slopes.astype(query.dtype)
    gradients = (
        _product("bnts,bsnh->btnh", slopes, key),
        _product("bnts,btnh->bsnh", slopes, query),
        _product("bnts,btnh->bsnh", weights.astype(value.dtype), cotangent),
    )
    return *(gradient.astype(query.dtype) for gradient in gradients), None


_kernel.defvjp(_forward_for_gradient, _backward)


def _product(equation, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
