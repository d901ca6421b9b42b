"""Early halting with refill: the answers of early halting, with fewer ACT steps computed."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
from support.halting_toy import HALT, STATE, STEPS, ToyObjective, evaluate, make_puzzles
from support.latent_toy import evaluate_refilled, evaluate_trajectories
from support.markers import slow_unless

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.run.folder import RunFolder
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles import queues
from train_jax.tasks.puzzles.batches import IGNORED_LABEL
from train_jax.tasks.puzzles.evaluation import Evaluator
from train_jax.tasks.puzzles.queues import queues_of, rows_of_queues
from train_jax.tasks.puzzles.scan import TrajectoryOptions
from train_jax.tasks.puzzles.trajectories import STOPS

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


@pytest.mark.parametrize("stop", slow_unless(lambda stop: stop == 0.9999, [0.5, 0.9999]))
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
    assert few["computed_steps"] * 20 < few["steps"] * 20 + 2 * STEPS


@pytest.mark.parametrize(
    ("batch_size", "examples", "devices", "most_steps", "rows"),
    [(250, 1000, 1, 16, 63), (250, 10**6, 8, 16, 250), (4, 1, 8, 16, 1), (250, 1000, 1, 128, 16)],
)
def test_small_sets_have_fewer_rows(batch_size, examples, devices, most_steps, rows):
    assert rows_of_queues(batch_size, examples, devices, most_steps) == rows


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


def test_a_model_whose_rows_do_not_halt_cannot_be_refilled():
    objective: Any = ToyObjective()
    options = {"max_steps": STEPS, "batch_size": 2, "halt_threshold": 0.5, "refill": True}
    evaluator = Evaluator(objective, make_puzzles([0, 1]), Devices(1), **options)
    with pytest.raises(UserError, match=r"a carry with a field halted.*omit --refill"):
        evaluator(STATE)


def test_the_command_gives_the_answers_of_early_halting(capsys, finished_run, tmp_path):
    run = RunFolder(shutil.copytree(finished_run, tmp_path / "run"))
    figures, answers = [], []
    for options in ([], ["--refill"]):
        file = tmp_path / f"answers{len(options)}.npz"
        line = ["evaluate", str(run.path), "--halt-threshold", "0.001", "--batch-size", "3", "--predictions", str(file)]
        assert main([*line, *options]) == 0
        figures.append(json.loads(run.halted_early("test").read_text()))
        with np.load(file) as arrays:
            answers.append({name: arrays[name] for name in arrays.files})
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
