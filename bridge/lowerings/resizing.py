"""Resizing that averages over what it leaves out (`antialias=True`)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.lowerings.registry import lowers, widened

aten = torch.ops.aten


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -1/2."""
    x = np.abs(x)
    return np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0))


def _weights(size: int, wanted: int, kernel: Callable, reach: int, align: bool, factor: float | None) -> np.ndarray:
    """(wanted, size): what each output takes of each input."""
    if align:
        scale = (size - 1) / (wanted - 1) if wanted > 1 else 0.0
    else:
        scale = 1 / factor if factor else size / wanted
    stretch = max(scale, 1.0)
    centre = scale * (np.arange(wanted) + 0.5)
    first = np.maximum((centre - reach * stretch + 0.5).astype(int), 0)
    last = np.minimum((centre + reach * stretch + 0.5).astype(int), size)
    place = np.arange(size)
    inside = (place >= first[:, None]) & (place < last[:, None])
    weights = np.where(inside, kernel((place - centre[:, None] + 0.5) / stretch), 0)
    total = weights.sum(1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def _resized_bytes(x: jax.Array, weights: np.ndarray) -> jax.Array:
    """Along the last axis, in the fixed point of PyTorch's kernels: weights of 16 bits, one rounding."""
    places = next(p for p in range(23) if p == 22 or int(0.5 + weights.max(initial=0) * 2 ** (p + 1)) >= 2**15)
    whole = np.trunc(weights * 2**places + np.copysign(0.5, weights)).astype(np.int32)
    total = jnp.einsum("...w,Ww->...W", x.astype(jnp.int32), whole)
    return jnp.clip((total + (1 << places >> 1)) >> places, 0, 255)


def _resized(kernel, reach, x, output_size, align_corners, *factors) -> jax.Array:
    factors = factors[-2:] if factors and factors[-2:] != (None,) else (None, None)
    rows, columns = (
        _weights(size, wanted, kernel, reach, align_corners, factor)
        for size, wanted, factor in zip(x.shape[-2:], output_size, factors, strict=True)
    )
    if x.dtype == jnp.uint8:
        wide = _resized_bytes(x, columns)
        return jnp.swapaxes(_resized_bytes(jnp.swapaxes(wide, -1, -2), rows), -1, -2)
    return jnp.einsum("...hw,Hh,Ww->...HW", widened(x), rows.astype(np.float32), columns.astype(np.float32))


lowers(aten._upsample_bilinear2d_aa.default)(functools.partial(_resized, _triangle, 1))
lowers(aten._upsample_bicubic2d_aa.default)(functools.partial(_resized, _cubic, 2))
