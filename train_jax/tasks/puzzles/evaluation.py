"""Scores a learner on a test set: every example once, averaged weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from train_jax.core.metrics import means
from train_jax.core.state import Learner
from train_jax.run.folder import RunFolder, write_text
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.format import PuzzleSet
from train_jax.tasks.puzzles.halting import HaltingCurve, curve_of, to_json
from train_jax.tasks.puzzles.mixture import Mixture, mixture_of

KEPT_BYTES = 2**30
"""Answers after every ACT step are kept up to here; of more, as of an augmented ARC set, only the last ones."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found, on every host the same: means over all examples, answers in the data set's order."""

    metrics: dict[str, float]
    """Means over the examples: `accuracy` (tokens), `exact_accuracy` (whole puzzles), `q_halt_accuracy`, `steps`,
    `lm_loss`, `q_halt_loss`; and `count`, the examples. Where sequences halt early, `computed_steps` instead of losses:
    those that an example's device took for its batch."""
    predictions: np.ndarray
    """Tokens after each ACT step (or after the last one), (ACT steps, examples, seq_len), uint8 or uint16."""
    q_halt_logits: np.ndarray
    """(ACT steps, examples), float32."""
    inputs: np.ndarray
    """Tokens asked, (examples, seq_len)."""
    puzzle_identifiers: np.ndarray
    """(examples,), int32; as the model knows them."""
    halting_curve: HaltingCurve | None = None
    """What halting earlier would give, over all hosts; None where the step did halt, or no example has labels."""


def evaluate(
    eval_step: Callable[..., Any],
    learner: Learner,
    puzzles: PuzzleSet | Mixture,
    devices: Devices,
    *,
    batch_size: int,
    limit: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """`eval_step` as `Devices.evaluate` gives it; `limit`: score only so many examples, 0 for all."""
    devices.local_batch_size(batch_size)
    data = puzzles if isinstance(puzzles, Mixture) else mixture_of([puzzles])
    total = min(limit or data.num_examples, data.num_examples)
    sums: dict[str, float] = {}
    curve = None
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("preds", "q_halt_logits", "inputs", "identifiers")}
    small = np.uint8 if data.metadata.vocab_size <= 256 else np.uint16
    done, kept = 0, slice(None)
    for batch, valid in data.eval_batches(batch_size=batch_size, shard=devices.shard(), limit=limit):
        shares = devices.spread(devices.split(batch | {"is_example": valid}))
        metrics, outputs = eval_step(learner, shares)
        metrics = devices.fetch(metrics)
        part = jax.tree.map(lambda x: np.asarray(x, float), metrics.pop("halting_curve", None))
        curve = part if curve is None else jax.tree.map(np.add, curve, part)
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        outputs = {name: _joined(array) for name, array in devices.fetch(outputs).items()}
        if len(outputs["preds"]) * total * data.metadata.seq_len > KEPT_BYTES:
            kept = slice(-1, None)
        answers = {
            "preds": outputs["preds"][kept].astype(small),
            "q_halt_logits": outputs["q_halt_logits"][kept],
            "inputs": batch["inputs"][None].astype(small),
            "identifiers": batch["puzzle_identifiers"][None],
            "valid": valid[None],
        }
        answers = devices.gathered(answers, axis=1)
        valid = answers.pop("valid")[0]
        for name, array in answers.items():
            found[name].append(array[:, valid])
        done = min(done + batch_size, total)
        progress(done, total)
    arrays = {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
    return Evaluation(
        means(sums, total),
        arrays["preds"],
        arrays["q_halt_logits"],
        arrays["inputs"][0],
        arrays["identifiers"][0],
        None if curve is None else curve_of(curve),
    )


def save_evaluation(folder: RunFolder, split: str, evaluation: Evaluation) -> None:
    path = folder.predictions(split)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name("partial.npz")
    np.savez_compressed(scratch, predictions=evaluation.predictions, q_halt_logits=evaluation.q_halt_logits)
    scratch.replace(path)
    folder.halting_curve(split).unlink(missing_ok=True)  # not that of other weights beside these answers
    if evaluation.halting_curve is not None:
        write_text(folder.halting_curve(split), to_json(evaluation.halting_curve))
    write_text(folder.evaluation(split), json.dumps(evaluation.metrics, indent=1))


def _joined(outputs: Any) -> np.ndarray:
    """(devices, ACT steps, local, …) -> (ACT steps, examples, …)."""
    outputs = np.moveaxis(np.asarray(outputs), 0, 1)
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])
