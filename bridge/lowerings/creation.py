"""Constants, copies, casts, and broadcasts of narrow types, whose gradient is summed in float32 and rounded once."""

import functools
import operator

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import METAS, inlined, lowers, widened
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.tensor import regraft

aten = torch.ops.aten
prims = torch.ops.prims


@inlined
def _cast(x, dtype):
    """Wraps floats beyond a small integer type, as PyTorch's CPU does; XLA would give the nearest number.

    Those beyond float8_e4m3fn, which has no infinity, become its largest number, where XLA gives nan.
    """
    if dtype == jnp.float8_e4m3fn and jnp.issubdtype(x.dtype, jnp.inexact):
        largest = float(jnp.finfo(dtype).max)
        x = regraft(jnp.clip(x, -largest, largest), x)
    small = jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize < 4
    return (x.astype(jnp.int32) if small and jnp.issubdtype(x.dtype, jnp.floating) else x).astype(dtype)


@lowers(aten._to_copy.default)
def to_copy(x, *, dtype=None, **_placement):
    if dtype is None:
        return x
    return _cast(x, jax_dtype(dtype))


@lowers(prims.convert_element_type.default)
def convert_element_type(x, dtype):
    """PyTorch's own decompositions cast with this operation."""
    return to_copy(x, dtype=dtype)


@lowers(aten.clone.default, aten.lift_fresh_copy.default)
def clone(x, **_layout):
    return x


@lowers(aten.permute_copy.default)
def permute_copy(x, dims):
    """A tensor without dimensions arrives with one, as for every operation with a `dim`."""
    if dims:
        return jnp.transpose(x, dims)
    return x


@lowers(aten.copy.default)
def copy(destination, source, non_blocking=False):
    return _cast(jnp.broadcast_to(source, destination.shape), destination.dtype)


def _of_size(number, size, *_stride, dtype=None, **_placement):
    """Returns zeros: `torch.empty` promises nothing, and newer JAX would return arbitrary memory."""
    return jnp.full(tuple(size), number, jax_dtype(dtype or torch.get_default_dtype()))


def _like(number, x, size=None, *, dtype=None, **_placement):
    shape = x.shape if size is None else tuple(size)
    return jnp.full(shape, number, x.dtype if dtype is None else jax_dtype(dtype))


lowers(aten.zeros.default, aten.empty.memory_format, aten.empty_strided.default, aten._efficientzerotensor.default)(
    functools.partial(_of_size, 0)
)
lowers(aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default)(
    functools.partial(_like, 0)
)
lowers(aten.ones.default)(functools.partial(_of_size, 1))
lowers(aten.ones_like.default, aten.new_ones.default)(functools.partial(_like, 1))


@lowers(aten.full.default)
def full(size, fill_value, *, dtype=None, **_placement):
    return jnp.full(tuple(size), fill_value, None if dtype is None else jax_dtype(dtype))


@lowers(aten.full_like.default)
def full_like(x, fill_value, **settings):
    return _like(fill_value, x, **settings)


@lowers(aten.new_full.default)
def new_full(x, size, fill_value, **settings):
    return _like(fill_value, x, size, **settings)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(value, *, dtype=None, **_placement):
    return jnp.asarray(value, jax_dtype(dtype or torch.get_default_dtype()))


def plain_zeros_meta(size, *, dtype=None, **_placement):
    """PyTorch's forward mode makes zeros without memory, for which its own meta kernels take shortcuts."""
    return torch.empty(size, dtype=dtype, device="meta")


METAS[aten._efficientzerotensor.default] = plain_zeros_meta


METAS[aten.view_copy.default] = lambda x, size: x.clone(memory_format=torch.contiguous_format).view(size)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x, mask, value):
    return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)


NARROW = (jnp.bfloat16, jnp.float16)


def broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `x` with that shape. JAX sums its gradient in the dtype of `x`: ones, in bfloat16, only up to 256."""
    if x.shape == shape or x.dtype not in NARROW:
        return jnp.broadcast_to(x, shape)
    return _broadcast_narrow(shape, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _broadcast_narrow(shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, shape)


@_broadcast_narrow.defjvp
def _broadcast_narrow_jvp(shape, primals, tangents):
    """Only the transpose of this tangent is compiled for a gradient."""
    (x,) = primals
    (dx,) = tangents
    return _broadcast_narrow(shape, x), jnp.broadcast_to(widened(dx), shape).astype(x.dtype)


@lowers(aten.repeat.default)
def repeat(x, repeats):
    shape = (1,) * (len(repeats) - x.ndim) + x.shape
    copies = tuple(size for sizes in zip(repeats, shape, strict=True) for size in sizes)
    apart = jnp.reshape(x, tuple(each for size in shape for each in (1, size)))
    return jnp.reshape(broadcast(apart, copies), tuple(map(operator.mul, repeats, shape)))
