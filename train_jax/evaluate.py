"""Scores a learner on a test set: every example once, every sequence to the halt limit, averaged weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from train_jax.devices import Devices
from train_jax.puzzles.batches import eval_batches
from train_jax.puzzles.format import PuzzleSet
from train_jax.run_folder import RunFolder, write_text
from train_jax.state import Learner
from train_jax.step_metrics import means


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    metrics: dict[str, float]
    """Means over the examples: `accuracy` (tokens), `exact_accuracy` (whole puzzles), `q_halt_accuracy`, `steps`,
    `lm_loss`, `q_halt_loss`; and `count`, the examples."""
    predictions: np.ndarray
    """Tokens after each ACT step, (ACT steps, examples, seq_len), uint8 or uint16."""
    q_halt_logits: np.ndarray
    """(ACT steps, examples), float32."""


def evaluate(
    eval_step: Callable[..., Any],
    learner: Learner,
    puzzles: PuzzleSet,
    devices: Devices,
    *,
    batch_size: int,
    limit: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """`eval_step` as `Devices.evaluate` gives it; `limit`: score only so many examples, 0 for all."""
    devices.local_batch_size(batch_size)
    total = min(limit or puzzles.num_examples, puzzles.num_examples)
    sums: dict[str, float] = {}
    predictions, logits, done = [], [], 0
    small = np.uint8 if puzzles.metadata.vocab_size <= 256 else np.uint16
    for batch, valid in eval_batches(puzzles, batch_size=batch_size, shard=devices.shard()):
        if done + valid.sum() > total:
            valid = valid & (np.cumsum(valid) <= total - done)
            batch["labels"][~valid] = -100
        metrics, outputs = eval_step(learner, devices.split(batch))
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        predictions.append(_joined(outputs["preds"])[:, valid].astype(small))
        logits.append(_joined(outputs["q_halt_logits"])[:, valid])
        done += int(valid.sum())
        progress(done, total)
        if done >= total:
            break
    return Evaluation(means(sums, total), np.concatenate(predictions, axis=1), np.concatenate(logits, axis=1))


def save_evaluation(folder: RunFolder, split: str, evaluation: Evaluation) -> None:
    path = folder.predictions(split)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name("partial.npz")
    np.savez_compressed(scratch, predictions=evaluation.predictions, q_halt_logits=evaluation.q_halt_logits)
    scratch.replace(path)
    write_text(folder.evaluation(split), json.dumps(evaluation.metrics, indent=1))


def _joined(outputs: Any) -> np.ndarray:
    """(devices, ACT steps, local, …) -> (ACT steps, examples, …)."""
    outputs = np.moveaxis(np.asarray(outputs), 0, 1)
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])
