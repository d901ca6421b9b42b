"""Linear layers and attention, including `bridge.fused_attention`, a Pallas kernel for TPU that stores no scores."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.custom_derivatives import SymbolicZero

from bridge._compat.jax import Tracer, compute_capability
from bridge.lowerings.creation import broadcast
from bridge.lowerings.registry import FUNCTIONS, METAS, decomposes, inlined, lowers

aten = torch.ops.aten


FUNCTIONS[F.scaled_dot_product_attention] = aten.scaled_dot_product_attention.default
FUNCTIONS[F.linear] = aten.linear.default


@lowers(aten.linear.default)
@inlined
def linear(x, weight, bias=None):
    """Contracts the last axis of both in one operation; PyTorch's own path adds a transpose and two reshapes."""
    out = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    if bias is None:
        return out
    return out + broadcast(bias, out.shape)


def repeated(heads: jax.Array, times: int) -> jax.Array:
    """Returns each head as often as there are heads of the query that share it."""
    *batch, count, length, width = heads.shape
    copies = broadcast(heads[..., None, :, :], (*batch, count, times, length, width))
    return jnp.reshape(copies, (*batch, count * times, length, width))


@lowers(aten.scaled_dot_product_attention.default)
@inlined
def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention over `(..., heads, length, width)` with scores and softmax in float32 for any input dtype.

    A row that may attend to nothing yields zeros, as in PyTorch. The sum of the weights divides last, in float32:
    `jax.nn.dot_product_attention` rounds the normalised weights, which is half as exact in bf16 unless cuDNN runs.
    """
    if attn_mask is None and not dropout_p and _flash_serves(query, key, value, is_causal):
        return _flash(query, key, value, is_causal, scale)
    return attention_by_operations(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def attention_by_operations(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Returns `attention` without cuDNN. Raises `NotImplementedError` for dropout, which the decomposition draws."""
    if dropout_p:
        raise NotImplementedError("attention dropout is drawn by the decomposition")
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (repeated(x, query.shape[-3] // x.shape[-3]) for x in (key, value))
    if scale is None:
        scale = query.shape[-1] ** -0.5
    wide = jnp.promote_types(query.dtype, jnp.float32)
    # Where this rounds no more than the scores do, the query is scaled: XLA fuses `product * scale - top` into one
    # rounding, but not the `product * scale` that `top` is taken from, and scores of 1e8 then have weights of infinity.
    early = query.dtype == wide or math.frexp(scale)[0] == 0.5
    if early:
        query = query * jnp.asarray(scale, query.dtype)
    late = None if early else scale
    length = query.shape[-2]
    if is_causal and attn_mask is None and length == key.shape[-2] and length >= _LONG:
        return _long_causal(query, key, value, late)
    if is_causal:
        allowed = jnp.tril(jnp.ones((length, key.shape[-2]), bool))
    else:
        allowed = None
    if attn_mask is not None and attn_mask.dtype == bool:
        allowed = attn_mask if allowed is None else allowed & attn_mask
        attn_mask = None
    return _attended(query, key, value, late, attn_mask, allowed)


_LONG = 1024
"""Number of positions from which causal attention is computed in blocks."""


def _long_causal(query: jax.Array, key: jax.Array, value: jax.Array, scale: float | None) -> jax.Array:
    """Computes a block of rows at a time, with the keys up to its last row: 8 blocks need 9/16 of the products."""
    length = query.shape[-2]
    rows = max(256, math.ceil(length / 8))
    blocks = []
    for start in range(0, length, rows):
        end = min(start + rows, length)
        allowed = jnp.arange(end) <= jnp.arange(start, end)[:, None]
        keys = key[..., :end, :]
        values = value[..., :end, :]
        blocks.append(_attended(query[..., start:end, :], keys, values, scale, None, allowed))
    return jnp.concatenate(blocks, axis=-2)


def _attended(query, key, value, scale, bias, allowed):
    """Returns softmax of the scores, times values: `scale` and `bias` are optional, and so is the mask `allowed`."""
    scores = _product("...qd,...kd->...qk", query, key)
    if scale is not None:
        scores = scores * scale
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    weights, total = _weights(value.dtype, scores)
    return _product("...qk,...kd->...qd", weights, value) / total


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns `jnp.einsum` in float32 or wider; derivatives are products in the dtype of the operands."""
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _product_jvp(equation, primals, tangents):
    x, y = primals
    dx, dy = tangents
    out = _product(equation, x, y)
    if isinstance(dx, SymbolicZero):
        parts = []
    else:
        parts = [jnp.einsum(equation, dx, y)]
    parts += [] if isinstance(dy, SymbolicZero) else [jnp.einsum(equation, x, dy)]
    return out, sum(parts[1:], parts[0]).astype(out.dtype) if parts else jnp.zeros_like(out)


_product.defjvp(_product_jvp, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _weights(dtype: Any, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns weights in `dtype` up to a factor for each row, and their sum (1 where all are zero).

    Only the quotient has a meaning. The sum is that of the rounded weights, which are also what the backward pass
    keeps.
    """
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)).astype(dtype)
    total = jnp.sum(weights.astype(scores.dtype), axis=-1, keepdims=True)
    return weights, jnp.where(total == 0, 1, total)


@_weights.defjvp
def _weights_jvp(dtype, primals, tangents):
    """Keeps the sum constant and moves the weights against their mean, which is the derivative of the quotient.

    Where one weight is the only one, this is zero, as in PyTorch. Differentiated as two results it would be the
    difference of two rounded products, times keys and queries that are large in this case.
    """
    weights, total = _weights(dtype, *primals)
    (tangent,) = tangents
    wide = weights.astype(tangent.dtype)
    mean = jnp.sum(wide * tangent, axis=-1, keepdims=True) / total
    return (weights, total), ((wide * (tangent - mean)).astype(dtype), jnp.zeros_like(total))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _flash(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool, scale: float | None) -> jax.Array:
    """Returns attention by cuDNN."""
    query, key, value = _batched_alike((query, key, value))
    return _by_cudnn(query, key, value, is_causal=is_causal, scale=scale)


def _flash_forward(query, key, value, is_causal, scale):
    """Adds a position where a length is odd, because JAX refuses the gradient of those (docs/dev/odd_lengths.md)."""
    function = functools.partial(_flash_of_even_length, is_causal=is_causal, scale=scale)
    return jax.vjp(function, *_batched_alike((query, key, value)))


def _flash_backward(_is_causal, _scale, pullback, cotangent):
    pullback, cotangent = _batched_alike((pullback, cotangent))
    return pullback(cotangent)


_flash.defvjp(_flash_forward, _flash_backward)


def _flash_of_even_length(query, key, value, *, is_causal, scale):
    """Returns the rows of attention that were there before the added ones, whose cotangent is zero.

    No query attends to an added key: it lies behind the number of keys, or behind the last query of a causal mask.
    """
    length = query.shape[2]
    keys = key.shape[2]
    query, key, value = (_of_even_length(x) for x in (query, key, value))
    lengths = {}
    if keys % 2 and not is_causal:
        flags = query[:, 0, 0, 0] > 0  # so that the lengths are batched like the queries, see `_batched_alike`
        lengths["query_seq_lengths"] = jnp.where(flags, query.shape[2], query.shape[2])
        lengths["key_value_seq_lengths"] = jnp.where(flags, keys, keys)
    out = _by_cudnn(query, key, value, is_causal=is_causal, scale=scale, **lengths)
    return out[:, :, :length]


def _by_cudnn(query, key, value, **options):
    """Returns `jax.nn.dot_product_attention`, which has another order of axes."""
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    return jnp.swapaxes(jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options), 1, 2)


def _batched_alike(tree: Any) -> Any:
    """Returns the same arrays. Under `vmap` each is batched if one of them is, along its first axis.

    The rules of JAX for cuDNN take this for granted. XLA removes a selection between an array and itself.
    """
    flags = [jnp.any(x.ravel()[:1] > 0) for x in jax.tree.leaves(tree)]
    flag = functools.reduce(jnp.logical_or, flags)
    return jax.tree.map(lambda x: jnp.where(flag, x, x), tree)


def _of_even_length(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, x.shape[2] % 2), (0, 0)])


def _flash_serves(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool) -> bool:
    """True if cuDNN's fused attention accepts this: half precision on an NVIDIA GPU from Ampere on, plain shapes.

    An odd length costs copies of queries, keys and values, which are worth it if the scores are larger than those.
    """
    width = query.shape[-1]
    lengths = query.shape[-2], key.shape[-2]
    return (
        query.ndim == key.ndim == value.ndim == 4
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and width == value.shape[-1] <= 128
        and width % 8 == 0
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[1] % key.shape[1] == 0
        and (not is_causal or query.shape[2] == key.shape[2])
        and (lengths[0] % 2 == lengths[1] % 2 == 0 or min(lengths) > width)
        and compute_capability() >= (8, 0)
    )


def attention_meta(query, key, value, *_args, **_kwargs):
    """Returns the layout of fused kernels, (batch, length, heads, width): models `.view` the transposed result."""
    if query.dim() != 4 or key.dim() != 4:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        return query.new_empty((*lead, query.shape[-2], value.shape[-1]))
    batch, heads, length, _ = query.shape
    return query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)


METAS[aten.scaled_dot_product_attention.default] = attention_meta


@decomposes(aten.scaled_dot_product_attention.default)
def attention_with_dropout(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Returns the same attention in torch operations, for the one case that draws random numbers."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * scale
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(~ones.tril(), float("-inf"))
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        if masked:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    alone = (scores == float("-inf")).all(-1, keepdim=True)  # rows that may attend to nothing yield zeros
    weights = torch.softmax(scores.masked_fill(alone, 0.0), dim=-1).masked_fill(alone, 0.0)
    weights = torch.dropout(weights, dropout_p, train=True)
    return (weights.to(value.dtype) @ value).to(query.dtype)


_LANES = 128
"""Lanes of a TPU's vector registers. Width and lengths have to be multiples of it."""


def fused_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, interpret=False
):
    """Computes `aten::scaled_dot_product_attention` by JAX's splash attention, for programs that run on a TPU.

    It serves causal attention, constant masks with at least one key for each query, and boolean masks computed from the
    data, `(length, length)` or `(batch, 1, length, length)`, skipping blocks without a key. Query, key and value are
    bfloat16 arrays `(batch, heads, length, width)` of one length, a multiple of 128 like the width. The backward pass
    recomputes the scores from the logarithms of their sums. The bridge's own lowering, which is the reference, computes
    every other attention. `interpret` runs the kernel on any machine, slowly.

    The kernel has a gradient, but no `jvp` and no gradient of the gradient. It takes the scaled query in bfloat16, so a
    scale that is not a power of two rounds once more.

    References:
      jax.experimental.pallas.ops.tpu.splash_attention
    """
    fits = not dropout_p and _fits(query, key, value)
    allowed = _allowed(attn_mask, is_causal, query.shape[-2]) if fits else None
    if fits and allowed is None and not is_causal:
        of_rows = _mask_of_rows(attn_mask, query.shape)
    else:
        of_rows = None
    if allowed is None and of_rows is None:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if key.shape[1] != query.shape[1]:
        key, value = (repeated(each, query.shape[1] // each.shape[1]) for each in (key, value))
    if scale is None:
        scale = query.shape[-1] ** -0.5
    query = (query.astype(jnp.float32) * scale).astype(query.dtype)
    if allowed is None:
        assert of_rows is not None
        return _masked_by_rows(query, key, value, of_rows, interpret)
    return _in_default_precision(jax.vmap(_kernel(allowed, query.shape[1], interpret)))(query, key, value)


def _mask_of_rows(attn_mask: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the mask of each row, `(batch, length, length)`, if it is the same for all heads; None if it is not."""
    batch, _, length, _ = shape
    known = (length, length), (1, 1, length, length), (batch, 1, length, length)
    if attn_mask is None or attn_mask.dtype != bool or attn_mask.shape not in known:
        return None
    return jnp.broadcast_to(jnp.reshape(attn_mask, (-1, length, length)), (batch, length, length))


def _masked_by_rows(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, interpret: bool) -> jax.Array:
    """Gives a query without a key zeros, as PyTorch does; the kernel gives it an average."""
    empty = ~mask.any(-1)
    out = _in_default_precision(jax.vmap(_kernel_of_masks(mask.shape[-1], interpret)))(query, key, value, mask)
    return jnp.where(empty[:, None, :, None], 0, out)


def _in_default_precision(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `function` with its derivative, traced without `jax.default_matmul_precision`.

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
    batch, heads, length, width = query.shape
    _, key_heads, *_ = key.shape
    return (
        key.shape == value.shape == (batch, key_heads, length, width)
        and heads % key_heads == 0
        and length % _LANES == 0
        and width % _LANES == 0
    )


def _allowed(attn_mask: Any, is_causal: bool, length: int) -> np.ndarray | None:
    """Returns which keys each query attends to; None for a mask that is not a constant for all rows."""
    causal = np.tri(length, dtype=bool)
    if attn_mask is None:
        if is_causal:
            return causal
        return None
    if isinstance(attn_mask, Tracer) or attn_mask.dtype != bool or attn_mask.shape != (length, length):
        return None
    if is_causal:
        allowed = np.asarray(attn_mask) & causal
    else:
        allowed = np.asarray(attn_mask)
    if allowed.any(axis=-1).all():
        return allowed
    return None


def _kernel(allowed: np.ndarray, heads: int, interpret: bool) -> Callable[..., Any]:
    """Returns splash attention over `(heads, length, width)`."""
    # Imported here: Pallas takes 0.15 s, and few programs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length = len(allowed)
    if (allowed == np.tri(length)).all():
        mask = masks.CausalMask(allowed.shape)
    else:
        mask = masks.NumpyMask(allowed)
    return splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads), block_sizes=_sizes(length, 1024, 1024, 2048, 512), interpret=interpret
    )


def _kernel_of_masks(length: int, interpret: bool) -> Callable[..., Any]:
    """Returns splash attention over `(heads, length, width)` with a mask `(length, length)` as an argument."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    sizes = _sizes(length, *[_MASKED_BLOCK] * 4)

    def call(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> Any:
        # One mask serves all heads.
        kernel = splash.make_splash_mha_single_device(mask[None], block_sizes=sizes, interpret=interpret)
        for name in ("fwd_mask_info", "dkv_mask_info"):  # its flag is an array, on which the kernel branches
            setattr(kernel, name, getattr(kernel, name)._replace(is_dynamic_mask=None))
        return kernel(query, key, value)

    return call


_MASKED_BLOCK = 896
"""Largest block of queries and of keys: masks of 1024 x 1024 do not fit the memory of a kernel on v4."""


def _sizes(length: int, queries: int, forward_keys: int, backward_keys: int, computed_keys: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    queries, forward_keys, backward_keys = (_block(length, most) for most in (queries, forward_keys, backward_keys))
    return splash.BlockSizes(
        block_q=queries,
        block_kv=forward_keys,
        block_kv_compute=_block(forward_keys, computed_keys),
        block_q_dkv=queries,
        block_kv_dkv=backward_keys,  # with several, gradients of the query are written for each and summed
        block_kv_dkv_compute=_block(backward_keys, computed_keys),
        use_fused_bwd_kernel=True,
    )


def _block(length: int, most: int) -> int:
    """Returns the largest block that divides a length; the limits are the fewest bundles that fit a v4's memory."""
    return next(size for size in range(most, 0, -_LANES) if length % size == 0)
