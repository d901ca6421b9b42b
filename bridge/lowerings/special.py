"""Gamma, error and Bessel functions at their poles and where float32 ends."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.internals import torchax_lowering
from bridge.lowerings.custom_gradients import with_derivatives
from bridge.lowerings.registry import LOWERINGS, lowers, widened

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


@lowers(aten.polygamma.default)
def polygamma(n, x):
    x = widened(x)
    if n > 1:
        return jax.lax.polygamma(jnp.full_like(x, n), x)
    return _trigamma(x) if n else _digamma(x)


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


@with_derivatives(lambda t, out, x: t * jax.scipy.special.i1(x))
def _bessel_i0(x):
    return jax.scipy.special.i0(x)


@lowers(aten.i0.default)
def bessel_i0(x):
    return _bessel_i0(widened(x))


@with_derivatives(lambda t, out, x: t * (math.sqrt(2 * math.pi) * jnp.exp(jnp.square(out) / 2)))
def _ndtri(x):
    return jax.scipy.special.ndtri(x)


@lowers(aten.special_ndtri.default)
def ndtri(x):
    return _ndtri(widened(x))


def _polynomial(op: Any) -> Callable:
    """torchax asks for the degree as int64, at which JAX warns while x64 is off."""

    def lowering(x, n):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Explicitly requested dtype int64")
            of_torchax = torchax_lowering(op)
            assert of_torchax is not None
            return of_torchax(x, n)

    return lowering


for _name in (
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "hermite_polynomial_h", "hermite_polynomial_he",
    "laguerre_polynomial_l",
):  # fmt: skip
    _op = getattr(aten, f"special_{_name}").default
    LOWERINGS[_op] = _polynomial(_op)
