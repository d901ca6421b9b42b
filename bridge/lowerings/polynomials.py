"""Orthogonal polynomials by their recurrences, with PyTorch's closed formulas inside the interval and at its ends."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import lowers

aten = torch.ops.aten


class _Family(NamedTuple):
    first: Callable
    """`x` -> the polynomial of degree 1."""
    following: Callable
    """`k, x, q, p` -> the polynomial of degree k + 1 from those of degree k and k - 1."""
    at_ends: Callable | None = None
    """`x, n` -> the value where `abs(x) == end`."""
    inside: Callable | None = None
    """`angle, n, x` -> the value between -1 and 1, where `n` is above `limit`."""
    limit: int = 0
    end: int = 1
    highest: Callable = lambda dtype: jnp.inf
    """`dtype` -> the degree beyond which the value is nan."""


def _sign(x, n):
    return jnp.where((x > 0) | (n % 2 == 0), 1, -1)


def _second_kind(angle, n, x):
    sine = jnp.sin(angle)
    at_zero = (n + 1) * jnp.cos((n + 1) * angle) / x
    return jnp.where(sine != 0, jnp.sin((n + 1) * angle) / jnp.where(sine != 0, sine, 1), at_zero)


def _chebyshev(k, x, q, p):
    return 2 * x * q - p


def _hermite_limit(dtype):
    return 128 if dtype == jnp.float32 else 512


_FAMILIES = {
    "chebyshev_polynomial_t": _Family(
        lambda x: x, _chebyshev, _sign, lambda angle, n, x: jnp.cos(n * angle), 6
    ),
    "chebyshev_polynomial_u": _Family(
        lambda x: 2 * x, _chebyshev, lambda x, n: _sign(x, n) * (n + 1), _second_kind, 8
    ),
    "chebyshev_polynomial_v": _Family(
        lambda x: 2 * x - 1,
        _chebyshev,
        lambda x, n: jnp.where(x > 0, 1, _sign(x, n) * (2 * n + 1)),
        lambda angle, n, x: jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2),
        8,
    ),
    "chebyshev_polynomial_w": _Family(
        lambda x: 2 * x + 1,
        _chebyshev,
        lambda x, n: jnp.where(x > 0, 2 * n + 1, _sign(x, n)),
        lambda angle, n, x: jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2),
        8,
    ),
    "hermite_polynomial_h": _Family(
        lambda x: 2 * x, lambda k, x, q, p: 2 * x * q - 2 * k * p, highest=_hermite_limit
    ),
    "hermite_polynomial_he": _Family(lambda x: x, lambda k, x, q, p: x * q - k * p, highest=_hermite_limit),
    "laguerre_polynomial_l": _Family(
        lambda x: 1 - x,
        lambda k, x, q, p: ((2 * k + (1 - x)) * q - k * p) / (k + 1),
        lambda x, n: jnp.ones_like(x),
        end=0,
    ),
    "legendre_polynomial_p": _Family(
        lambda x: x, lambda k, x, q, p: ((2 * k + 1) * x * q - k * p) / (k + 1), _sign
    ),
}  # fmt: skip


def _polynomial(family: _Family) -> Callable:
    def lowering(x, n):
        """The degree may be a tensor, too; a fraction of it does not count."""
        dtype = jnp.promote_types(jnp.result_type(x, n), jnp.float32)
        x, n = jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(n).astype(jnp.int32))
        x = jax.lax.stop_gradient(x)

        def step(k, state):
            p, q = state
            return jnp.where(k < n, q, p), jnp.where(k < n, family.following(k.astype(dtype), x, q, p), q)

        _, out = jax.lax.fori_loop(1, jnp.max(n, initial=1), step, (jnp.ones_like(x), family.first(x)))
        degree = n.astype(dtype)
        if family.inside is not None:
            inside = (n > family.limit) & (jnp.abs(x) < 1)
            out = jnp.where(inside, family.inside(jnp.arccos(x), degree, x), out)
        out = jnp.where(n == 0, 1, out)
        if family.at_ends is not None:
            out = jnp.where(jnp.abs(x) == family.end, family.at_ends(x, n), out)
        return jnp.where(n < 0, 0, jnp.where(n > family.highest(dtype), jnp.nan, out))

    return lowering


for _name, _family in _FAMILIES.items():
    _packet = getattr(aten, f"special_{_name}")
    lowers(_packet.default, _packet.n_scalar, _packet.x_scalar)(_polynomial(_family))
