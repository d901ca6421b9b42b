"""Accuracy of answers, as used by training, evaluation, export and report."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.tasks.puzzles.batches import IGNORED_LABEL


class Scores(NamedTuple):
    """Scores per example; 0 for an example without labels. NumPy arrays for NumPy inputs, otherwise JAX arrays."""

    labelled: Bool[Any, "*steps batch"]
    accuracy: Float[Any, "*steps batch"]
    """Share of the labels that are predicted correctly."""
    exact: Bool[Any, "*steps batch"]
    """Whether all labels are predicted correctly."""


def score_answers(preds: Integer[Any, "*steps batch seq"], labels: Integer[Any, "batch seq"]) -> Scores:
    """Computes the same metrics as `models_torch.losses.ACTLossHead` does in training."""
    xp = jnp if isinstance(preds, jax.Array) or isinstance(labels, jax.Array) else np
    counted = labels != IGNORED_LABEL
    label_counts = counted.sum(axis=-1)
    correct = (counted & (preds == labels)).sum(axis=-1)
    labelled = xp.broadcast_to(label_counts > 0, correct.shape)
    return Scores(labelled, correct / xp.maximum(label_counts, 1), labelled & (correct == label_counts))
