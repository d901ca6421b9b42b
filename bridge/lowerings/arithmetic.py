"""Functions of two or more elements, with PyTorch's gradient at ties, boundaries, zeros and nan.

The derivatives are the formulas of PyTorch; where one says 0 * inf or shares a tie, so does the other.
"""

import functools

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.derivatives import converted, with_derivatives
from bridge.lowerings.registry import METAS, inlined, lowers, of_widened, widened

aten = torch.ops.aten


@lowers(aten.add.Tensor, aten.add.Scalar)
@inlined
def add(x, y, alpha=1):
    return x + y if alpha == 1 else _scaled_sum(x, y, alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
@inlined
def subtract(x, y, alpha=1):
    return x - y if alpha == 1 else _scaled_sum(x, y, -alpha)


def _scaled_sum(x, y, alpha):
    """`x + alpha * y`, with the product in the dtype of the sum, or in float32 where that is narrower."""
    dtype = jnp.result_type(x, y)
    x, y, alpha = (converted(a, dtype) for a in (x, y, alpha))  # numbers, too: PyTorch rounds them first
    if jnp.issubdtype(dtype, jnp.inexact):
        x, y, alpha = widened(x), widened(y), widened(jnp.asarray(alpha))
    return x + alpha * y


@lowers(aten.mul.Tensor, aten.mul.Scalar)
@inlined
def multiply(x, y):
    x, y = wide_beside_numbers(x, y)
    return x * y


def _wide_if_floating(x):
    return widened(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def wide_beside_numbers(x, y):
    """An array in float32 beside a Python number, which PyTorch does not round to a narrow dtype before the result."""
    if isinstance(x, (int, float)) and isinstance(y, jax.Array):
        return x, _wide_if_floating(y)
    return (_wide_if_floating(x), y) if isinstance(y, (int, float)) and isinstance(x, jax.Array) else (x, y)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(x, low=None, high=None):
    """On a boundary the whole gradient is that of `x`; of nan there is none."""
    if low is None or high is None:
        return clamp_min(x, low) if high is None else clamp_max(x, high)
    return _clamped(x, low, high)


@with_derivatives(
    lambda t, out, x, low, high: jnp.where((x >= low) & (x <= high), t, 0),
    lambda t, out, x, low, high: jnp.where((x < low) & (low < high), t, 0),
    lambda t, out, x, low, high: jnp.where((x > high) | (low > high), t, 0),
)
def _clamped(x, low, high):
    return jnp.minimum(jnp.maximum(x, low), high)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
@with_derivatives(lambda t, out, x, low: jnp.where(x >= low, t, 0), lambda t, out, x, low: jnp.where(x < low, t, 0))
def clamp_min(x, low):
    return jnp.maximum(x, low)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
@with_derivatives(lambda t, out, x, high: jnp.where(x <= high, t, 0), lambda t, out, x, high: jnp.where(x > high, t, 0))
def clamp_max(x, high):
    return jnp.minimum(x, high)


def _shifted_meta(op):
    """PyTorch's meta device refuses bools, which its kernels shift in the dtype of the result."""

    def meta(x, y):
        dtype = torch.result_type(x, y)
        return op(*(v.to(dtype) if isinstance(v, torch.Tensor) else v for v in (x, y)))

    return meta


for _packet in (aten.__lshift__, aten.__rshift__, aten.bitwise_left_shift, aten.bitwise_right_shift):
    for _overload in {"Scalar", "Tensor", "Tensor_Scalar", "Scalar_Tensor"} & set(_packet.overloads()):
        METAS[getattr(_packet, _overload)] = _shifted_meta(getattr(_packet, _overload))


lowers(aten.fmax.default)(lambda x, y: jnp.where((x >= y) | jnp.isnan(y), x, y))
lowers(aten.fmin.default)(lambda x, y: jnp.where((x <= y) | jnp.isnan(y), x, y))

for _ops, (_function, *_derivatives) in {
    (aten.maximum.default,): (
        jnp.maximum,
        lambda t, out, x, y: jnp.where(x < y, 0, jnp.where(x == y, t / 2, t)),
        lambda t, out, x, y: jnp.where(x > y, 0, jnp.where(x == y, t / 2, t)),
    ),
    (aten.minimum.default,): (
        jnp.minimum,
        lambda t, out, x, y: jnp.where(x > y, 0, jnp.where(x == y, t / 2, t)),
        lambda t, out, x, y: jnp.where(x < y, 0, jnp.where(x == y, t / 2, t)),
    ),
    (aten.nextafter.default,): (
        jnp.nextafter,
        lambda t, out, x, y: jnp.where(x != y, t, 0),
        lambda t, out, x, y: jnp.zeros_like(t),
    ),
    (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor): (
        jnp.remainder,
        lambda t, out, x, y: t,
        lambda t, out, x, y: -t * jnp.floor_divide(x, y),
    ),
    (aten._prelu_kernel.default,): (
        lambda x, weight: jnp.where(x > 0, x, weight * x),
        lambda t, out, x, weight: t * jnp.where(x > 0, 1, weight),
        lambda t, out, x, weight: t * jnp.where(x > 0, 0, x),
    ),
}.items():
    lowers(*_ops)(with_derivatives(*_derivatives)(_function))


def _of_atan2(other, x, y):
    return jnp.where((x == 0) & (y == 0), 0, other * (1 / (x * x + y * y)))


for _ops, (_function, *_derivatives) in {
    (aten.logaddexp.default,): (
        jnp.logaddexp,
        lambda t, out, x, y: t / (1 + jnp.exp(y - x)),
        lambda t, out, x, y: t / (1 + jnp.exp(x - y)),
    ),
    (aten.logaddexp2.default,): (
        jnp.logaddexp2,
        lambda t, out, x, y: t / (1 + jnp.exp2(y - x)),
        lambda t, out, x, y: t / (1 + jnp.exp2(x - y)),
    ),
    (aten.hypot.default,): (
        jnp.hypot,
        lambda t, out, x, y: t * (x / out),
        lambda t, out, x, y: t * (y / out),
    ),
    (aten.atan2.default,): (
        jnp.arctan2,
        lambda t, out, x, y: t * _of_atan2(y, x, y),
        lambda t, out, x, y: t * _of_atan2(-x, x, y),
    ),
    (aten.copysign.Tensor, aten.copysign.Scalar): (
        jnp.copysign,
        lambda t, out, x, y: t * jnp.where(x == 0, 0, out / x),
        lambda t, out, x, y: jnp.zeros_like(t),
    ),
    (aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other): (
        jax.scipy.special.xlogy,
        lambda t, out, x, y: t * jnp.where((x == 0) & (y <= 0), 0, jnp.log(y)),
        lambda t, out, x, y: t * (x / y),
    ),
    (aten.special_xlog1py.default, aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar): (
        lambda x, y: jnp.where(jnp.isnan(y), y, jnp.where(x == 0, 0, x * jnp.log1p(y))),
        lambda t, out, x, y: t * jnp.where((x == 0) & (y <= -1), 0, jnp.log1p(y)),
        lambda t, out, x, y: t * (x / (y + 1)),
    ),
}.items():
    lowers(*_ops)(of_widened(with_derivatives(*_derivatives)(_function)))


@with_derivatives(lambda t, out, x, y: t / y, lambda t, out, x, y: -(t * out) / y)
def _quotient(x, y):
    return x / y


@lowers(aten.div.Tensor)
@inlined
def divide(x, y):
    """The square of a divisor, which JAX's derivative has, overflows long before the quotient does."""
    traced = isinstance(y, jax.Array) and jnp.issubdtype(jnp.result_type(x, y), jnp.floating)
    return _quotient(x, y) if traced else jnp.true_divide(*wide_beside_numbers(x, y))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide_and_round(x, y, *, rounding_mode=None):
    """Of integers exactly: their quotient as a float32 is another number from 2**24 on."""
    if rounding_mode is None:
        return divide(x, y)
    if jnp.issubdtype(jnp.result_type(x, y), jnp.inexact):
        x, y = wide_beside_numbers(x, y)
        return jnp.trunc(x / y) if rounding_mode == "trunc" else jnp.floor_divide(x, y)
    dtype = jnp.promote_types(jnp.result_type(x, y), jnp.uint8)
    x, y = jnp.broadcast_arrays(converted(x, dtype), converted(y, dtype))
    return jax.lax.div(x, y) if rounding_mode == "trunc" else jnp.floor_divide(x, y)


lowers(aten.floor_divide.default, aten.floor_divide.Scalar)(functools.partial(divide_and_round, rounding_mode="floor"))


@with_derivatives(
    lambda t, out, x, e: t * jnp.where(e == 0, 0, e * x ** (e - 1)),
    lambda t, out, x, e: t * jnp.where((x == 0) & (e >= 0), 0, out * jnp.log(x)),
)
def _power(x, e):
    return x**e


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(x, exponent):
    dtype = jnp.result_type(x, exponent)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return _integer_power(converted(x, dtype), converted(exponent, dtype))
    if not jnp.issubdtype(dtype, jnp.floating):
        return x**exponent
    return _power(widened(jnp.asarray(x)), widened(jnp.asarray(exponent)))


def _integer_power(x, exponent):
    """With a negative exponent the result is 0, except for the bases 1 and -1."""
    inverse = jnp.where(jnp.abs(x) == 1, jnp.where(exponent % 2 == 0, 1, x), 0)
    return jnp.where(exponent < 0, inverse, x ** jnp.maximum(exponent, 0))


@lowers(aten.pow.Tensor_Scalar)
@inlined
def power_of_number(x, exponent):
    if isinstance(exponent, complex):
        return _power(x.astype(jnp.promote_types(x.dtype, jnp.complex64)), jnp.asarray(exponent))
    floating = jnp.issubdtype(x.dtype, jnp.inexact)
    x = widened(x) if floating or isinstance(exponent, float) else x.astype(jnp.promote_types(x.dtype, jnp.int8))
    if exponent == 0:
        return jnp.ones_like(x)
    if float(exponent).is_integer() and (floating or exponent > 0):
        return jax.lax.integer_pow(x, int(exponent))
    return _fractional_power(x, exponent) if jnp.issubdtype(x.dtype, jnp.floating) else x**exponent


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _fractional_power(x: jax.Array, exponent: float) -> jax.Array:
    if exponent in (0.5, -0.5):
        return jnp.sqrt(x) if exponent > 0 else jax.lax.rsqrt(x)
    return x**exponent


@_fractional_power.defjvp
def _fractional_power_jvp(exponent, primals, tangents):
    (x,), (dx,) = primals, tangents
    return _fractional_power(x, exponent), dx * (exponent * _fractional_power(x, exponent - 1))
