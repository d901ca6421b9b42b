"""Quantization simulated in floating point, with the straight-through gradient of PyTorch."""

import jax
import jax.numpy as jnp
import torch

from bridge.cells import regraft
from bridge.lowerings.registry import METAS, lowers

aten = torch.ops.aten


def _quantized(x, scale, zero_point, low: int, high: int) -> tuple[jax.Array, jax.Array]:
    """The values, and where they were not clipped: there the gradient passes as it is."""
    steps = jnp.round(x * (1 / jnp.asarray(scale, jnp.float32)).astype(x.dtype)) + zero_point
    inside = (steps >= low) & (steps <= high)
    values = (jnp.clip(steps, low, high) - zero_point) * scale
    return regraft(values.astype(x.dtype), jnp.where(inside, x, 0)), inside


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize(x, scale, zero_point, low, high):
    return _quantized(x, scale, zero_point, low, high)


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_by_tensors(x, scale, zero_point, enabled, low, high):
    scale, zero_point = jax.lax.stop_gradient(scale).reshape(()), zero_point.reshape(())
    values, inside = _quantized(x, scale, zero_point, low, high)
    on = enabled.reshape(()) > 0
    return jnp.where(on, values, x), inside | ~on


@lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_by_channel(x, scale, zero_point, axis, low, high):
    shape = [-1 if d == axis % x.ndim else 1 for d in range(x.ndim)]
    return _quantized(x, jax.lax.stop_gradient(scale).reshape(shape), zero_point.reshape(shape), low, high)


def _meta(x: torch.Tensor, *_settings) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


for op in (
    aten.fake_quantize_per_tensor_affine_cachemask.default,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
    aten.fake_quantize_per_channel_affine_cachemask.default,
):
    METAS[op] = _meta
