"""Muon as an Optax transformation, and which parameters it updates."""

import math
import re
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from train_jax.core.state import Arrays


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Orthogonalized Nesterov momentum, scaled to the RMS of an AdamW step so that both use the same learning rate.

    Rows are outputs, as in PyTorch's weights. `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` is equal except that
    it computes in bfloat16 instead of the gradient's dtype. `optax.contrib.muon` differs: its bias correction of
    momentum and gradient changes the direction of the first steps, and it updates embeddings by NAdamW.

    References:
      Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
      https://kellerjordan.github.io/posts/muon/
      Liu et al., "Muon is Scalable for LLM Training", 2025, https://arxiv.org/abs/2502.16982
    """

    def matched(matrix: Any, _: Any) -> Float[Array, "out in"]:
        return 0.2 * math.sqrt(max(matrix.shape)) * _orthogonal(matrix)

    return optax.chain(
        optax.trace(momentum, nesterov=True), optax.scale(1 - momentum), optax.stateless_with_tree_map(matched)
    )


def _orthogonal(matrix: Float[Array, "out in"]) -> Float[Array, "out in"]:
    """Orthogonalizes a matrix by five Newton-Schulz steps, which move its singular values close to 1."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / jnp.maximum(jnp.linalg.norm(x), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.T


_EMBEDDING_OR_HEAD = re.compile(r"(^|\.)(\w*embed\w*|(\w+_)?emb|wte|wpe|(\w+_)?heads?)(\.|$)", re.IGNORECASE)


def muon_labels(params: Arrays) -> dict[str, str]:
    """Labels hidden matrices `muon`; embeddings and heads (recognized by name) and all other shapes `adamw`.

    In a parameter group, Optax replaces the parameters of other groups by nodes without a shape; they are `adamw`.
    """
    return {
        name: "muon" if getattr(array, "ndim", 0) == 2 and not _EMBEDDING_OR_HEAD.search(name) else "adamw"
        for name, array in params.items()
    }
