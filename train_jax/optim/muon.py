"""Muon as Optax transformations, and which parameters it updates."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from train_jax.core.state import Arrays
from train_jax.optim.newton_schulz import MUON, Matrix, norm, orthogonalize


def scale_by_muon(momentum: ArrayLike, dtype: str) -> optax.GradientTransformation:
    """Orthogonalized Nesterov momentum, scaled to the RMS of an AdamW step so that both use the same learning rate.

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
    """Muon as in nanochat of November 2025: orthogonalized Nesterov momentum. `scale_by_shape` belongs to it."""

    def update(matrix: Any, _: Any) -> Matrix:
        x = orthogonalize(matrix.astype(dtype), MUON, lambda x: x / (norm(x) + 1e-7).astype(x.dtype))
        return x.astype(matrix.dtype)

    return optax.chain(nesterov_mean(momentum), optax.stateless_with_tree_map(update))


def nesterov_mean(momentum: ArrayLike) -> optax.GradientTransformation:
    """Nesterov momentum with a running mean instead of a sum, so that the momentum can change from step to step."""

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


_EMBEDDING_OR_HEAD = re.compile(r"(^|\.)(\w*embed\w*|(\w+_)?emb|wte|wpe|(\w+_)?heads?)(\.|$)", re.IGNORECASE)


def muon_labels(params: Arrays) -> dict[str, str]:
    """Labels hidden matrices `muon`; embeddings and heads (recognized by name) and all other shapes `adamw`.

    In a parameter group, Optax replaces the parameters of other groups by nodes without a shape; they are `adamw`.
    """
    return {
        name: "muon" if getattr(array, "ndim", 0) == 2 and not _EMBEDDING_OR_HEAD.search(name) else "adamw"
        for name, array in params.items()
    }
