"""Muon as Optax transformations: of its authors, and of nanochat in 2025 and 2026; which parameters it updates.

Matrices are orthogonalized by Newton-Schulz iterations, which move all singular values close to 1.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from train_jax.core.state import Arrays

Matrix = Float[Array, "out in"]
Coefficients = tuple[float, float, float]
"""a, b and c of one step: x becomes a x + (b x x' + c (x x')²) x."""

MUON: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),) * 5
"""Five equal steps. They move singular values to 0.7 to 1.2, not to 1."""

POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Five steps, each with the best coefficients for the interval that the steps before it leave, for a safety factor of
0.02 and a cushion of 2.

References:
  Amsel et al., "The Polar Express: Optimal Matrix Sign Methods and Their Application to the Muon Algorithm", 2025,
  https://arxiv.org/abs/2505.16932
"""


def scale_by_muon(momentum: ArrayLike, dtype: str) -> optax.GradientTransformation:
    """Returns orthogonalized Nesterov momentum, scaled to the RMS of an AdamW step so that both use one learning rate.

    Rows are outputs, as in PyTorch's weights. `dtype` is that of the iterations; with bfloat16, this is
    `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`. `optax.contrib.muon` differs: its bias correction of momentum
    and gradient changes the direction of the first steps, and it updates embeddings by NAdamW.

    References:
      Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
      https://kellerjordan.github.io/posts/muon/
      Liu et al., "Muon is Scalable for LLM Training", 2025, https://arxiv.org/abs/2502.16982
    """

    def matched(matrix: Any, _: Any) -> Matrix:
        x = orthogonalize(matrix.astype(dtype), MUON, lambda x: x / jnp.maximum(norm(x), 1e-7).astype(x.dtype))
        return 0.2 * math.sqrt(max(matrix.shape)) * x.astype(matrix.dtype)

    if not isinstance(momentum, float):
        return optax.chain(nesterov_mean(momentum), optax.stateless_with_tree_map(matched))
    return optax.chain(
        optax.trace(momentum, nesterov=True), optax.scale(1 - momentum), optax.stateless_with_tree_map(matched)
    )


def scale_by_muon_2025(momentum: ArrayLike, dtype: str) -> optax.GradientTransformation:
    """Returns Muon of nanochat, November 2025: orthogonalized Nesterov momentum. `scale_by_shape` belongs to it."""

    def update(matrix: Any, _: Any) -> Matrix:
        x = orthogonalize(matrix.astype(dtype), MUON, lambda x: x / (norm(x) + 1e-7).astype(x.dtype))
        return x.astype(matrix.dtype)

    return optax.chain(nesterov_mean(momentum), optax.stateless_with_tree_map(update))


def nesterov_mean(momentum: ArrayLike) -> optax.GradientTransformation:
    """Returns Nesterov momentum with a running mean instead of a sum, so that the momentum can change during a run."""

    def init(params: optax.Params) -> optax.TraceState:
        return optax.TraceState(optax.tree.zeros_like(params))

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, optax.TraceState]:
        del params
        mean = toward(updates, state.trace)
        return toward(updates, mean), optax.TraceState(mean)

    def toward(updates: optax.Updates, mean: optax.Updates) -> optax.Updates:
        # A scheduled momentum is an array in float32, to which bfloat16 would be promoted.
        return jax.tree.map(lambda g, m: (g + momentum * (m - g)).astype(g.dtype), updates, mean)

    return optax.GradientTransformation(init, update)


def scale_by_shape() -> optax.GradientTransformation:
    """Multiplies the updates of matrices with more rows than columns by the root of the quotient.

    The published rule multiplies the learning rate by it, so it comes after the weight decay.
    """

    def scaled(update: Any, _: Any) -> Array:
        rows, columns = update.shape
        return max(1.0, rows / columns) ** 0.5 * update

    return optax.partition({"muon": optax.stateless_with_tree_map(scaled), "adamw": optax.identity()}, muon_labels)


def scale_by_muon_2026(momentum: ArrayLike, beta2: float, dtype: str) -> optax.GradientTransformation:
    """Returns Nesterov momentum with rows of equal norm, Polar Express, a fixed norm, and NorMuon.

    `scale_by_shape` belongs to it, after the weight decay. `dtype` is that of the equilibration and the iterations.

    References:
      MuonEq, 2026, https://arxiv.org/abs/2603.28254
      Muon+, 2026, https://arxiv.org/abs/2602.21545
      NorMuon, 2025, https://arxiv.org/abs/2510.05491
    """

    def polar(matrix: Any, _: Any) -> Matrix:
        x = orthogonalize(
            equal_row_norms(matrix.astype(dtype)), POLAR_EXPRESS, lambda x: x / (1.01 * norm(x) + 1e-6).astype(x.dtype)
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
        before = jnp.sqrt(squares.sum())
        after = jnp.sqrt((squares * jnp.square(factors)).sum())
        return matrix * (factors * before / jnp.maximum(after, 1e-10)).astype(matrix.dtype)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, ScaleByNorMuonState]:
        del params
        squares = jax.tree.map(mean_square, updates)
        nu = jax.tree.map(lambda n, s: (beta2 * n + (1 - beta2) * s).astype(n.dtype), state.nu, squares)
        return jax.tree.map(scaled, updates, nu), ScaleByNorMuonState(nu)

    return optax.GradientTransformation(init, update)


# ---- orthogonalization


def orthogonalize(
    matrix: Matrix, coefficients: Sequence[Coefficients], normalize: Callable[[Matrix], Matrix]
) -> Matrix:
    """Applies the steps to the normalized matrix, transposed if it has more rows than columns.

    `normalize` must leave no singular value above 1.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    x = normalize(matrix if wide else matrix.T)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = _scaled(a, x) + (_scaled(b, gram) + _scaled(c, gram) @ gram) @ x
    return x if wide else x.T


def _scaled(factor: float, x: Matrix) -> Matrix:
    """Scales without rounding the factor to the dtype of a bfloat16 matrix, as JAX would and PyTorch does not."""
    return (factor * x.astype(jnp.float32)).astype(x.dtype)


def norm(x: Array, axis: int | None = None) -> Array:
    """Returns the Euclidean norm in float32, of all elements or along an axis that is kept."""
    return jnp.linalg.norm(x.astype(jnp.float32), axis=axis, keepdims=axis is not None)


# ---- parameters


_EMBEDDING_OR_HEAD = re.compile(r"(^|\.)(\w*embed\w*|(\w+_)?emb|wte|wpe|(\w+_)?heads?)(\.|$)", re.IGNORECASE)


def muon_labels(params: Arrays) -> dict[str, str]:
    """Labels hidden matrices `muon`; embeddings and heads (recognized by name) and all other shapes `adamw`.

    In a parameter group, Optax replaces the parameters of other groups by nodes without a shape; they are `adamw`.
    """
    return {
        name: "muon" if getattr(array, "ndim", 0) == 2 and not _EMBEDDING_OR_HEAD.search(name) else "adamw"
        for name, array in params.items()
    }
