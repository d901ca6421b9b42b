"""Convolution, pooling and resizing; and strides of results where PyTorch's meta device differs from its CPU.

Strides decide whether `flatten` and `reshape` copy, and so whether a later write reaches the source, and whether `view`
is possible. If all arguments are contiguous, both give the same strides, and nothing more is computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compat.torch import convolution_format
from bridge._compat.torchax import decomposition
from bridge.lowerings.creation import broadcast
from bridge.lowerings.norms import batch_norm
from bridge.lowerings.registry import DECOMPOSITIONS, METAS, decomposes, lowers, widened
from bridge.tensor.tensor import regraft

aten = torch.ops.aten
prims = torch.ops.prims


@lowers(aten.convolution.default)
def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    rank = weight.ndim - 2
    stride, padding, dilation, extra = (
        tuple(v) * (rank // len(v)) for v in (stride, padding, dilation, output_padding)
    )
    sizes = weight.shape[2:]
    if transposed:  # the gradient of a convolution by its input: holes in the input, the kernel reversed
        weight = jnp.flip(weight, tuple(range(2, rank + 2)))
        weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
        weight = weight.reshape(-1, *weight.shape[2:])
        reach = [d * (k - 1) for d, k in zip(dilation, sizes, strict=True)]
        pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
        stride, holes = (1,) * rank, stride
    else:
        pads = [(p, p) for p in padding]
        holes = (1,) * rank
    out = jax.lax.conv_general_dilated(
        x, weight, stride, pads, lhs_dilation=holes, rhs_dilation=dilation, feature_group_count=groups
    )
    if bias is None:
        return out
    return out + broadcast(bias.reshape(1, -1, *(1,) * rank), out.shape)


def _gathered_max(x: jax.Array, windows: Sequence[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Returns the largest entry of every window, and its place in the flattened spatial dimensions.

    `windows` has the positions (outputs, window) along each dimension. The first of equal entries counts.
    """
    n = len(windows)
    sizes = x.shape[-n:]
    place = np.zeros((1,) * 2 * n, int)
    for d, (position, size) in enumerate(zip(windows, sizes, strict=True)):
        place = place * size + np.expand_dims(position, [axis for axis in range(2 * n) if axis not in (d, n + d)])
    place = np.reshape(place, (*place.shape[:n], math.prod(place.shape[n:])))
    entries = jnp.reshape(x, (*x.shape[:-n], math.prod(sizes)))[..., place]
    best = jnp.argmax(entries, -1, keepdims=True)
    places = jnp.broadcast_to(place, entries.shape)
    return jnp.take_along_axis(entries, best, -1)[..., 0], jnp.take_along_axis(places, best, -1)[..., 0]


def _inside(position: np.ndarray, size: int) -> np.ndarray:
    """Returns `position` (outputs, window), with the first one inside the input in place of those outside."""
    inside = (position >= 0) & (position < size)
    first = np.take_along_axis(position, np.argmax(inside, axis=1)[:, None], 1)
    return np.where(inside, position, first)


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool(x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
    n = x.ndim - 2 if len(kernel) == 1 else len(kernel)
    kernel, padding, dilation = (_each(v, n) for v in (kernel, padding, dilation))
    stride = _each(stride, n) if stride else kernel
    windows = []
    ends = []
    for size, k, s, p, d in zip(x.shape[-n:], kernel, stride, padding, dilation, strict=True):
        count = _outputs(size, k, s, p, d, ceil_mode)
        windows.append(_inside(np.arange(count)[:, None] * s - p + np.arange(k) * d, size))
        ends.append((count - 1) * s + (k - 1) * d + 1 - p - size)
    values, indices = _gathered_max(x, windows)
    if max(dilation) == 1 and x.size:
        # The backward of this form is one fused operation; JAX has none for dilated windows.
        if jnp.issubdtype(x.dtype, jnp.floating):
            lowest = -np.inf
        else:
            lowest = jnp.iinfo(x.dtype).min
        values = _reduce_windows(x, np.asarray(lowest, x.dtype), jax.lax.max, kernel, stride, padding, ends)
    return values, indices


def _reduce_windows(x, start, function, kernel, stride, padding, ends):
    """Reduces windows. `ends`: padding at the far side; negative where the last entries are in no window."""
    lead = x.ndim - len(kernel)
    used = [slice(None, size + min(end, 0)) for size, end in zip(x.shape[lead:], ends, strict=True)]
    pads = [(p, max(end, 0)) for p, end in zip(padding, ends, strict=True)]
    alone = (1,) * lead
    window = (*alone, *kernel)
    return jax.lax.reduce_window(x[..., *used], start, function, window, (*alone, *stride), [(0, 0)] * lead + pads)


@lowers(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(x, kernel, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """Counts the padding that a window covers, if asked, but never what `ceil_mode` lets stick out beyond it."""
    n = x.ndim - 2 if len(kernel) == 1 else len(kernel)
    kernel = _each(kernel, n)
    padding = _each(padding, n)
    stride = _each(stride, n) if stride else kernel
    divisor = np.ones((), np.float32)
    ends = []
    for size, k, s, p in zip(x.shape[-n:], kernel, stride, padding, strict=True):
        first = np.arange(_outputs(size, k, s, p, 1, ceil_mode)) * s - p
        last = np.minimum(first + k, size + p)
        ends.append(int(first[-1]) + k - size if len(first) else 0)
        if count_include_pad:
            counted = last - first
        else:
            counted = np.minimum(last, size) - np.maximum(first, 0)
        divisor = divisor[..., None] * counted.astype(np.float32)
    total = _reduce_windows(widened(x), 0.0, jax.lax.add, kernel, stride, padding, ends)
    return total / (divisor if divisor_override is None else divisor_override)


def _adaptive_windows(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions (outputs, window), and True for those in the window; the others repeat the first."""
    starts = np.arange(count)[:, None] * size // max(count, 1)
    ends = -(-(np.arange(count)[:, None] + 1) * size // max(count, 1))
    position = starts + np.arange(np.max(ends - starts, initial=1))
    return np.where(position < ends, position, starts), position < ends


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(x, output_size):
    sizes = x.shape[-len(output_size) :]
    return _gathered_max(x, [_adaptive_windows(*each)[0] for each in zip(sizes, output_size, strict=True)])


@lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(x, output_size):
    sizes = x.shape[-len(output_size) :]
    if all(count and size % count == 0 for size, count in zip(sizes, output_size, strict=True)):
        return avg_pool(x, [size // count for size, count in zip(sizes, output_size, strict=True)])
    x = widened(x)
    for axis, count in zip(range(x.ndim - len(output_size), x.ndim), output_size, strict=True):
        position, inside = _adaptive_windows(x.shape[axis], count)
        entries = jnp.moveaxis(jnp.take(x, position, axis), (axis, axis + 1), (-2, -1))
        means = jnp.sum(jnp.where(inside, entries, 0), -1) / np.sum(inside, -1)
        x = jnp.moveaxis(means, -1, axis)
    return x


@lowers(aten.max_unpool2d.default, aten.max_unpool3d.default)
def max_unpool(x, indices, output_size, stride=None, padding=None):
    """Gives entries that share a place its whole gradient each, whichever of them it holds."""
    n = len(output_size)
    lead = x.shape[:-n]
    rows = math.prod(lead)
    places = jnp.reshape(indices, (math.prod(lead), -1))
    at = jnp.zeros((rows, math.prod(output_size)), x.dtype).at[jnp.arange(rows)[:, None], places]
    values = jnp.reshape(x, (rows, -1))
    return jnp.reshape(regraft(at.set(jax.lax.stop_gradient(values)), at.add(values)), (*lead, *output_size))


def _each(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        return values * n
    return values


def _outputs(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + padding:  # no window starts in the padding on the right
        count -= 1
    return count


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Returns Keys' cubic kernel with a = -1/2."""
    x = np.abs(x)
    return np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0))


def _weights(size: int, wanted: int, kernel: Callable, align: bool, factor: float | None) -> np.ndarray:
    """Returns the share (wanted, size) that each input has in each output."""
    if align:
        scale = (size - 1) / (wanted - 1) if wanted > 1 else 0.0
    else:
        scale = 1 / factor if factor else size / wanted
    centre = scale * (np.arange(wanted)[:, None] + 0.5)
    weights = kernel((np.arange(size) - centre + 0.5) / max(scale, 1.0))
    return weights / weights.sum(1, keepdims=True)


def _resized_bytes(x: jax.Array, weights: np.ndarray) -> jax.Array:
    """Resizes the last axis in the fixed point of PyTorch's kernels: weights of 16 bits, one rounding."""
    largest = weights.max(initial=0)
    places = 0  # as many binary places as the largest weight leaves of 16 bits, and at most 22
    while places < 22 and int(0.5 + largest * 2 ** (places + 1)) < 2**15:
        places += 1
    whole = np.trunc(weights * 2**places + np.copysign(0.5, weights)).astype(np.int32)
    total = jnp.einsum("...w,Ww->...W", x.astype(jnp.int32), whole)
    half = 1 << places >> 1  # zero if there are no places
    return jnp.clip((total + half) >> places, 0, 255)


def _resized(kernel, x, output_size, align_corners, *factors) -> jax.Array:
    if factors and factors[-2:] != (None,):
        factors = factors[-2:]
    else:
        factors = (None, None)
    rows, columns = (
        _weights(size, wanted, kernel, align_corners, factor)
        for size, wanted, factor in zip(x.shape[-2:], output_size, factors, strict=True)
    )
    if x.dtype == jnp.uint8:
        wide = _resized_bytes(x, columns)
        return jnp.swapaxes(_resized_bytes(jnp.swapaxes(wide, -1, -2), rows), -1, -2)
    return jnp.einsum("...hw,Hh,Ww->...HW", widened(x), rows.astype(np.float32), columns.astype(np.float32))


lowers(aten._upsample_bilinear2d_aa.default)(functools.partial(_resized, _triangle))
lowers(aten._upsample_bicubic2d_aa.default)(functools.partial(_resized, _cubic))


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _suggested(x: torch.Tensor) -> torch.memory_format:
    """Returns the format that PyTorch's `suggest_memory_format` gives."""
    last = _CHANNELS_LAST.get(x.dim())
    if last and x.is_contiguous(memory_format=last) and not x.is_contiguous():
        return last
    return torch.contiguous_format


def _plain(x: torch.Tensor) -> bool:
    """True if no other memory format describes the tensor: with a kernel of size 1, two formats may."""
    return x.stride() == torch.empty(x.shape, device="meta").stride()


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, *settings: Any) -> torch.Tensor:
    out = aten.convolution.default(x, weight, bias, *settings)
    if _plain(x) and _plain(weight):
        return out
    if x.dim() != 3:
        return torch.empty_like(out, memory_format=convolution_format(x, weight, *settings))
    stride, padding, dilation, transposed, extra, groups = settings  # PyTorch makes the input an image of one row
    rows = [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *extra], groups
    chosen = convolution_format(x.contiguous().unsqueeze(2), weight.unsqueeze(2), *rows)
    return torch.empty_like(out.unsqueeze(2), memory_format=chosen).squeeze(2)


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns it in the layout of a sum of the same tensors, whose meta kernel is that of the CPU."""
    out = func(*args, **kwargs)
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if all(t.is_contiguous() for t in tensors):
        return out
    return functools.reduce(aten.add.Tensor, [torch.empty_like(t, dtype=out.dtype) for t in tensors])


def _rolled(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=_suggested(x))


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns contiguous tensors, as PyTorch's kernel does."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


METAS[aten.convolution.default] = _convolution
METAS[aten.roll.default] = _rolled
METAS[aten.log_sigmoid_forward.default] = _log_sigmoid
for _op in (
    aten.copysign.Tensor,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.logaddexp.default,
    aten.xlogy.Tensor,
    aten.special_xlog1py.default,
):
    METAS[_op] = functools.partial(_elementwise, _op)


@decomposes(aten.native_batch_norm.default)
def formatted_batch_norm(x, *settings):
    out, *statistics = batch_norm(x, *settings)
    return out.contiguous(memory_format=_suggested(x)), *statistics


def _copied(op: Any, x: torch.Tensor, *settings: Any) -> torch.Tensor:
    """Runs the decomposition of `op` in new memory: PyTorch's kernel returns no view, even if it changes nothing."""
    made_of = decomposition(op)
    assert made_of is not None
    return made_of(x, *settings).clone(memory_format=_suggested(x))


for _op in (aten.channel_shuffle.default, aten.replication_pad2d.default, aten.replication_pad3d.default):
    DECOMPOSITIONS[_op] = functools.partial(_copied, _op)


@lowers(prims.copy_strided.default)
def copy_strided(x, _stride):
    """Copies; the strides are those of the result on the meta device."""
    return x
