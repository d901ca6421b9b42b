"""Halting at inference, compared with figures worked out by hand and with evaluations that run to the limit."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from support.halting_toy import CONTINUE, HALT, LENGTH, RIGHT_CELLS, STEPS, evaluate
from support.markers import slow_unless
from support.scripts import run_script

from train_jax.errors import UserError
from train_jax.run.config import with_model
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.start import start
from train_jax.tasks.puzzles.batches import IGNORED_LABEL
from train_jax.tasks.puzzles.metrics import (
    THRESHOLDS,
    curve_of,
    curve_sums,
    from_json,
    select_points,
    table,
    threshold_logit,
    to_json,
)
from train_jax.tasks.puzzles.queues import make_queue_step
from train_jax.tasks.puzzles.scan import make_eval_step

ALL = list(range(len(HALT)))
HALTS_AFTER = [4, 1, 2, 4, 3, 1, 4]
"""ACT steps at a threshold of 0.5, by identifier: read from the table by hand."""


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
def test_a_sequence_answers_where_it_halts_and_the_batch_runs_until_all_have_halted(batch_size, computed):
    result = evaluate(ALL, batch_size, Devices(1), threshold=0.5)
    check(result.metrics, result.predictions, HALTS_AFTER, computed)
    assert result.q_halt_logits[0].tolist() == [HALT[i, step - 1] for i, step in enumerate(HALTS_AFTER)]
    agrees = (result.q_halt_logits[0] >= 0) == (right_cells(HALTS_AFTER) == LENGTH)
    assert result.metrics["q_halt_accuracy"] == pytest.approx(np.mean(agrees))
    assert result.halting_curve is None


def test_thresholds_that_are_never_and_always_exceeded():
    for probability in (-0.1, 1.1, math.nan):
        with pytest.raises(UserError, match="is not a probability; use a number from 0 to 1"):
            threshold_logit(probability)
    for threshold, step in ((1.0, STEPS), (0.0, 1)):
        result = evaluate(ALL, 7, Devices(1), threshold=threshold)
        check(result.metrics, result.predictions, [step] * len(ALL), step)
    whole, never = (evaluate(ALL, 7, Devices(1), threshold=threshold) for threshold in (None, 1.0))
    assert (whole.predictions[-1] == never.predictions[0]).all()
    assert (whole.q_halt_logits[-1] == never.q_halt_logits[0]).all()
    # Padding has the blank identifier, 0, which never halts, and does not prolong a batch.
    metrics = evaluate([1, 5, 2], 8, Devices(1), threshold=0.5).metrics
    assert (metrics["steps"], metrics["computed_steps"]) == (pytest.approx(4 / 3), 2)


def test_bootstrapped_halting_compares_as_in_training():
    halts = HALT > CONTINUE
    steps = [next((s for s in range(1, STEPS) if halts[i, s - 1]), STEPS) for i in ALL]
    assert steps != HALTS_AFTER
    result = evaluate(ALL, 1, Devices(1), threshold=0.5, bootstrapped=True)
    check(result.metrics, result.predictions, steps, float(np.mean(steps)))
    curve = evaluate(ALL, 7, Devices(1), bootstrapped=True).halting_curve
    assert curve is not None
    assert next(p.mean_steps for p in curve.by_threshold if p.threshold == 0.5) == pytest.approx(np.mean(steps))


@pytest.mark.slow
def test_each_device_stops_by_itself(tmp_path):
    """Each device has one row of 2 batches of 4 rows on 4 devices; in the second batch one has only padding."""
    out = tmp_path / "out"
    run_script("halt_on_devices", 4, 4, out)
    for runner in ("pmap", "shard_map"):
        with np.load(f"{out}.{runner}.npz") as arrays:
            result = {name: arrays[name] for name in arrays.files}
        check(result, result["predictions"], HALTS_AFTER, float(np.mean(HALTS_AFTER)))


def test_the_curve_equals_the_result_of_halting():
    curve = evaluate(ALL, 4, Devices(1)).halting_curve
    assert curve is not None and len(curve.by_threshold) == len(THRESHOLDS)
    for point in curve.by_threshold:
        assert point.threshold is not None
        ends = {0: -math.inf, 1: math.inf}
        limit = ends[point.threshold] if point.threshold in ends else math.log(point.threshold / (1 - point.threshold))
        steps = [next((s for s in range(1, STEPS) if HALT[i, s - 1] > limit), STEPS) for i in ALL]
        right = right_cells(steps)
        assert point.mean_steps == pytest.approx(np.mean(steps))
        assert point.exact_accuracy == pytest.approx(np.mean(right == LENGTH))
        assert point.accuracy == pytest.approx(np.mean(right / LENGTH))
    assert [p.mean_steps for p in curve.by_steps] == [1, 2, 3, 4]
    assert [p.exact_accuracy for p in curve.by_steps] == pytest.approx((RIGHT_CELLS == LENGTH).mean(axis=0))
    assert [p.accuracy for p in curve.by_steps] == pytest.approx(RIGHT_CELLS.mean(axis=0) / LENGTH)
    for threshold in (0.25, 0.5, 0.9):
        early = evaluate(ALL, 4, Devices(1), threshold=threshold).metrics
        point = next(p for p in curve.by_threshold if p.threshold == threshold)
        assert (early["steps"], early["exact_accuracy"]) == pytest.approx((point.mean_steps, point.exact_accuracy))
    assert from_json(json.loads(to_json(curve))) == curve
    for malformed in ({}, [], {"by_threshold": 3, "by_steps": []}, {"by_threshold": [{}], "by_steps": []}):
        with pytest.raises(ValueError, match="no halting curve"):
            from_json(malformed)
    assert {0.5, 1} <= {point.threshold for point in select_points(curve)}
    shown = table(curve)
    assert shown[-1].split() == ["all", "after", "4", "4.00", "0.4286", "0.6905"]
    assert [line.split()[1] for line in shown if line.split()[0] == "0.5"] == ["2.71"]


@pytest.mark.slow
def test_examples_without_labels_are_not_counted():
    labels = jnp.array([[3, IGNORED_LABEL], [IGNORED_LABEL, IGNORED_LABEL], [3, 3]])
    preds = jnp.array([[[3, 1], [1, 1], [3, 1]], [[1, 1], [1, 1], [3, 3]]])
    curve = curve_of(curve_sums(preds, labels, jnp.array([[1.0, 1, -1], [1, 1, 1]])))
    assert curve is not None
    assert [(p.mean_steps, p.exact_accuracy, p.accuracy) for p in curve.by_steps] == [(1, 0.5, 0.75), (2, 0.5, 0.5)]
    half = next(p for p in curve.by_threshold if p.threshold == 0.5)
    assert (half.mean_steps, half.exact_accuracy, half.accuracy) == (1.5, 1.0, 1.0)
    assert curve_of(curve_sums(preds, jnp.full((3, 2), IGNORED_LABEL), jnp.zeros((2, 3)))) is None


@pytest.mark.parametrize("model", slow_unless("trm".__eq__, ["trm", "hrm"]))
def test_early_answers_are_those_of_the_whole_evaluation_at_the_halting_step(data_dir, model):
    config = with_model(preset("tiny"), model)
    bootstrapped = model == "hrm"
    arch = dataclasses.replace(config.arch, H_cycles=1, L_cycles=1, halt_max_steps=3, no_ACT_continue=not bootstrapped)
    devices = Devices(1)
    training = start(dataclasses.replace(config, arch=arch, data_dir=str(data_dir)), devices=devices)
    objective, state = training.objective, training.initial_state()
    assert objective.task.bootstrapped_halting == bootstrapped
    # A new halting head has the same output for all inputs.
    head = {name: 9 * np.sin(np.arange(p.size)).reshape(p.shape) for name, p in state.ema.items() if "q_" in name}
    state = state._replace(ema=state.ema | head)
    batch, _ = next(iter(training.task.test_set.eval_batches(batch_size=8)))
    batch = devices.split_batch(batch)
    _, outputs = devices.parallel_eval_step(make_eval_step(objective, 3))(state, batch)
    whole = {name: np.asarray(value)[0] for name, value in outputs.items()}
    logits = whole["q_halt_logits"] - whole.get("q_continue_logits", 0)
    assert ("q_continue_logits" in whole) == bootstrapped
    limit = float(np.median(logits[0]))
    after = [next((s for s in range(2) if logits[s, i] > limit), 2) for i in range(8)]
    assert len(set(after)) > 1
    metrics, early = devices.parallel_eval_step(make_queue_step(objective, 3, limit))(state, batch)
    for i, at in enumerate(after):
        assert (early["preds"][0, 0, i] == whole["preds"][at, i]).all()
        assert early["q_halt_logits"][0, 0, i] == pytest.approx(whole["q_halt_logits"][at, i], abs=1e-4)
    assert metrics["steps"] / 8 == np.mean(after) + 1
