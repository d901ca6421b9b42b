"""Attention by a Pallas kernel of JAX for TPU, which keeps no scores: `bridge.fused_attention`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge.internals import Tracer
from bridge.lowerings.attention import attention, repeated

_LANES = 128
"""Lanes of a TPU's vector registers. Width and lengths have to be multiples of it."""


def fused_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    interpret=False,
):
    """`aten::scaled_dot_product_attention` by JAX's splash attention, for programs that run on a TPU.

    It serves causal attention, and masks that are constants with at least one key for each query. Query, key and value
    are bfloat16 arrays `(batch, heads, length, width)` of one length; length and width are multiples of 128. The
    backward pass computes the scores again from the logarithms of their sums. Every other attention is that of the
    bridge's own lowering, its reference. `interpret` runs the kernel on any machine, slowly.

    The kernel has a gradient, but no `jvp` and no gradient of the gradient. It takes the scaled query in bfloat16, so a
    scale that is not a power of two rounds once more.

    References:
      jax.experimental.pallas.ops.tpu.splash_attention
    """
    allowed = None if dropout_p or not _fits(query, key, value) else _allowed(attn_mask, is_causal, query.shape[-2])
    if allowed is None:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if key.shape[1] != query.shape[1]:
        key, value = (repeated(each, query.shape[1] // each.shape[1]) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = (query.astype(jnp.float32) * scale).astype(query.dtype)
    return _in_default_precision(jax.vmap(_kernel(allowed, query.shape[1], interpret)))(query, key, value)


def _in_default_precision(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function` with its derivative, traced without `jax.default_matmul_precision`.

    Under `jax.checkpoint`, the kernel for the forward pass is traced after the lowering has returned, where products
    have PyTorch's precision for float32. Mosaic refuses bfloat16 with it.
    """

    @jax.custom_vjp
    def call(*arrays: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(None):
            return function(*arrays)

    def forward(*arrays: jax.Array) -> tuple[jax.Array, Any]:
        with jax.default_matmul_precision(None):
            return jax.vjp(function, *arrays)

    def backward(pullback: Any, cotangent: jax.Array) -> Any:
        with jax.default_matmul_precision(None):
            return pullback(cotangent)

    call.defvjp(forward, backward)
    return call


def _fits(query: jax.Array, key: jax.Array, value: jax.Array) -> bool:
    arrays = (query, key, value)
    if any(each.ndim != 4 or each.dtype != jnp.bfloat16 for each in arrays):
        return False
    (batch, heads, length, width), (_, key_heads, *_) = query.shape, key.shape
    return (
        key.shape == value.shape == (batch, key_heads, length, width)
        and heads % key_heads == 0
        and length % _LANES == 0
        and width % _LANES == 0
    )


def _allowed(attn_mask: Any, is_causal: bool, length: int) -> np.ndarray | None:
    """Returns which keys each query attends to; None for a mask that the kernel does not serve."""
    causal = np.tri(length, dtype=bool)
    if attn_mask is None:
        return causal if is_causal else None
    if isinstance(attn_mask, Tracer) or attn_mask.dtype != bool or attn_mask.shape != (length, length):
        return None
    allowed = np.asarray(attn_mask) & causal if is_causal else np.asarray(attn_mask)
    return allowed if allowed.any(axis=-1).all() else None


def _kernel(allowed: np.ndarray, heads: int, interpret: bool) -> Callable[..., Any]:
    """Returns splash attention over `(heads, length, width)`."""
    # Imported here: Pallas takes 0.15 s, and few programs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length = len(allowed)
    mask = masks.CausalMask(allowed.shape) if (allowed == np.tri(length)).all() else masks.NumpyMask(allowed)
    rows, forward_keys, backward_keys = (_block(length, most) for most in (1024, 1024, 2048))
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=forward_keys,
        block_kv_compute=_block(forward_keys, 512),
        block_q_dkv=rows,
        block_kv_dkv=backward_keys,  # with several, gradients of the query are written for each and summed
        block_kv_dkv_compute=_block(backward_keys, 512),
        use_fused_bwd_kernel=True,
    )
    return splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
    )


def _block(length: int, most: int) -> int:
    """Returns the largest block that divides a length; the limits are the fewest bundles that fit a v4's memory."""
    return next(size for size in range(most, 0, -_LANES) if length % size == 0)
