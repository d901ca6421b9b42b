"""Accuracy of answers, in the one definition that training, evaluation, export and report share."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.tasks.puzzles.batches import IGNORED_LABEL


class Scores(NamedTuple):
    """Scores by example; 0 for an example without labels. Arrays are NumPy's for NumPy inputs, otherwise JAX's."""

    labelled: Bool[Any, "*steps batch"]
    accuracy: Float[Any, "*steps batch"]
    """Share of the labels that the answer equals."""
    exact: Bool[Any, "*steps batch"]
    """Whether it equals all of them."""


def score_answers(preds: Integer[Any, "*steps batch seq"], labels: Integer[Any, "batch seq"]) -> Scores:
    """The same figures as `models_torch.losses.ACTLossHead` counts in training."""
    xp = jnp if isinstance(preds, jax.Array) or isinstance(labels, jax.Array) else np
    counted = labels != IGNORED_LABEL
    label_counts = counted.sum(axis=-1)
    correct = (counted & (preds == labels)).sum(axis=-1)
    labelled = xp.broadcast_to(label_counts > 0, correct.shape)
    return Scores(labelled, correct / xp.maximum(label_counts, 1), labelled & (correct == label_counts))
