"""Halting at inference, against figures worked out by hand and against evaluations that run to the limit."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from toy_halting import CONTINUE, HALT, LENGTH, RIGHT_CELLS, STEPS, Learner, ToyObjective, evaluated

from train_jax.core.step import make_eval_step, make_halting_eval_step
from train_jax.errors import UserError
from train_jax.run.config import preset, with_model
from train_jax.run.model import build_objective
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.batches import IGNORED_LABEL, eval_batches
from train_jax.tasks.puzzles.evaluation import evaluate
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.halting import (
    THRESHOLDS,
    curve_of,
    curve_sums,
    from_json,
    table,
    telling,
    threshold_logit,
    to_json,
)

HERE = Path(__file__).parent
ALL = list(range(len(HALT)))
HALTS_AFTER = [4, 1, 2, 4, 3, 1, 4]
"""At a threshold of 0.5, by identifier: read off the table by eye."""


def halting_step(threshold: float, bootstrapped: bool = False) -> Any:
    toy: Any = ToyObjective(bootstrapped)
    return make_halting_eval_step(toy, STEPS, threshold_logit(threshold))


def right_cells(steps: list[int]) -> np.ndarray:
    return np.array([RIGHT_CELLS[i, step - 1] for i, step in enumerate(steps)])


def check(metrics: dict[str, float], predictions: np.ndarray, steps: list[int], computed: float) -> None:
    right = right_cells(steps)
    assert metrics["steps"] == pytest.approx(np.mean(steps))
    assert metrics["computed_steps"] == pytest.approx(computed)
    assert metrics["exact_accuracy"] == pytest.approx(np.mean(right == LENGTH))
    assert metrics["accuracy"] == pytest.approx(np.mean(right / LENGTH))
    assert metrics["count"] == len(steps)
    for i, step in enumerate(steps):
        # Cells that are not right carry the number of the step that wrote them.
        assert predictions[0, i].tolist() == [3] * right[i] + [9 + step] * (LENGTH - right[i])


@pytest.mark.parametrize(
    ("batch_size", "computed"), [(7, 4), (1, np.mean(HALTS_AFTER)), (2, (4 + 4 + 4 + 4 + 3 + 3 + 4) / 7), (16, 4)]
)
def test_a_sequence_answers_where_it_halts_and_the_batch_stops_with_the_last(batch_size, computed):
    found = evaluated(halting_step(0.5), ALL, batch_size, Devices(1))
    check(found.metrics, found.predictions, HALTS_AFTER, computed)
    assert found.q_halt_logits[0].tolist() == [HALT[i, step - 1] for i, step in enumerate(HALTS_AFTER)]
    believed = found.q_halt_logits[0] >= 0
    assert found.metrics["q_halt_accuracy"] == pytest.approx(np.mean(believed == (right_cells(HALTS_AFTER) == LENGTH)))
    assert found.halting_curve is None


def test_padding_keeps_nobody_waiting():
    """Padding has the blank identifier, 0, which never halts."""
    found = evaluated(halting_step(0.5), [1, 5, 2], 8, Devices(1))
    assert (found.metrics["steps"], found.metrics["computed_steps"]) == (pytest.approx(4 / 3), 2)


def test_a_threshold_that_is_never_reached_and_one_that_always_is():
    for threshold, step in ((1.0, STEPS), (0.0, 1)):
        found = evaluated(halting_step(threshold), ALL, 7, Devices(1))
        check(found.metrics, found.predictions, [step] * len(ALL), step)
    toy: Any = ToyObjective()
    whole = evaluated(make_eval_step(toy, STEPS), ALL, 7, Devices(1))
    never = evaluated(halting_step(1.0), ALL, 7, Devices(1))
    assert (whole.predictions[-1] == never.predictions[0]).all()
    assert (whole.q_halt_logits[-1] == never.q_halt_logits[0]).all()


def test_bootstrapped_halting_compares_as_in_training():
    wants = HALT > CONTINUE
    steps = [next((s for s in range(1, STEPS) if wants[i, s - 1]), STEPS) for i in ALL]
    assert steps != HALTS_AFTER
    found = evaluated(halting_step(0.5, bootstrapped=True), ALL, 1, Devices(1))
    check(found.metrics, found.predictions, steps, float(np.mean(steps)))
    toy: Any = ToyObjective(bootstrapped=True)
    curve = evaluated(make_eval_step(toy, STEPS), ALL, 7, Devices(1)).halting_curve
    assert curve is not None
    assert next(p.mean_steps for p in curve.by_threshold if p.threshold == 0.5) == pytest.approx(np.mean(steps))


def test_devices_stop_each_by_itself(tmp_path):
    """In 2 batches of 4 rows on 4 devices every device has one row, in the second batch one of them only padding."""
    out = tmp_path / "out"
    command = [sys.executable, str(HERE / "halting_process.py"), "4", "4", str(out)]
    subprocess.run(command, check=True, timeout=120, cwd=HERE.parent.parent)
    for runner in ("pmap", "shard_map"):
        with np.load(f"{out}.{runner}.npz") as arrays:
            found = {name: arrays[name] for name in arrays.files}
        check(found, found["predictions"], HALTS_AFTER, float(np.mean(HALTS_AFTER)))


def test_the_curve_is_what_halting_gives():
    """Worked out one sequence at a time from the tables, and by halting."""
    toy: Any = ToyObjective()
    whole = evaluated(make_eval_step(toy, STEPS), ALL, 4, Devices(1))
    curve = whole.halting_curve
    assert curve is not None and len(curve.by_threshold) == len(THRESHOLDS)
    for point in curve.by_threshold:
        assert point.threshold is not None
        limit = -math.inf if point.threshold == 0 else math.inf if point.threshold == 1 else None
        limit = math.log(point.threshold / (1 - point.threshold)) if limit is None else limit
        steps = [next((s for s in range(1, STEPS) if HALT[i, s - 1] > limit), STEPS) for i in ALL]
        right = right_cells(steps)
        assert point.mean_steps == pytest.approx(np.mean(steps))
        assert point.exact_accuracy == pytest.approx(np.mean(right == LENGTH))
        assert point.accuracy == pytest.approx(np.mean(right / LENGTH))
    assert [p.mean_steps for p in curve.by_steps] == [1, 2, 3, 4]
    assert [p.exact_accuracy for p in curve.by_steps] == pytest.approx((RIGHT_CELLS == LENGTH).mean(axis=0))
    assert [p.accuracy for p in curve.by_steps] == pytest.approx(RIGHT_CELLS.mean(axis=0) / LENGTH)
    for threshold in (0.25, 0.5, 0.9):
        early = evaluated(halting_step(threshold), ALL, 4, Devices(1)).metrics
        point = next(p for p in curve.by_threshold if p.threshold == threshold)
        assert (early["steps"], early["exact_accuracy"]) == pytest.approx((point.mean_steps, point.exact_accuracy))
    assert from_json(json.loads(to_json(curve))) == curve
    assert {0.5, 1} <= {point.threshold for point in telling(curve)}
    shown = table(curve)
    assert shown[-1].split() == ["all", "after", "4", "4.00", "0.4286", "0.6905"]
    assert [line.split()[1] for line in shown if line.split()[0] == "0.5"] == ["2.71"]


def test_examples_without_labels_count_for_nothing():
    labels = jnp.array([[3, IGNORED_LABEL], [IGNORED_LABEL, IGNORED_LABEL], [3, 3]])
    preds = jnp.array([[[3, 1], [1, 1], [3, 1]], [[1, 1], [1, 1], [3, 3]]])
    curve = curve_of(curve_sums(preds, labels, jnp.array([[1.0, 1, -1], [1, 1, 1]])))
    assert curve is not None
    assert [(p.mean_steps, p.exact_accuracy, p.accuracy) for p in curve.by_steps] == [(1, 0.5, 0.75), (2, 0.5, 0.5)]
    half = next(p for p in curve.by_threshold if p.threshold == 0.5)
    assert (half.mean_steps, half.exact_accuracy, half.accuracy) == (1.5, 1.0, 1.0)
    assert curve_of(curve_sums(preds, jnp.full((3, 2), IGNORED_LABEL), jnp.zeros((2, 3)))) is None


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan])
def test_a_threshold_is_a_probability(probability):
    with pytest.raises(UserError, match="is no probability; use a number from 0 to 1"):
        threshold_logit(probability)
    assert threshold_logit(0.5) == 0


@pytest.mark.parametrize("found", [{}, [], {"by_threshold": 3, "by_steps": []}, {"by_threshold": [{}], "by_steps": []}])
def test_a_curve_of_other_hands_is_refused(found):
    with pytest.raises(ValueError, match="no halting curve"):
        from_json(found)


@pytest.mark.parametrize("model", ["trm", "hrm"])
def test_a_model_answers_as_in_the_whole_evaluation_at_its_halting_step(data_dir, model):
    config = with_model(preset("tiny"), model)
    bootstrapped = model == "hrm"
    arch = dataclasses.replace(config.arch, H_cycles=1, L_cycles=1, halt_max_steps=3, no_ACT_continue=not bootstrapped)
    config = dataclasses.replace(config, arch=arch)
    puzzles = load_split(data_dir, "test")
    objective = build_objective(config, puzzles.metadata, 4)
    assert objective.bootstrapped_halting == bootstrapped
    # A fresh halting head says the same of everything.
    head = {
        name: 9 * np.sin(np.arange(p.size)).reshape(p.shape) for name, p in objective.params.items() if "q_" in name
    }
    learner: Any = Learner(objective.params | head, objective.buffers)
    devices = Devices(1)
    batch, _ = next(iter(eval_batches(puzzles, batch_size=8)))
    _, outputs = devices.evaluate(make_eval_step(objective, 3))(learner, devices.split(batch))
    whole = {name: np.asarray(value)[0] for name, value in outputs.items()}
    logits = whole["q_halt_logits"] - whole.get("q_continue_logits", 0)
    assert ("q_continue_logits" in whole) == bootstrapped
    limit = float(np.median(logits[0]))
    after = [next((s for s in range(2) if logits[s, i] > limit), 2) for i in range(8)]
    assert len(set(after)) > 1
    step = devices.evaluate(make_halting_eval_step(objective, 3, limit))
    found = evaluate(step, learner, puzzles, devices, batch_size=8)
    for i, at in enumerate(after):
        assert (found.predictions[0, i] == whole["preds"][at, i]).all()
        assert found.q_halt_logits[0, i] == pytest.approx(whole["q_halt_logits"][at, i], abs=1e-4)
    assert found.metrics["steps"] == np.mean(after) + 1
