"""Orthogonalization of matrices by Newton-Schulz iterations, which move all singular values close to 1."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

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
    """JAX would round the factor to the dtype of a bfloat16 matrix; PyTorch does not."""
    return (factor * x.astype(jnp.float32)).astype(x.dtype)


def norm(x: Array, axis: int | None = None) -> Array:
    """Returns the Euclidean norm in float32, of all elements or along an axis that is kept."""
    return jnp.linalg.norm(x.astype(jnp.float32), axis=axis, keepdims=axis is not None)
