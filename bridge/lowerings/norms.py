"""Normalizations, including softmax, with statistics in float32 for any input dtype."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import METAS, decomposes, inlined, lowers, widened
from bridge.tensor.arrays import jax_dtype

aten = torch.ops.aten


@lowers(aten._softmax.default)
@inlined
def softmax(x, dim, _half_to_float):
    return jax.nn.softmax(widened(x), dim)


@lowers(aten._safe_softmax.default)
def safe_softmax(x, dim, dtype=None):
    """Returns zeros, with no gradient, where all entries are -inf."""
    x = widened(x if dtype is None else x.astype(jax_dtype(dtype)))
    empty = jnp.all(jnp.isneginf(x), dim, keepdims=True)
    return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, x), dim))


@lowers(aten._log_softmax.default)
@inlined
def log_softmax(x, dim, _half_to_float):
    return jax.nn.log_softmax(widened(x), dim)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _standardize(x: jax.Array, axes: tuple[int, ...], eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `x` with mean 0 and variance 1 along `axes`, the mean and the inverse deviation."""
    mean = jnp.mean(x, axes, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axes, keepdims=True) + eps)
    return centred * rstd, mean, rstd


@_standardize.defjvp
def _standardize_jvp(axes, eps, primals, tangents):
    """Written in terms of the result, as PyTorch's backward is.

    JAX's own derivative goes through the cube of the inverse deviation, which is zero in float32 for inputs beyond
    1e13: the part of the gradient due to the variance would then be lost while the values are still right.
    """
    (x,) = primals
    (dx,) = tangents
    out, mean, rstd = _standardize(x, axes, eps)
    dmean = jnp.mean(dx, axes, keepdims=True)
    scaled = (dx - dmean) * rstd
    shared = jnp.mean(scaled * out, axes, keepdims=True)
    return (out, mean, rstd), (scaled - out * shared, dmean, -rstd * shared)


def _affine(x: Any, weight: Any, bias: Any, shape: Sequence[int] | None = None) -> Any:
    """Takes arrays or tensors; `weight` and `bias` may be None, and are first reshaped to `shape`."""
    if weight is not None:
        x = x * (weight if shape is None else weight.reshape(shape))
    if bias is not None:
        x = x + (bias if shape is None else bias.reshape(shape))
    return x


@lowers(aten.native_layer_norm.default)
@inlined
def layer_norm(x, normalized_shape, weight, bias, eps):
    """The mean and the inverse deviation carry no gradient, as in PyTorch, whose backward ignores them."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    out, mean, rstd = _standardize(widened(x), axes, eps)
    return _affine(out, weight, bias).astype(x.dtype), jax.lax.stop_gradient(mean), jax.lax.stop_gradient(rstd)


@lowers(aten.native_group_norm.default)
@inlined
def group_norm(x, weight, bias, batch, channels, size, groups, eps):
    wide = jnp.reshape(widened(x), (batch, groups, channels // groups * size))
    out, mean, rstd = _standardize(wide, (-1,), eps)
    shape = (1, channels) + (1,) * (x.ndim - 2)
    out = _affine(jnp.reshape(out, x.shape), weight, bias, shape)
    return out.astype(x.dtype), mean[..., 0], rstd[..., 0]


@lowers(aten._weight_norm_interface.default)
def weight_norm(v, g, dim=0):
    """Every slice along `dim` has its own norm; in a vector, every element. The norms have no gradient."""
    wide = widened(v)
    axes = tuple(d for d in range(v.ndim) if d != dim % v.ndim)
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axes, keepdims=True))
    return wide * (g / norm), jax.lax.stop_gradient(norm)


METAS[aten._weight_norm_interface.default] = lambda v, g, dim=0: (torch.empty_like(v), torch.empty_like(g))


@decomposes(aten.native_batch_norm.default)
def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """`native_batch_norm` writes the running statistics without saying so in its schema; here the write is visible."""
    for name, statistic in (("running_mean", running_mean), ("running_var", running_var)):
        if statistic is not None and statistic.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"The function 'native_batch_norm' is not differentiable with respect to argument '{name}'. This input "
                "cannot have requires_grad True."
            )
    axes = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if training or running_mean is None:
        mean = wide.mean(axes)
        var = wide.var(axes, unbiased=False)
        if running_mean is not None:
            count = x.numel() // x.shape[1]
            with torch.no_grad():
                running_mean.mul_(1 - momentum).add_(mean * momentum)
                running_var.mul_(1 - momentum).add_(var * (momentum * count / max(count - 1, 1)))
    else:
        mean = running_mean.to(wide.dtype)
        var = running_var.to(wide.dtype)
    invstd = torch.rsqrt(var + eps)
    out = (wide - mean.view(shape)) * invstd.view(shape)
    out = _affine(out, weight, bias, shape)
    if not training:  # PyTorch saves nothing in this case
        return out.to(x.dtype), mean.new_empty(0), invstd.new_empty(0)
    return out.to(x.dtype), mean.detach(), invstd.detach()
