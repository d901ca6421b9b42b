"""Pooling, with PyTorch's indices, its choice among equal entries (the first) and its count of padding."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.cells import regraft
from bridge.lowerings.registry import LOWERINGS, METAS, lowers, widened

aten = torch.ops.aten

Windows = list[tuple[np.ndarray, np.ndarray]]
"""For each spatial dimension: positions (outputs, window), and which of them lie inside the input."""


def _gathered_max(x: jax.Array, windows: Windows) -> tuple[jax.Array, jax.Array]:
    """The largest entry of every window, and its place in the flattened spatial dimensions."""
    n = len(windows)
    sizes = x.shape[-n:]
    # Outputs and window of dimension d lie on axes d and n + d.
    spread = [
        tuple(
            np.reshape(a, [a.shape[0] if i == d else a.shape[1] if i == n + d else 1 for i in range(2 * n)]) for a in w
        )
        for d, w in enumerate(windows)
    ]
    outputs = tuple(p.shape[0] for p, _ in windows)
    shape = (*outputs, math.prod(p.shape[1] for p, _ in windows))
    whole = (*outputs, *(p.shape[1] for p, _ in windows))
    inside = np.broadcast_to(functools.reduce(np.logical_and, [i for _, i in spread]), whole).reshape(shape)
    place = sum(p * math.prod(sizes[d + 1 :]) for d, (p, _) in enumerate(spread))
    place = np.broadcast_to(np.where(inside.reshape(whole), place, 0), whole).reshape(shape)
    flat = jnp.reshape(x, (*x.shape[:-n], math.prod(sizes)))[..., place]
    entries = jax.lax.stop_gradient(jnp.where(inside, flat, _lowest(x.dtype)))
    largest = jnp.max(entries, -1, keepdims=True)
    # An entry may be as low as what stands for the padding. Of equal ones the first counts, of several nan the last.
    best = jnp.argmax(entries, axis=-1)
    is_inside = jnp.take_along_axis(jnp.broadcast_to(inside, entries.shape), best[..., None], -1)[..., 0]
    best = jnp.where(is_inside, best, np.argmax(inside, axis=-1))
    last_nan = entries.shape[-1] - 1 - jnp.argmax((inside & jnp.isnan(entries))[..., ::-1], axis=-1)
    best = jnp.where(jnp.isnan(largest[..., 0]), last_nan, best)[..., None]
    values = jnp.take_along_axis(flat, best, -1)[..., 0]
    return values, jnp.take_along_axis(jnp.broadcast_to(place, flat.shape), best, -1)[..., 0]


def _lowest(dtype: np.dtype) -> np.ndarray:
    return np.asarray(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool(x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
    n = x.ndim - 2 if len(kernel) == 1 else len(kernel)
    kernel, padding, dilation = (_each(v, n) for v in (kernel, padding, dilation))
    stride = _each(stride, n) if stride else kernel
    windows, ends = [], []
    for size, k, s, p, d in zip(x.shape[-n:], kernel, stride, padding, dilation, strict=True):
        count = _outputs(size, k, s, p, d, ceil_mode)
        position = np.arange(count)[:, None] * s - p + np.arange(k)[None] * d
        windows.append((position, (position >= 0) & (position < size)))
        ends.append((count - 1) * s + (k - 1) * d + 1 - p - size)
    values, indices = _gathered_max(x, windows)
    if max(dilation) == 1 and x.size:
        # The backward of this form is one fused operation; JAX has none for dilated windows.
        values = _reduce_windows(x, _lowest(x.dtype), jax.lax.max, kernel, stride, padding, ends)
    return values, indices


def _max_pool_backward(n: int, indices_at: int) -> Callable[..., jax.Array]:
    """Of `n` spatial dimensions, as an operation of its own: the gradient of `max_pool` does not come by here."""

    def lowering(gradient, x, *rest):
        return _to_indices(gradient, x, rest[indices_at], n)

    return lowering


LOWERINGS |= {
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2, 5),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3, 5),
    aten.adaptive_max_pool2d_backward.default: _max_pool_backward(2, 0),
    aten.adaptive_max_pool3d_backward.default: _max_pool_backward(3, 0),
    aten.fractional_max_pool2d_backward.default: _max_pool_backward(2, 2),
    aten.fractional_max_pool3d_backward.default: _max_pool_backward(3, 2),
}


METAS[aten.fractional_max_pool3d_backward.default] = lambda _, x, *__: torch.empty_like(x)


def _to_indices(gradient: jax.Array, x: jax.Array, indices: jax.Array, n: int) -> jax.Array:
    """Each entry of the gradient at its index into the last `n` dimensions of `x`; those at one place are added."""
    rows, size = math.prod(x.shape[:-n]), math.prod(x.shape[-n:])
    at = (jnp.arange(rows)[:, None], jnp.reshape(indices, (rows, -1)))
    gradient = widened(jnp.reshape(gradient, (rows, -1)))
    return jnp.reshape(jnp.zeros((rows, size), gradient.dtype).at[at].add(gradient), x.shape)


def _reduce_windows(x, start, function, kernel, stride, padding, ends):
    """`ends`: padding on the far side of each dimension; negative where the last entries are in no window."""
    n = len(kernel)
    x = x[(..., *(slice(None, size + min(end, 0)) for size, end in zip(x.shape[-n:], ends, strict=True)))]
    lead = (1,) * (x.ndim - n)
    pads = ((0, 0),) * (x.ndim - n) + tuple((p, max(end, 0)) for p, end in zip(padding, ends, strict=True))
    return jax.lax.reduce_window(x, start, function, lead + kernel, lead + stride, pads)


@lowers(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(x, kernel, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """A window counts the padding it covers, if so asked, but never what `ceil_mode` lets stick out behind that."""
    n = x.ndim - 2 if len(kernel) == 1 else len(kernel)
    kernel, padding = _each(kernel, n), _each(padding, n)
    stride = _each(stride, n) if stride else kernel
    divisor, ends = np.ones((), np.float32), []
    for size, k, s, p in zip(x.shape[-n:], kernel, stride, padding, strict=True):
        first = np.arange(_outputs(size, k, s, p, 1, ceil_mode)) * s - p
        last = np.minimum(first + k, size + p)
        ends.append(int(first[-1]) + k - size if len(first) else 0)
        counted = last - first if count_include_pad else np.minimum(last, size) - np.maximum(first, 0)
        divisor = divisor[..., None] * counted.astype(np.float32)
    total = _reduce_windows(widened(x), 0.0, jax.lax.add, kernel, stride, padding, ends)
    return total / (divisor if divisor_override is None else divisor_override)


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(x, output_size):
    return _gathered_max(x, [*map(_adaptive_windows, x.shape[-len(output_size) :], output_size)])


def _adaptive_windows(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.arange(count) * size // max(count, 1)
    ends = -(-(np.arange(count) + 1) * size // max(count, 1))
    position = starts[:, None] + np.arange(max(ends - starts, default=1))[None]
    return position, position < ends[:, None]


@lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(x, output_size):
    sizes = x.shape[-len(output_size) :]
    if all(count and size % count == 0 for size, count in zip(sizes, output_size, strict=True)):
        return avg_pool(x, [size // count for size, count in zip(sizes, output_size, strict=True)])
    x = widened(x)
    for axis, count in zip(range(x.ndim - len(output_size), x.ndim), output_size, strict=True):
        position, inside = _adaptive_windows(x.shape[axis], count)
        entries = jnp.moveaxis(jnp.take(x, np.where(inside, position, 0), axis), (axis, axis + 1), (-2, -1))
        means = jnp.sum(jnp.where(inside, entries, 0), -1) / np.sum(inside, -1)
        x = jnp.moveaxis(means, -1, axis)
    return x


@lowers(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(x, kernel, output_size, samples):
    """Windows begin at the multiples of a fraction (Graham 2014), each channel's shifted by its random numbers."""
    n = len(kernel)
    lead, sizes = x.shape[:-n], x.shape[-n:]
    samples = jnp.reshape(samples, (*lead, n))
    place = jnp.zeros((), jnp.int32)
    for d, (size, width, count) in enumerate(zip(sizes, kernel, output_size, strict=True)):
        sample = samples[..., n - 1 - d if n == 2 else d, None]  # of two dimensions, the last one's comes first
        step = np.asarray((size - width) / max(count - 1, 1), x.dtype)
        starts = ((np.arange(count) + sample) * step).astype(jnp.int32) - (sample * step).astype(jnp.int32)
        starts = jnp.where(np.arange(count) == count - 1, size - width, starts)
        position = starts[..., None] + np.arange(width)
        spread = [count if i == d else width if i == n + d else 1 for i in range(2 * n)]
        place = place * size + jnp.reshape(position, (*lead, *spread))
    place = jnp.reshape(place, (*lead, math.prod(output_size), math.prod(kernel)))
    entries = jnp.take_along_axis(jnp.reshape(x, (*lead, 1, math.prod(sizes))), place, -1)
    best = jnp.argmax(entries, -1, keepdims=True)
    return tuple(jnp.reshape(jnp.take_along_axis(a, best, -1), (*lead, *output_size)) for a in (entries, place))


@lowers(aten.max_unpool2d.default, aten.max_unpool3d.default)
def max_unpool(x, indices, output_size, stride=None, padding=None):
    """Entries that share a place have its gradient together, whichever of them it holds."""
    n = len(output_size)
    lead = x.shape[:-n]
    rows, places = math.prod(lead), jnp.reshape(indices, (math.prod(lead), -1))
    at = jnp.zeros((rows, math.prod(output_size)), x.dtype).at[jnp.arange(rows)[:, None], places]
    values = jnp.reshape(x, (rows, -1))
    return jnp.reshape(regraft(at.set(jax.lax.stop_gradient(values)), at.add(values)), (*lead, *output_size))


def _each(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def _outputs(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + padding:  # no window starts in the padding on the right
        count -= 1
    return count
