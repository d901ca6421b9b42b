"""Muon as in nanochat of July 2026, as Optax transformations."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from train_jax.optim.muon import nesterov_mean
from train_jax.optim.newton_schulz import POLAR_EXPRESS, Matrix, norm, orthogonalize


def scale_by_muon_2026(momentum: ArrayLike, beta2: float, dtype: str) -> optax.GradientTransformation:
    """Nesterov momentum, rows of equal norm, Polar Express, a fixed norm, and NorMuon.

    `scale_by_shape` belongs to it, after the weight decay. `dtype` is that of the equilibration and the iterations.

    References:
      MuonEq, 2026, https://arxiv.org/abs/2603.28254
      Muon+, 2026, https://arxiv.org/abs/2602.21545
      NorMuon, 2025, https://arxiv.org/abs/2510.05491
    """

    def polar(matrix: Any, _: Any) -> Matrix:
        x = orthogonalize(
            equal_row_norms(matrix.astype(dtype)),
            POLAR_EXPRESS,
            lambda x: x / (1.01 * norm(x) + 1e-6).astype(x.dtype),
        ).astype(matrix.dtype)
        # The norm of a matrix whose singular values are all 1.
        return x * (math.sqrt(min(x.shape)) / jnp.maximum(norm(x), 1e-6)).astype(x.dtype)

    return optax.chain(nesterov_mean(momentum), optax.stateless_with_tree_map(polar), scale_by_normuon(beta2))


def equal_row_norms(matrix: Matrix) -> Matrix:
    """Scales every row to the root mean square of the row norms."""
    target = norm(matrix) / math.sqrt(matrix.shape[0])
    return matrix * (target / jnp.maximum(norm(matrix, axis=1), 1e-6)).astype(matrix.dtype)


class ScaleByNorMuonState(NamedTuple):
    """State of NorMuon."""

    nu: optax.Updates
    """Running mean of the squares of each row, (rows, 1), or of each column, (1, columns), of wide matrices."""


def scale_by_normuon(beta2: float) -> optax.GradientTransformation:
    """Divides each row, or each column of a wide matrix, by its running RMS, and keeps the norm of the matrix."""

    def mean_square(matrix: Any) -> Float[Array, "rows columns"]:
        axis = 1 if matrix.shape[0] >= matrix.shape[1] else 0
        return jnp.mean(jnp.square(matrix.astype(jnp.float32)), axis=axis, keepdims=True)

    def init(params: optax.Params) -> ScaleByNorMuonState:
        return ScaleByNorMuonState(jax.tree.map(lambda p: jnp.zeros_like(mean_square(p), p.dtype), params))

    def scaled(matrix: Any, nu: Any) -> Matrix:
        # All sums of squares are those of the matrix, divided by its number of columns, or rows of a wide one.
        squares = mean_square(matrix)
        factors = jax.lax.rsqrt(jnp.maximum(nu, 1e-10)).astype(jnp.float32)
        before, after = jnp.sqrt(squares.sum()), jnp.sqrt((squares * jnp.square(factors)).sum())
        return matrix * (factors * before / jnp.maximum(after, 1e-10)).astype(matrix.dtype)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, ScaleByNorMuonState]:
        del params
        squares = jax.tree.map(mean_square, updates)
        nu = jax.tree.map(lambda n, s: (beta2 * n + (1 - beta2) * s).astype(n.dtype), state.nu, squares)
        return jax.tree.map(scaled, updates, nu), ScaleByNorMuonState(nu)

    return optax.GradientTransformation(init, update)
