"""Our own JAX lowerings, where torchax has none, a less exact or a longer one. Each can be switched off by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from bridge.semantics import jax_dtype

aten = torch.ops.aten

LOWERINGS: dict[Any, Callable] = {}
"""ATen op -> function of arrays. Shape and dtype of the result are PyTorch's: the dispatcher casts."""

DECOMPOSITIONS: dict[Any, Callable] = {}
"""ATen op -> the same in simpler torch operations, where PyTorch's own op hides an in-place write."""

METAS: dict[Any, Callable] = {}
"""ATen op -> its result on the meta device, where PyTorch's answer depends on the kernel it picks."""

FUNCTIONS: dict[Any, Any] = {
    F.scaled_dot_product_attention: aten.scaled_dot_product_attention.default,
    F.linear: aten.linear.default,
}
"""Python-level functions taken whole, before PyTorch breaks them up, and the op whose lowering serves them."""


def _lowers(*ops: Any) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        LOWERINGS.update(dict.fromkeys(ops, function))
        return function

    return register


@_lowers(aten.linear.default)
def linear(x, weight, bias=None):
    """One contraction over the last axis of both; PyTorch's own path adds a transpose and two reshapes."""
    out = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return out if bias is None else out + bias


@_lowers(aten.scaled_dot_product_attention.default)
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


@_lowers(aten._to_copy.default)
def to_copy(x, *, dtype=None, **_placement):
    return x if dtype is None else x.astype(jax_dtype(dtype))


@_lowers(aten.clone.default, aten.lift_fresh_copy.default)
def clone(x, **_layout):
    return x


@_lowers(aten.copy.default)
def copy(destination, source, non_blocking=False):
    return jnp.broadcast_to(source, destination.shape).astype(destination.dtype)


@_lowers(aten.silu.default)
def silu(x):
    """In float32 inside, as PyTorch computes it on every backend."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.logistic(wide)).astype(x.dtype)


@_lowers(aten.empty.memory_format, aten.zeros.default)
def zeros(size, *, dtype=None, **_placement):
    """`torch.empty` promises nothing; zeros are deterministic, and newer JAX would hand out whatever was there."""
    return jnp.zeros(tuple(size), jax_dtype(dtype or torch.get_default_dtype()))


@_lowers(aten.ones.default)
def ones(size, *, dtype=None, **_placement):
    return jnp.ones(tuple(size), jax_dtype(dtype or torch.get_default_dtype()))


@_lowers(aten.full.default)
def full(size, fill_value, *, dtype=None, **_placement):
    return jnp.full(tuple(size), fill_value, None if dtype is None else jax_dtype(dtype))


@_lowers(aten.empty_like.default, aten.zeros_like.default)
def zeros_like(x, *, dtype=None, **_placement):
    return jnp.zeros(x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@_lowers(aten.ones_like.default)
def ones_like(x, *, dtype=None, **_placement):
    return jnp.ones(x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@_lowers(aten.full_like.default)
def full_like(x, fill_value, *, dtype=None, **_placement):
    return jnp.full(x.shape, fill_value, x.dtype if dtype is None else jax_dtype(dtype))


@_lowers(aten.new_empty.default, aten.new_zeros.default)
def new_zeros(x, size, *, dtype=None, **_placement):
    return jnp.zeros(tuple(size), x.dtype if dtype is None else jax_dtype(dtype))


@_lowers(aten.new_ones.default)
def new_ones(x, size, *, dtype=None, **_placement):
    return jnp.ones(tuple(size), x.dtype if dtype is None else jax_dtype(dtype))


@_lowers(aten.new_full.default)
def new_full(x, size, fill_value, *, dtype=None, **_placement):
    return jnp.full(tuple(size), fill_value, x.dtype if dtype is None else jax_dtype(dtype))


@_lowers(aten.empty_strided.default)
def empty_strided(size, _stride, *, dtype=None, **_placement):
    return jnp.zeros(tuple(size), jax_dtype(dtype or torch.get_default_dtype()))


@_lowers(aten.scalar_tensor.default)
def scalar_tensor(value, *, dtype=None, **_placement):
    return jnp.asarray(value, jax_dtype(dtype or torch.get_default_dtype()))


@_lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x, mask, value):
    return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)


@_lowers(aten.mkldnn_rnn_layer.default)
def lstm_layer(x, w_input, w_hidden, b_input, b_hidden, h, c, reverse, *_settings):
    """One direction of one LSTM layer over `(time, batch, features)`: what PyTorch's CPU build makes of an LSTM.

    A scan, so that a long sequence compiles once and not once a step. The last output is MKL-DNN's workspace.
    """
    inputs = jnp.einsum("tbf,gf->tbg", x, w_input) + b_input + b_hidden

    def step(state, gates):
        hidden, cell = state
        i, f, g, o = jnp.split(gates + hidden @ w_hidden.T, 4, axis=-1)
        cell = jax.lax.logistic(f) * cell + jax.lax.logistic(i) * jnp.tanh(g)
        hidden = jax.lax.logistic(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    start = tuple(state.reshape(x.shape[1], -1) for state in (h, c))
    (hidden, cell), outputs = jax.lax.scan(step, start, inputs, reverse=bool(reverse))
    return outputs, hidden.reshape(h.shape), cell.reshape(c.shape), jnp.zeros(0, jnp.uint8)


def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """`native_batch_norm` writes the running statistics without saying so in its schema; here the write is visible."""
    axes = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if training or running_mean is None:
        mean, var = wide.mean(axes), wide.var(axes, unbiased=False)
        if running_mean is not None:
            count = x.numel() // x.shape[1]
            with torch.no_grad():
                running_mean.mul_(1 - momentum).add_(mean * momentum)
                running_var.mul_(1 - momentum).add_(var * (momentum * count / max(count - 1, 1)))
    else:
        mean, var = running_mean.to(wide.dtype), running_var.to(wide.dtype)
    invstd = torch.rsqrt(var + eps)
    out = (wide - mean.view(shape)) * invstd.view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(x.dtype), mean, invstd


DECOMPOSITIONS[aten.native_batch_norm.default] = batch_norm


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
