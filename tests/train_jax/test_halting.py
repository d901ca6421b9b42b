"""Halting at inference, compared with figures worked out by hand and with evaluations that run to the limit.

Refill has the answers of early halting, with fewer ACT steps computed. Evaluation with trajectories is equal to the
ordinary one without noise, and independent of batch and devices.
"""

import dataclasses
import json
import math
import shutil
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from support.halting_toy import CONTINUE, HALT, LENGTH, RIGHT_CELLS, STATE, STEPS, ToyObjective, evaluate, make_puzzles
from support.latent_toy import LatentToy, evaluate_refilled, evaluate_trajectories
from support.markers import slow_or_campaign, slow_unless
from support.scripts import run_script

from train_jax.__main__ import main
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.puzzles import metrics, queues
from train_jax.puzzles.batches import IGNORED_LABEL, load_mixture, mixture_of
from train_jax.puzzles.evaluation import Evaluator
from train_jax.puzzles.metrics import THRESHOLDS, threshold_logit
from train_jax.puzzles.queues import make_queue_step, queues_of, rows_of_queues
from train_jax.puzzles.scan import TrajectoryOptions, make_eval_step
from train_jax.puzzles.trajectories import STOPS, TrajectoryEvaluator
from train_jax.run.config import with_model
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start

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
    assert metrics.from_json(json.loads(metrics.to_json(curve))) == curve
    for malformed in ({}, [], {"by_threshold": 3, "by_steps": []}, {"by_threshold": [{}], "by_steps": []}):
        with pytest.raises(ValueError, match="no halting curve"):
            metrics.from_json(malformed)
    assert {0.5, 1} <= {point.threshold for point in metrics.select_points(curve)}
    shown = metrics.table(curve)
    assert shown[-1].split() == ["all", "after", "4", "4.00", "0.4286", "0.6905"]
    assert [line.split()[1] for line in shown if line.split()[0] == "0.5"] == ["2.71"]


@pytest.mark.slow
def test_examples_without_labels_are_not_counted():
    labels = jnp.array([[3, IGNORED_LABEL], [IGNORED_LABEL, IGNORED_LABEL], [3, 3]])
    preds = jnp.array([[[3, 1], [1, 1], [3, 1]], [[1, 1], [1, 1], [3, 3]]])
    curve = metrics.curve_of(metrics.curve_sums(preds, labels, jnp.array([[1.0, 1, -1], [1, 1, 1]])))
    assert curve is not None
    assert [(p.mean_steps, p.exact_accuracy, p.accuracy) for p in curve.by_steps] == [(1, 0.5, 0.75), (2, 0.5, 0.5)]
    half = next(p for p in curve.by_threshold if p.threshold == 0.5)
    assert (half.mean_steps, half.exact_accuracy, half.accuracy) == (1.5, 1.0, 1.0)
    assert metrics.curve_of(metrics.curve_sums(preds, jnp.full((3, 2), IGNORED_LABEL), jnp.zeros((2, 3)))) is None


def started(config) -> tuple[Any, TrainState]:
    """Returns the objective and the first state of a run, with another halting head: a new one halts nowhere."""
    training = start(config, devices=Devices(1))
    state = training.initial_state()
    head = {name: 9 * np.sin(np.arange(p.size)).reshape(p.shape) for name, p in state.ema.items() if "q_" in name}
    return training.objective, state._replace(ema=state.ema | head)


@pytest.mark.parametrize("model", slow_unless("trm".__eq__, ["trm", "hrm"]))
def test_early_answers_are_those_of_the_whole_evaluation_at_the_halting_step(data_dir, model):
    config = with_model(preset("tiny"), model)
    bootstrapped = model == "hrm"
    arch = dataclasses.replace(config.arch, H_cycles=1, L_cycles=1, halt_max_steps=3, no_ACT_continue=not bootstrapped)
    devices = Devices(1)
    objective, state = started(dataclasses.replace(config, arch=arch, data_dir=str(data_dir)))
    assert objective.task.bootstrapped_halting == bootstrapped
    batch, _ = next(iter(load_mixture(str(data_dir), "test").eval_batches(batch_size=8)))
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


# ---- refill


SAME = ("accuracy", "count", "exact_accuracy", "q_halt_accuracy", "steps")
MANY = list(np.random.default_rng(0).integers(0, len(HALT), 200))


def check_same(refilled, halted) -> None:
    assert (refilled.predictions == halted.predictions).all()
    assert (refilled.q_halt_logits == halted.q_halt_logits).all()
    assert (refilled.puzzle_identifiers == halted.puzzle_identifiers).all()
    for name in SAME:
        assert refilled.metrics[name] == pytest.approx(halted.metrics[name], abs=1e-7)


@pytest.mark.parametrize(("batch_size", "threshold"), [(1, 0.5), (3, 0.5), (16, 0.5), (7, 0.0), (2, 1.0)])
def test_the_answers_are_those_of_early_halting(batch_size, threshold):
    identifiers = list(range(len(HALT))) * 2
    halted = evaluate(identifiers, batch_size, Devices(1), threshold=threshold)
    check_same(evaluate_refilled(identifiers, batch_size, Devices(1), threshold), halted)


@pytest.mark.parametrize("stop", [0.9999, pytest.param(0.5, marks=pytest.mark.campaign)])
def test_trajectories_that_stop_have_the_answers_of_all_trajectories(stop):
    """The figures are those computed from the answers of all trajectories, and do not depend on the batch. Without a
    halt, the answer is that of the highest logit."""
    options = TrajectoryOptions(3, 0.8, 6, seed=2)
    complete = evaluate_trajectories(MANY, 16, Devices(1), options)
    results = [evaluate_refilled(MANY, size, Devices(1), stop, options) for size in (1, 16)]
    for result in results:
        assert (result.predictions == results[0].predictions).all()
        for name, figure in (("steps", "steps"), ("exact", "exact_accuracy")):
            expected = complete.stops[name][STOPS.index(stop), -1, -1]
            assert result.metrics[figure] == pytest.approx(expected, abs=1e-6)
        assert result.metrics["computed_steps"] >= result.metrics["steps"]
    assert 1 < results[0].metrics["steps"] < options.act_steps
    never = evaluate_refilled(MANY, 16, Devices(1), 1.0, options)
    assert never.metrics["steps"] == options.act_steps
    assert (never.predictions == complete.evaluation.predictions).all()
    assert (never.q_halt_logits == complete.evaluation.q_halt_logits).all()


def test_rows_are_idle_only_at_the_end(monkeypatch):
    """Queues of 64 and of 8 puzzles: a row is idle for less than the limit at the end of a queue."""
    halted = evaluate(MANY, 8, Devices(1), threshold=0.5)
    for batches in (8, 1):
        monkeypatch.setattr(queues, "QUEUE_BATCHES", batches)
        refilled = evaluate_refilled(MANY, 8, Devices(1))
        check_same(refilled, halted)
        number = -(-25 // batches)
        computed, useful = (refilled.metrics[name] * len(MANY) for name in ("computed_steps", "steps"))
        assert useful <= computed < useful + number * 8 * STEPS
    few = evaluate_refilled(MANY[:20], 8, Devices(1)).metrics
    assert rows_of_queues(8, 20, 1) == 2
    sizes = ((250, 1000, 1, 16), (250, 10**6, 8, 16), (4, 1, 8, 16), (250, 1000, 1, 128))
    assert [rows_of_queues(*each) for each in sizes] == [63, 250, 1, 16]
    assert few["computed_steps"] * 20 < few["steps"] * 20 + 2 * STEPS


def test_queues_keep_the_order_and_share_the_examples_between_devices():
    batches = []
    for number, valid in enumerate((4, 3, 4, 1)):
        own = np.arange(4) + 10 * number
        arrays = {"inputs": own[:, None], "labels": np.ones((4, 1), int), "puzzle_identifiers": own}
        batches.append((arrays, np.arange(4) < valid))
    queues = list(queues_of(iter(batches), count=4, devices=2))
    assert len(queues) == 1
    arrays = queues[0].arrays
    own = arrays["puzzle_identifiers"].reshape(2, 8)
    valid = arrays["is_example"].reshape(2, 8)
    assert own[0][valid[0]].tolist() == [0, 2, 10, 12, 21, 23] and own[1][valid[1]].tolist() == [1, 3, 11, 20, 22, 30]
    assert (arrays["labels"].reshape(2, 8)[~valid] == IGNORED_LABEL).all()
    for number, (outputs, batch, mask) in enumerate(queues[0].of_batches({"preds": arrays["inputs"][None] + 100})):
        assert batch is batches[number][0] and mask is batches[number][1]
        assert (outputs["preds"][0][mask] == batch["inputs"][mask] + 100).all()


def test_the_command_gives_the_answers_of_early_halting(capsys, finished_run, tmp_path):
    run = RunFolder(shutil.copytree(finished_run, tmp_path / "run"))
    figures = []
    answers = []
    file = tmp_path / "answers.npz"
    line = ["evaluate", str(run.path), "--halt-threshold", "0.001", "--batch-size", "3", "--predictions", str(file)]
    for options in ([], ["--refill"]):
        assert main([*line, *options]) == 0
        figures.append(json.loads(run.halted_early("test").read_text()))
        answers.append(dict(np.load(file)))
    assert "with refill:" in capsys.readouterr().out
    for name in SAME:
        assert figures[0][name] == pytest.approx(figures[1][name], abs=1e-6)
    for name in ("preds", "inputs", "puzzle_identifiers"):
        assert (answers[0][name] == answers[1][name]).all()


@pytest.mark.slow
def test_the_command_with_trajectories_that_stop(capsys, finished_run, tmp_path):
    run = RunFolder(shutil.copytree(finished_run, tmp_path / "run"))
    line = ["evaluate", str(run.path), "--trajectories", "2", "--noise", "0.1", "--depth", "6"]
    assert main([*line, "--halt-threshold", "0.9"]) == 0
    assert "2 trajectories of 6 ACT steps with noise 0.1" in (output := capsys.readouterr().out)
    assert "halting at a probability above 0.9" in output
    figures = json.loads(run.halted_early("test").read_text())
    assert (figures["trajectories"], figures["noise"], figures["depth"], figures["threshold"]) == (2, 0.1, 6, 0.9)
    assert figures["exact_accuracy_low"] <= figures["exact_accuracy"] <= figures["exact_accuracy_high"]
    assert main(["summary", str(run.path)]) == 0
    assert "ACT steps on average, up to 2 trajectories of 6 with noise 0.1, until" in capsys.readouterr().out
    run.halted_early("test").write_text(json.dumps(figures | {"step": 1}))
    assert main(["summary", str(run.path)]) == 0 and "thinking longer" not in capsys.readouterr().out
    assert main(line) == 0
    point = json.loads(run.trajectories("test").read_text())["points"][-1]
    expected = next(stop for stop in point["stops"] if stop["threshold"] == 0.9)
    for name in ("steps", "exact_accuracy"):
        assert figures[name] == pytest.approx(expected[name], abs=1e-6)


# ---- noisy trajectories


def test_without_noise_every_trajectory_is_the_same_and_keeps_its_most_confident_answer():
    result = evaluate_trajectories(ALL, 3, Devices(1), TrajectoryOptions(2, 0.0, STEPS))
    kept = HALT.argmax(axis=1)
    solved = RIGHT_CELLS == LENGTH
    assert result.exact_accuracy("halting/best") == np.mean(solved[ALL, kept])
    assert result.exact_accuracy("halting/last") == result.exact_accuracy("vote/last") == np.mean(solved[:, -1])
    assert result.exact_accuracy("pass/best") == np.mean(solved[ALL, kept])
    assert result.exact_accuracy("any_step") == np.mean(solved.any(axis=1))
    assert (result.evaluation.q_halt_logits[0] == HALT.max(axis=1)).all()
    right = RIGHT_CELLS[ALL, kept]
    for answer, cells, step in zip(result.evaluation.predictions[0], right, kept, strict=True):
        assert answer.tolist() == [3] * cells + [10 + step] * (LENGTH - cells)
    metrics = result.evaluation.metrics
    assert metrics["accuracy"] == pytest.approx(np.mean(right / LENGTH))
    assert (metrics["steps"], metrics["count"], metrics["pass@2"]) == (2 * STEPS, 7, result.exact_accuracy("pass/best"))
    assert metrics["q_halt_accuracy"] == np.mean((HALT.max(axis=1) >= 0) == (right == LENGTH))
    by_depth = [np.mean(solved[ALL, HALT[:, :depth].argmax(axis=1)]) for depth in result.depths]
    assert result.shares["halting/best"][1].tolist() == by_depth


def test_noise_depends_on_the_seed_the_puzzle_and_the_trajectory_alone():
    options = TrajectoryOptions(4, 0.8, 5, "vote", seed=3)
    first = evaluate_trajectories(ALL * 2, 14, Devices(1), options)
    few = evaluate_trajectories(ALL * 2, 3, Devices(1), dataclasses.replace(options, trajectories=2))
    assert (few.trajectories, first.trajectories) == ([1, 2], [1, 2, 3, 4])
    assert all((few.shares[name] == first.shares[name][:2]).all() for name in few.shares)
    logits = first.evaluation.q_halt_logits[0]
    # Equal puzzles at other places in the data set; a logit after the first ACT step has no noise.
    assert ((logits[:7] != logits[7:]) | (logits[:7] == HALT[:, 0])).all() and (logits[:7] != logits[7:]).sum() > 4
    other = evaluate_trajectories(ALL * 2, 14, Devices(1), dataclasses.replace(options, seed=4))
    assert (other.evaluation.q_halt_logits[0] != logits).sum() > 8


def test_the_noise_has_the_standard_deviation_and_is_added_after_each_step():
    """The logit of step s, with all logits 0, is the sum of the noise on five latents after s - 1 steps."""
    state = STATE._replace(ema={name: 0 * table for name, table in STATE.ema.items()})
    devices = Devices(1)
    puzzles = mixture_of([make_puzzles([0] * 4000)])
    objective = cast(Any, LatentToy())
    evaluator = TrajectoryEvaluator(objective, puzzles, devices, TrajectoryOptions(1, 0.5, 4), batch_size=4000)
    batch, valid = next(puzzles.eval_batches(batch_size=4000))
    rows = {"is_example": valid, "number": np.arange(4000, dtype=np.int32), "trajectory": np.zeros(4000, np.int32)}
    _, outputs = evaluator._step(devices.replicate(state), devices.shard(devices.split_batch(batch | rows)))
    logits = np.asarray(outputs["logits"])[0]
    assert (logits[0] == 0).all()
    added = np.diff(logits, axis=0)
    assert added.std(axis=1) == pytest.approx([0.5 * 5**0.5] * 3, rel=0.05)
    assert abs(np.corrcoef(added)[np.triu_indices(3, 1)]).max() < 0.05


@pytest.mark.campaign
def test_one_device_and_eight_give_the_same(tmp_path):
    for devices in (1, 8):
        run_script("trajectories_on_devices", devices, 8, tmp_path / str(devices))
    first, *others = arrays = [dict(np.load(path)) for path in sorted(tmp_path.glob("*.npz"))]
    for other in others:
        for name, values in first.items():
            if not name.endswith("computed_steps"):
                # Means over a queue of each device are sums in another order.
                tolerance = 1e-6 if name.startswith(("stopped", "halted")) else 0
                np.testing.assert_allclose(values, other[name], rtol=tolerance, atol=0, err_msg=name)
    for each in arrays:
        # A device with one row stops by itself; one of the eight devices has only padding.
        halted = {name.removeprefix("halted "): values for name, values in each.items() if name.startswith("halted ")}
        check(halted, halted["preds"], HALTS_AFTER, float(np.mean(HALTS_AFTER)))


def test_what_cannot_be_evaluated_is_refused():
    objective: Any = ToyObjective()  # without latents, and its rows do not halt
    puzzles = make_puzzles(ALL)
    devices = Devices(1)
    noisy = TrajectoryEvaluator(objective, mixture_of([puzzles]), devices, TrajectoryOptions(2, 0.1, 3), batch_size=7)
    with pytest.raises(UserError, match=r"inner_carry of the carry.*use --noise 0"):
        noisy(STATE)
    refilled = Evaluator(objective, puzzles, devices, max_steps=STEPS, batch_size=7, halt_threshold=0.5, refill=True)
    with pytest.raises(UserError, match=r"a carry with a field halted.*omit --refill"):
        refilled(STATE)
    with pytest.raises(UserError, match=r"need \d+ GiB of memory; use --batch-size \d+ or less"):
        evaluate_trajectories(ALL, 2**20, Devices(1), TrajectoryOptions(4096, 0.1, 4096))


@pytest.mark.parametrize("model", ["trm", *slow_or_campaign(["hrm"], ["trm_hier6", "trm_singlez", "transformer"])])
def test_without_noise_the_figures_are_those_of_the_ordinary_evaluation(data_dir, model):
    """A model continues beyond the steps of its training as one with a later limit does."""
    config = with_model(preset("tiny"), model)
    cycles = {name: 1 for name in ("H_cycles", "L_cycles") if hasattr(config.arch, name)}

    def evaluated(limit, make):
        arch = dataclasses.replace(config.arch, halt_max_steps=limit, **cycles)
        objective, state = started(dataclasses.replace(config, arch=arch, data_dir=str(data_dir)))
        return make(objective, load_mixture(str(data_dir), "test"), Devices(1), batch_size=8)(state)

    def with_trajectories(*options):
        return partial(TrajectoryEvaluator, options=TrajectoryOptions(*options))

    whole = evaluated(4, partial(Evaluator, max_steps=4))
    same, noisy = (evaluated(2, with_trajectories(*options)) for options in ((1, 0.0, 4), (2, 0.5, 4)))
    assert same.exact_accuracy("halting/last") == whole.metrics["exact_accuracy"]
    if not getattr(config.arch, "no_ACT_continue", True):
        return  # the logit that is compared is not the one that is kept
    kept = whole.q_halt_logits.argmax(axis=0), np.arange(8)
    assert same.evaluation.q_halt_logits[0] == pytest.approx(whole.q_halt_logits[kept], abs=1e-5)
    assert (same.evaluation.predictions[0] == whole.predictions[kept]).all()
    assert same.evaluation.metrics["steps"] == whole.metrics["steps"]
    assert (noisy.evaluation.q_halt_logits != same.evaluation.q_halt_logits).any()


def test_the_command_writes_results_and_shows_the_loss_of_the_chooser(capsys, finished_run, tmp_path):
    run = RunFolder(shutil.copytree(finished_run, tmp_path / "run"))
    ordinary = run.evaluation("test").read_text()
    line = [str(run.path), "--trajectories", "3", "--noise", "0.3", "--depth", "5", "--choose", "vote"]
    file = tmp_path / "results.json"
    assert main(["evaluate", *line, "--results", str(file), "--predictions", str(tmp_path / "answers.npz")]) == 0
    output = capsys.readouterr().out
    assert "3 trajectories of 5 ACT steps with noise 0.3, chosen by vote" in output and "pass@3" in output
    assert run.evaluation("test").read_text() == ordinary
    values = json.loads(run.trajectories("test").read_text())
    assert json.loads(file.read_text()) == values
    assert (values["trajectories"], values["depth"], values["noise"], values["chooser"]) == (3, 5, 0.3, "vote")
    assert values["metrics"]["steps"] == values["points"][-1]["act_steps"] == 15
    assert values["metrics"]["exact_accuracy"] == values["points"][-1]["exact_accuracy"]["vote/best"]


def test_options_that_do_not_go_together(capsys, finished_run):
    for options, message in (
        (["--refill"], "add --halt-early or --halt-threshold"),
        (["--halt-early", "--trajectories", "2", "--choose", "vote"], "--choose vote needs all trajectories"),
        (["--halt-early", "--depth", "3", "--results", "x.json"], "--results x.json is for trajectories without"),
        (["--results", "x.json"], "--results x.json is for --trajectories, --views, --noise or --depth; omit it"),
        (["--trajectories", "2", "--results", "no/x.json"], "no is not a folder"),
        (["--noise", "-1"], "--noise is -1"),
        (["--depth", "0"], "--depth is 0; use at least 1"),
    ):
        assert main(["evaluate", str(finished_run), *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("trm: ") and error.count("\n") == 1 and message in error
