"""Gamma, error and Bessel functions at their poles and where float32 ends."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.lowerings.custom_gradients import with_derivatives
from bridge.lowerings.registry import lowers, widened

aten = torch.ops.aten


@with_derivatives(lambda t, out, x: t * _trigamma(x))
def _digamma(x):
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), jax.scipy.special.digamma(x))


def _trigamma(x):
    """By reflection below a half, by six steps up and the asymptotic series above it."""
    below = x < 0.5
    reflected = jnp.square(jnp.pi / jnp.sin(jnp.pi * jnp.where(below, x, 0.5)))
    y = jnp.where(below, 1 - x, x)
    total = jnp.zeros_like(y)
    for _ in range(6):
        total, y = total + 1 / (y * y), y + 1
    square = 1 / (y * y)
    total = total + (1 + 1 / (2 * y) + square * (1 / 6 - square * (1 / 30 - square / 42))) / y
    return jnp.where(below, reflected - total, total)


@lowers(aten.digamma.default)
def digamma(x):
    return _digamma(widened(x))


@with_derivatives(lambda t, out, x: t * _digamma(x))
def _lgamma(x):
    return jax.lax.lgamma(x)


@functools.cache
def _polygamma(n: int) -> Callable[[jax.Array], jax.Array]:
    """Of an order of at least 1; the derivative is that of the next order."""

    @with_derivatives(lambda t, out, x: t * _polygamma(n + 1)(x))
    def function(x):
        if n == 1:
            return _trigamma(x)
        below = x < 0
        value = jax.lax.polygamma(jnp.full_like(x, n), jnp.where(below, 1 - x, x))
        pole = (x <= 0) & (x == jnp.floor(x))
        out = jnp.where(below, (-1) ** n * value - _derivative_of_cotangent(n, jnp.where(pole, 0.5, x)), value)
        return jnp.where(pole, (-1) ** (n + 1) * jnp.inf, out)

    return function


def _derivative_of_cotangent(n: int, x: jax.Array) -> jax.Array:
    """The nth derivative of `pi * cot(pi * x)`: a polynomial of the cotangent `c`, for `c' = -pi * (1 + c**2)`."""
    polynomial = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(n):
        polynomial = -polynomial.deriv() * np.polynomial.Polynomial([1.0, 0.0, 1.0])
    near = x - jnp.round(x)  # at most a half, where the tangent of the complement is exact
    small = jnp.abs(near) < 0.25
    inverse = jnp.tan(jnp.pi * jnp.where(small, near, 0.25))
    cotangent = jnp.where(small, 1 / inverse, jnp.sign(near) * jnp.tan(jnp.pi * (0.5 - jnp.abs(near))))
    return math.pi ** (n + 1) * jnp.polyval(jnp.asarray(polynomial.coef[::-1], x.dtype), cotangent)


@lowers(aten.polygamma.default)
def polygamma(n, x):
    return _polygamma(n)(widened(x)) if n else _digamma(widened(x))


@lowers(aten.lgamma.default)
def lgamma(x):
    return _lgamma(widened(x))


@with_derivatives(lambda t, out, x: t * (2 * x * out - 2 / math.sqrt(math.pi)))
def _erfcx(x):
    large = x > 8
    y = jnp.where(large, x, 8)
    square = 1 / (y * y)
    series = 1 - square * (1 / 2 - square * (3 / 4 - square * (15 / 8 - square * 105 / 16)))
    near = jnp.where(large, 0, x)
    return jnp.where(large, series / y / math.sqrt(math.pi), jnp.exp(near * near) * jax.lax.erfc(near))


@lowers(aten.special_erfcx.default)
def erfcx(x):
    """The asymptotic series where the product of exp and erfc leaves float32."""
    return _erfcx(widened(x))


@with_derivatives(lambda t, out, x: t * _bessel_i1(x))
def _bessel_i0(x):
    return jax.scipy.special.i0(x)


def _slope_of_i1(t, out, x):
    return t * jnp.where(x == 0, 0.5, jax.scipy.special.i0(x) - out / jnp.where(x == 0, 1, x))


@with_derivatives(_slope_of_i1)
def _bessel_i1(x):
    return jax.scipy.special.i1(x)


@lowers(aten.i0.default)
def bessel_i0(x):
    return _bessel_i0(widened(x))


@with_derivatives(lambda t, out, x: t * (math.sqrt(2 * math.pi) * jnp.exp(jnp.square(out) / 2)))
def _ndtri(x):
    return jax.scipy.special.ndtri(x)


@lowers(aten.special_ndtri.default)
def ndtri(x):
    return _ndtri(widened(x))


@lowers(aten.special_i1.default, aten.special_modified_bessel_i1.default)
def bessel_i1(x):
    return _bessel_i1(widened(x))


@lowers(aten.igamma.default)
def igamma(a, x):
    return _at_ends(a, x, jax.scipy.special.gammainc(a, x), 0)


@lowers(aten.igammac.default)
def igammac(a, x):
    return _at_ends(a, x, jax.scipy.special.gammaincc(a, x), 1)


def _at_ends(a: jax.Array, x: jax.Array, value: jax.Array, at_zero: int) -> jax.Array:
    """JAX has nan, or another value, where an argument is zero or infinite. `at_zero`: the value at `x = 0`."""
    value = jnp.where(jnp.isinf(x), 1 - at_zero, value)
    value = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, at_zero), value)
    value = jnp.where(x == 0, at_zero, value)
    value = jnp.where(a == 0, jnp.where(x > 0, 1 - at_zero, jnp.nan), value)
    return jnp.where((a < 0) | (x < 0), jnp.nan, value)
