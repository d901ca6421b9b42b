"""Evaluation with noisy trajectories: equal to the ordinary one without noise, and independent of batch and devices."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
from support.halting_toy import HALT, LENGTH, RIGHT_CELLS, STATE, STEPS, ToyObjective, make_puzzles
from support.latent_toy import LatentToy, evaluate_trajectories
from support.markers import slow_unless
from support.scripts import run_script
from support.untrained_run import write_run

from benchmarks.trajectories import Setting, choose, means
from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.run.config import with_model
from train_jax.run.folder import RunFolder, write_text
from train_jax.run.presets import preset
from train_jax.run.storage import path_of
from train_jax.runtime.devices import Devices
from train_jax.start import start
from train_jax.tasks.puzzles.batches import load_mixture, mixture_of
from train_jax.tasks.puzzles.evaluation import Evaluator
from train_jax.tasks.puzzles.scan import TrajectoryOptions
from train_jax.tasks.puzzles.trajectories import TrajectoryEvaluator, milestones

ALL = list(range(len(HALT)))


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
    for example, (cells, step) in enumerate(zip(right, kept, strict=True)):
        expected = [3] * cells + [10 + step] * (LENGTH - cells)
        assert result.evaluation.predictions[0, example].tolist() == expected
    metrics = result.evaluation.metrics
    assert metrics["accuracy"] == pytest.approx(np.mean(right / LENGTH))
    assert (metrics["steps"], metrics["count"], metrics["pass@2"]) == (2 * STEPS, 7, result.exact_accuracy("pass/best"))
    assert metrics["q_halt_accuracy"] == np.mean((HALT.max(axis=1) >= 0) == (right == LENGTH))
    for place, depth in enumerate(result.depths):
        expected = np.mean(solved[ALL, HALT[:, :depth].argmax(axis=1)])
        assert result.shares["halting/best"][1, place] == expected


def results(result):
    return [result.evaluation.predictions, result.evaluation.q_halt_logits, *result.shares.values()]


def test_noise_depends_on_the_seed_the_puzzle_and_the_trajectory_alone():
    options = TrajectoryOptions(4, 0.8, 5, "vote", seed=3)
    first = evaluate_trajectories(ALL * 2, 14, Devices(1), options)
    again = evaluate_trajectories(ALL * 2, 3, Devices(1), options)
    assert all((a == b).all() for a, b in zip(results(first), results(again), strict=True))
    logits = first.evaluation.q_halt_logits[0]
    # Equal puzzles at other places in the data set; a logit after the first ACT step has no noise.
    assert ((logits[:7] != logits[7:]) | (logits[:7] == HALT[:, 0])).all() and (logits[:7] != logits[7:]).sum() > 4
    other = evaluate_trajectories(ALL * 2, 14, Devices(1), dataclasses.replace(options, seed=4))
    assert (other.evaluation.q_halt_logits[0] != logits).sum() > 8
    few = evaluate_trajectories(ALL * 2, 14, Devices(1), dataclasses.replace(options, trajectories=2))
    assert (few.trajectories, first.trajectories) == ([1, 2], [1, 2, 3, 4])
    assert all((few.shares[name] == first.shares[name][:2]).all() for name in few.shares)


def test_the_noise_has_the_standard_deviation_and_is_added_after_each_step():
    """The logit of step s, with all logits 0, is the sum of the noise on five latents after s - 1 steps."""
    state = STATE._replace(ema={name: 0 * table for name, table in STATE.ema.items()})
    devices, puzzles, objective = Devices(1), mixture_of([make_puzzles([0] * 4000)]), LatentToy()
    evaluator = TrajectoryEvaluator(objective, puzzles, devices, TrajectoryOptions(1, 0.5, 4), batch_size=4000)  # pyright: ignore
    batch, valid = next(puzzles.eval_batches(batch_size=4000))
    rows = {"is_example": valid, "number": np.arange(4000, dtype=np.int32), "trajectory": np.zeros(4000, np.int32)}
    _, outputs = evaluator._step(devices.replicate(state), devices.shard(devices.split_batch(batch | rows)))
    logits = np.asarray(outputs["logits"])[0]
    assert (logits[0] == 0).all()
    added = np.diff(logits, axis=0)
    assert added.std(axis=1) == pytest.approx([0.5 * 5**0.5] * 3, rel=0.05)
    assert abs(np.corrcoef(added)[np.triu_indices(3, 1)]).max() < 0.05


@pytest.mark.slow
def test_one_device_and_eight_give_the_same(tmp_path):
    arrays = []
    for devices in (1, 8):
        run_script("trajectories_on_devices", devices, 8, tmp_path / str(devices))
        for runner in ("pmap", "shard_map"):
            with np.load(tmp_path / f"{devices}.{runner}.npz") as file:
                arrays.append({name: file[name] for name in file.files})
    for other in arrays[1:]:
        for name, values in arrays[0].items():
            if not name.endswith("computed_steps"):
                # Means over a queue of each device are sums in another order.
                tolerance = 1e-6 if name.startswith("stopped") else 0
                np.testing.assert_allclose(values, other[name], rtol=tolerance, atol=0, err_msg=name)


def test_what_cannot_be_evaluated_is_refused():
    objective: object = ToyObjective()  # a model without latents
    puzzles = mixture_of([make_puzzles(ALL)])
    evaluator = TrajectoryEvaluator(objective, puzzles, Devices(1), TrajectoryOptions(2, 0.1, 3), batch_size=7)  # pyright: ignore
    with pytest.raises(UserError, match=r"inner_carry of the carry.*use --noise 0"):
        evaluator(STATE)
    with pytest.raises(UserError, match=r"need \d+ GiB of memory; use --batch-size \d+ or less"):
        evaluate_trajectories(ALL, 2**20, Devices(1), TrajectoryOptions(4096, 0.1, 4096))


@pytest.mark.parametrize("model", slow_unless("trm".__eq__, ["trm", "hrm", "trm_hier6", "trm_singlez", "transformer"]))
def test_without_noise_the_figures_are_those_of_the_ordinary_evaluation(data_dir, model):
    """A model continues beyond the steps of its training as one with a later limit does."""
    config = with_model(preset("tiny"), model)
    cycles = {name: 1 for name in ("H_cycles", "L_cycles") if hasattr(config.arch, name)}

    def evaluated(limit, make):
        arch = dataclasses.replace(config.arch, halt_max_steps=limit, **cycles)
        training = start(dataclasses.replace(config, arch=arch, data_dir=str(data_dir)), devices=Devices(1))
        # A new halting head has the same output for all inputs.
        state = training.initial_state()
        head = {name: 9 * np.sin(np.arange(p.size)).reshape(p.shape) for name, p in state.ema.items() if "q_" in name}
        state = state._replace(ema=state.ema | head)
        return make(training.objective, load_mixture(str(data_dir), "test"), Devices(1), batch_size=8)(state)

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


# ---- the command


@pytest.fixture(scope="module")
def run(tmp_path_factory, data_dir):
    """An untrained run whose ordinary evaluation has a file already."""
    path = tmp_path_factory.mktemp("runs") / "run"
    run = RunFolder(path_of(write_run(path, data_dir, act_steps=2, step=1, eval_batch_size=8)))
    write_text(run.evaluation("test"), "{}")
    return run


def test_the_command_writes_results_and_shows_the_loss_of_the_chooser(capsys, run, tmp_path):
    line = [str(run.path), "--trajectories", "3", "--noise", "0.3", "--depth", "5", "--choose", "vote"]
    file = tmp_path / "results.json"
    assert main(["evaluate", *line, "--results", str(file), "--predictions", str(tmp_path / "answers.npz")]) == 0
    output = capsys.readouterr().out
    assert "3 trajectories of 5 ACT steps with noise 0.3, chosen by vote" in output and "pass@3" in output
    assert run.evaluation("test").read_text() == "{}"
    values = json.loads(run.trajectories("test").read_text())
    assert json.loads(file.read_text()) == values
    assert (values["trajectories"], values["depth"], values["noise"], values["chooser"]) == (3, 5, 0.3, "vote")
    assert values["metrics"]["steps"] == values["points"][-1]["act_steps"] == 15
    assert values["metrics"]["exact_accuracy"] == values["points"][-1]["exact_accuracy"]["vote/best"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--refill"], "add --halt-early or --halt-threshold"),
        (["--halt-early", "--trajectories", "2", "--choose", "vote"], "--choose vote needs all trajectories"),
        (["--halt-early", "--depth", "3", "--results", "x.json"], "--results x.json is for trajectories without"),
        (["--results", "x.json"], "--results x.json is for --trajectories, --noise or --depth; omit it"),
        (["--trajectories", "2", "--results", "no/x.json"], "no is not a folder"),
        (["--noise", "-1"], "--noise is -1"),
        (["--depth", "0"], "--depth is 0; use at least 1"),
    ],
)
def test_options_that_do_not_go_together(capsys, run, options, message):
    assert main(["evaluate", str(run.path), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trm: ") and error.count("\n") == 1 and message in error


VALUES |= {"metrics": {}, "points": POINTS}


def test_the_study_chooses_the_best_setting_of_each_number_and_the_cheapest_that_reaches_the_target():
    def result(accuracy):
        counts, depths = milestones(2), milestones(4)
        shares = [[accuracy(count, steps) for steps in depths] for count in counts]
        names = ("halting/best", "halting/last", "pass/best")
        return {"trajectories": counts, "depths": depths, "shares": dict.fromkeys(names, shares), "count": 1000.0}

    best_steps = [result(lambda count, steps: 0.9 + 0.02 * (steps >= 3)), result(lambda *_: 0.2)]
    validated = means({0.1: [result(lambda count, steps: 0.5 + 0.1 * count)], 0.2: best_steps}, "halting/best")
    assert validated[Setting(1, 0.2, 3)] == pytest.approx(0.56) and len(validated) == 2 * 2 * 4
    assert choose(validated, 0.99) == [Setting(1, 0.1, 1), Setting(2, 0.1, 1)], "of equal ones the cheapest"
    shares = {Setting(1, 0.1, 1): 0.4, Setting(1, 0.2, 2): 0.5, Setting(1, 0.3, 4): 0.6}
    assert choose(shares, 0.45) == [Setting(1, 0.3, 4), Setting(1, 0.2, 2)]
