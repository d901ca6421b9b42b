"""The metrics of answers: one definition for evaluation, export and report, the same as that of training."""

import math
from collections.abc import Mapping
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


def answer_sums(
    preds: Integer[Any, "batch seq"],
    q_halt_logits: Float[Any, "batch"],
    labels: Integer[Any, "batch seq"],
    steps: Integer[Any, "*batch"] | int,
) -> dict[str, Any]:
    """Returns the sums of the metrics over the sequences that have labels, and their `count`.

    `steps` are the ACT steps of each sequence. As in `models_torch.losses.ACTLossHead`, with all sequences halted.
    """
    xp = jnp if isinstance(preds, jax.Array) or isinstance(labels, jax.Array) else np
    scores = score_answers(preds, labels)
    return {
        "count": scores.labelled.sum(),
        "accuracy": scores.accuracy.sum(),
        "exact_accuracy": scores.exact.sum(),
        "q_halt_accuracy": (scores.labelled & ((q_halt_logits >= 0) == scores.exact)).sum(),
        "steps": xp.where(scores.labelled, steps, 0).sum(),
    }


def means(sums: Mapping[str, float], examples: float) -> dict[str, float]:
    """Converts sums to means: losses over all examples of the steps, other metrics over the sequences that halted.

    A mean over nothing is NaN.
    """
    count = sums["count"] or math.nan
    averaged = {
        name: (value / examples if examples else math.nan) if name.endswith("loss") else value / count
        for name, value in sums.items()
    }
    return averaged | {"count": sums["count"]}
