"""The metrics of answers, early halting, and the halting curve: accuracy against mean ACT steps for all thresholds.

Evaluation, export and report have one definition of the metrics, the same as that of training. A sequence halts at the
first ACT step whose halting probability exceeds the threshold."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from train_jax.errors import UserError
from train_jax.puzzles.batches import IGNORED_LABEL


class Scores(NamedTuple):
    """Scores per example; 0 for an example without labels. NumPy arrays for NumPy inputs, otherwise JAX arrays."""

    labelled: Bool[Any, "*steps batch"]
    accuracy: Float[Any, "*steps batch"]
    """Share of the labels that are predicted correctly."""
    exact: Bool[Any, "*steps batch"]
    """True if all labels are predicted correctly."""


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

    `steps` are the ACT steps of each sequence. The sums are those of `models_torch.losses.ACTLossHead` with all
    sequences halted.
    """
    scores = score_answers(preds, labels)
    return {
        "count": scores.labelled.sum(),
        "accuracy": scores.accuracy.sum(),
        "exact_accuracy": scores.exact.sum(),
        "q_halt_accuracy": (scores.labelled & ((q_halt_logits >= 0) == scores.exact)).sum(),
        "steps": (scores.labelled * steps).sum(),
    }


def means(sums: Mapping[str, float], examples: float) -> dict[str, float]:
    """Converts sums to means: losses over all examples of the steps, other metrics over the sequences that halted.

    A mean over nothing is left out.
    """
    over = {name: examples if name.endswith("loss") else sums["count"] for name in sums}
    return {name: value / over[name] for name, value in sums.items() if over[name]} | {"count": sums["count"]}


_TAIL = sorted(round(m * 10.0**-k, k + 2) for k in range(2, 6) for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
THRESHOLDS = (0.0, *_TAIL, *(i / 20 for i in range(2, 19)), *(round(1 - p, 7) for p in reversed(_TAIL)), 1.0)
"""Thresholds of the curve, dense near 0 and 1, where most halting probabilities are. With 0 every sequence halts at
the first step, with 1 at the last."""


class CurveSums(NamedTuple):
    """Sums over the examples that have labels."""

    count: Float[Array, ""]
    steps: Float[Array, "thresholds"]
    accuracy: Float[Array, "thresholds"]
    exact: Float[Array, "thresholds"]
    fixed_accuracy: Float[Array, "steps"]
    """Sums of the accuracy of the answers after the first ACT step, the second, …"""
    fixed_exact: Float[Array, "steps"]


@dataclass(frozen=True)
class Point:
    """Cost and accuracy of one halting rule, as means over the examples."""

    mean_steps: float
    exact_accuracy: float
    accuracy: float
    threshold: float | None = None
    """A sequence halts above this halting probability; None if all sequences take the same number of steps."""


@dataclass(frozen=True)
class HaltingCurve:
    """Accuracy against mean ACT steps."""

    by_threshold: tuple[Point, ...]
    by_steps: tuple[Point, ...]
    """Points without early halting: every sequence takes 1, 2, … steps."""


def threshold_logit(probability: float) -> float:
    """Returns the logit of a probability. Raises `UserError` for a number outside 0 to 1."""
    if not 0 <= probability <= 1:
        raise UserError(f"--halt-threshold {probability:g} is not a probability; use a number from 0 to 1")
    if probability in (0, 1):
        return math.inf if probability else -math.inf
    return math.log(probability) - math.log1p(-probability)


def halting_logits(outputs: Mapping[str, Array]) -> Float[Array, "*steps batch"]:
    """Returns logits that are above 0 if training would halt: `q_halt`, or `q_halt - q_continue` if bootstrapped."""
    logits = outputs["q_halt_logits"]
    return logits - outputs["q_continue_logits"] if "q_continue_logits" in outputs else logits


def first_halt(halts: Bool[Array, "steps batch"]) -> Int[Array, "batch"]:
    """Returns the index of the step at which each sequence halts, at the latest the last one."""
    return jnp.argmax(halts.at[-1].set(True), axis=0)


def curve_sums(
    preds: Int[Array, "steps batch seq"], labels: Int[Array, "batch seq"], logits: Float[Array, "steps batch"]
) -> CurveSums:
    """Computes the sums for halting at each threshold, and for stopping after each ACT step."""
    scores = score_answers(preds, labels)
    limits = jnp.array([threshold_logit(threshold) for threshold in THRESHOLDS], logits.dtype)
    at = jax.vmap(lambda limit: first_halt(logits > limit))(limits)
    each = jnp.arange(labels.shape[0])

    def total(values: Array) -> Array:
        return values.astype(jnp.float32).sum(axis=-1)

    return CurveSums(
        count=total(scores.labelled[0]),
        steps=total(jnp.where(scores.labelled[0], at + 1, 0)),
        accuracy=total(scores.accuracy[at, each]),
        exact=total(scores.exact[at, each]),
        fixed_accuracy=total(scores.accuracy),
        fixed_exact=total(scores.exact),
    )


def curve_of(sums: CurveSums) -> HaltingCurve | None:
    """Computes the curve from sums; None if no example has labels."""
    if not sums.count:
        return None
    means = {name: np.asarray(value, float) / sums.count for name, value in sums._asdict().items()}
    thresholds = zip(means["steps"], means["exact"], means["accuracy"], THRESHOLDS, strict=True)
    fixed = zip(means["fixed_exact"], means["fixed_accuracy"], strict=True)
    return HaltingCurve(
        tuple(Point(*map(float, point)) for point in thresholds),
        tuple(Point(float(step), float(exact), float(accuracy)) for step, (exact, accuracy) in enumerate(fixed, 1)),
    )


def to_json(curve: HaltingCurve) -> str:
    return json.dumps(asdict(curve), indent=1)


def from_json(values: Any) -> HaltingCurve:
    """Reads a curve from parsed JSON. Raises `ValueError` if it does not have the format of `to_json`."""
    try:
        return HaltingCurve(*(tuple(Point(**point) for point in values[field.name]) for field in fields(HaltingCurve)))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no halting curve: {error}") from error


def select_points(curve: HaltingCurve, most: int = 10) -> list[Point]:
    """Selects about `most` points, spread over the curve, including the thresholds 0.5 (as in training) and 1."""
    points = curve.by_threshold
    values = np.array([(point.mean_steps, point.exact_accuracy) for point in points])
    places = values / np.maximum(np.ptp(values, axis=0), 1e-9)
    chosen = []
    last = places[0]
    for point, place in zip(points, places, strict=True):
        if point.threshold in (0.5, 1) or np.abs(place - last).sum() > 2 / most:
            chosen.append(point)
            last = place
    return chosen


def table(curve: HaltingCurve) -> list[str]:
    """Formats the curve for a terminal: the selected thresholds, then equal numbers of steps for all sequences."""
    named = [(f"{point.threshold:g}", point) for point in select_points(curve)]
    named += [(f"all after {point.mean_steps:.0f}", point) for point in curve.by_steps]
    return [
        "halting probability >  mean steps   exact   token",
        *(f"{name:>21}  {p.mean_steps:>10.2f}  {p.exact_accuracy:.4f}  {p.accuracy:.4f}" for name, p in named),
    ]


def halting_histogram(carry: Any, halt_max_steps: int) -> dict[str, Int[Array, "steps"]]:
    """Counts the sequences that halted in this step after 1, 2, … ACT steps; empty if the carry lacks the fields."""
    if not (hasattr(carry, "halted") and hasattr(carry, "steps")):
        return {}
    after = jnp.arange(1, halt_max_steps + 1)
    return {"halted_at": jnp.sum(carry.halted[:, None] & (carry.steps[:, None] == after), axis=0, dtype=jnp.int32)}
