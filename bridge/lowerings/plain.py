"""Functions of JAX for operations that torchax serves, so that its releases need not follow those of PyTorch.

They are used if torchax has no function for the operation. PyTorch composes its elementwise operations and reductions
of those of `torch.ops.prims`, so these serve hundreds of others.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import inlined
from bridge.tensor.arrays import jax_dtype

aten, prims = torch.ops.aten, torch.ops.prims

PLAIN: dict[Any, Callable] = {}
"""Operation -> function of arrays."""

_SAME_NAMES = """
    abs ceil cos cosh exp exp2 expm1 floor gcd hypot imag isfinite log log10 log1p log2 maximum minimum nextafter real
    remainder sign signbit sin sinh sqrt tan tanh trunc where fmax fmin fmod eq:equal ne:not_equal lt:less le:less_equal
    gt:greater ge:greater_equal add sub:subtract mul:multiply neg:negative reciprocal round pow:power acos:arccos
    acosh:arccosh asin:arcsin asinh:arcsinh atan:arctan atanh:arctanh atan2:arctan2 bitwise_and bitwise_or bitwise_xor
    bitwise_not:invert cbrt conj_physical:conj shift_left:left_shift shift_right_arithmetic:right_shift
"""
for _pair in _SAME_NAMES.split():
    _name, _, _of_jax = _pair.partition(":")
    PLAIN[getattr(prims, _name).default] = inlined(getattr(jnp, _of_jax or _name))
for _name in ("digamma", "erf", "erfc", "lgamma", "rsqrt", "igamma", "igammac"):
    PLAIN[getattr(prims, _name).default] = inlined(getattr(jax.lax, _name))


def plain(*ops: Any) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        PLAIN.update(dict.fromkeys(ops, function))
        return function

    return register


@plain(prims.div.default)
def _div(x: jax.Array, y: jax.Array) -> jax.Array:
    whole = jnp.issubdtype(jnp.result_type(x), jnp.integer)
    return jax.lax.div(x, y) if whole else jnp.divide(x, y)  # `lax.div` truncates integers


@plain(prims.convert_element_type.default)
def _convert(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    return jnp.asarray(x).astype(jax_dtype(dtype))


@plain(prims.cat.default)
def _cat(arrays: Sequence[jax.Array], dim: int) -> jax.Array:
    return jnp.concatenate(arrays, dim)


@plain(prims.rev.default)
def _rev(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.flip(x, tuple(dims))


@plain(prims.reshape.default)
def _reshape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return jnp.reshape(x, tuple(shape))


@plain(prims.iota.default)
def _iota(length: int, *, start: int, step: int, dtype: torch.dtype, **_of_pytorch: Any) -> jax.Array:
    return start + step * jnp.arange(length, dtype=jax_dtype(dtype))


@plain(prims.fill.default)
def _fill(x: jax.Array, value: Any) -> jax.Array:
    return jnp.full_like(x, value)


def _reduction(
    reduce: Callable, x: jax.Array, dims: Sequence[int] | None, *, output_dtype: torch.dtype | None = None
) -> jax.Array:
    result = reduce(x, None if dims is None else tuple(dims))
    return result if output_dtype is None else result.astype(jax_dtype(output_dtype))


for _op, _reduce in (
    (prims.sum, jnp.sum),
    (prims.prod, jnp.prod),
    (prims.amax, jnp.max),
    (prims.amin, jnp.min),
):
    PLAIN[_op.default] = functools.partial(_reduction, _reduce)


@plain(prims.var.default)
def _var(
    x: jax.Array,
    dims: Sequence[int] | None,
    correction: float | None = 1,
    *,
    output_dtype: torch.dtype | None = None,
) -> jax.Array:
    return _reduction(functools.partial(_corrected_var, correction=correction or 0), x, dims, output_dtype=output_dtype)


def _corrected_var(x: jax.Array, axes: tuple[int, ...] | None, correction: float) -> jax.Array:
    return jnp.var(x, axes, ddof=correction)  # pyright: ignore[reportArgumentType]


PLAIN[aten.where.self] = inlined(jnp.where)  # PyTorch's composition leaves a number as it is
PLAIN[aten.mm.default] = PLAIN[aten.bmm.default] = inlined(jnp.matmul)


def _place(find: Callable, x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    return find(x, dim, keepdims=keepdim)


PLAIN[aten.argmax.default] = functools.partial(_place, jnp.argmax)
PLAIN[aten.argmin.default] = functools.partial(_place, jnp.argmin)


@plain(aten.equal.default)
def _equal(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.array_equal(x, y)


@plain(aten.scatter.src)
def _scatter(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    if not x.ndim:
        return jnp.broadcast_to(src, ())
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    return x.at[tuple(places)].set(src[tuple(map(slice, index.shape))])


@plain(aten.scatter.value)
def _scatter_value(x: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    return _scatter(x, dim, index, jnp.full(index.shape, value, x.dtype))


@plain(aten.masked_scatter.default)
def _masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    x, mask = jnp.broadcast_arrays(x, mask)
    places = jnp.cumsum(mask) - 1  # of the flat source, in the order of the mask's true entries
    taken = source.ravel()[jnp.maximum(places, 0)] if source.size else jnp.zeros(mask.size, x.dtype)
    return jnp.where(mask, taken.reshape(mask.shape), x)


@plain(aten.constant_pad_nd.default)
def _constant_pad(x: jax.Array, pad: Sequence[int], value: Any = 0) -> jax.Array:
    """PyTorch's composition writes into a new tensor; it names the last dimension first."""
    pairs = [(pad[2 * i], pad[2 * i + 1], 0) for i in range(len(pad) // 2)]
    config = [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), config)


@plain(aten.linalg_solve_triangular.default)
def _solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, batch + a.shape[-2:])
    b = jnp.broadcast_to(b, batch + b.shape[-2:])
    return jax.lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


PLAIN[aten.linalg_matrix_exp.default] = inlined(jax.scipy.linalg.expm)


def _scaled(normalization: int, forward: bool) -> str:
    """Returns the name of the scaling that PyTorch numbers 0, 1 and 2."""
    return {0: "backward" if forward else "forward", 1: "ortho", 2: "forward" if forward else "backward"}[normalization]


@plain(aten._fft_c2c.default)
def _fft_c2c(x: jax.Array, dims: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    transform = jnp.fft.fftn if forward else jnp.fft.ifftn
    return transform(x, axes=tuple(dims), norm=_scaled(normalization, forward))


@plain(aten._fft_r2c.default)
def _fft_r2c(x: jax.Array, dims: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    if onesided:
        return jnp.fft.rfftn(x, axes=tuple(dims), norm=_scaled(normalization, True))
    return jnp.fft.fftn(x, axes=tuple(dims), norm=_scaled(normalization, True))
