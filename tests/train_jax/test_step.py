"""The training step on eight virtual devices against PyTorch on the whole batch, with a bad batch in the middle."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch_optimizers
import toy_training
from toy_training import BAD, BATCH, CASES, STEPS, TABLE, UNSPOILT

from train_jax.core.metrics import parameter_groups

DENSE = tuple(torch_optimizers.SHAPES)
every_case = pytest.mark.parametrize("case", CASES)
every_spoilt = pytest.mark.parametrize("case", [case for case in CASES if case != UNSPOILT])


@pytest.fixture(scope="module")
def ran(made_once):
    """Everything that every step of every case gave, by `case/number/part/name`."""

    def train(folder):
        command = [sys.executable, toy_training.__file__, str(folder / "out.npz")]
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent)

    return dict(np.load(made_once("toy", train) / "out.npz"))


def learner(ran, prefix):
    prefix += "/"
    return {name.removeprefix(prefix): array for name, array in ran.items() if name.startswith(prefix)}


def start():
    module = toy_training.Toy(1)
    return {
        n: p.detach().numpy().copy() for n, p in module.named_parameters()
    }, module.puzzle_emb.weights.numpy().copy()


@every_case
def test_parameters_average_and_rows_as_in_pytorch(ran, case):
    """PyTorch never sees the bad batch: ours goes on as though it had not been, schedule and all."""
    config = CASES[case]
    params, table = start()
    gradients = [{n: b[n].sum(0) / BATCH for n in DENSE} for b in toy_training.batches()]
    trajectory = torch_optimizers.trajectory(config, params, gradients, peak=config.lr, total_steps=STEPS)
    if config.freeze_weights:
        trajectory = [params] * STEPS
    ema, tolerance = dict(params), {"rtol": 0, "atol": 0 if config.freeze_weights else 1e-6}
    for number, (expected, batch) in enumerate(zip(trajectory, toy_training.batches(), strict=True)):
        found = learner(ran, f"{case}/{number}/0")
        lr = torch_optimizers.rate(number + 1, config.puzzle_lr, config, STEPS)
        table = torch_optimizers.sparse_sign_sgd(table, batch["ids"], batch["rows"], lr, config.puzzle_weight_decay)
        np.testing.assert_allclose(found[f"buffers/{TABLE}"], table, rtol=0, atol=1e-6, err_msg=f"{number}")
        for name in DENSE:
            np.testing.assert_allclose(found[f"params/{name}"], expected[name], **tolerance, err_msg=f"{name} {number}")
            if not config.freeze_weights:
                ema[name] = np.float32(config.ema_decay) * ema[name] + np.float32(1 - config.ema_decay) * expected[name]
            np.testing.assert_allclose(found[f"ema/{name}"], ema[name], **tolerance, err_msg=f"{name} {number}")


def test_rows_repeat_over_devices_and_disagree():
    """Otherwise the comparison above would be one of rows that occur once."""
    per_device = BATCH // toy_training.DEVICES
    opposed = 0
    for batch in toy_training.batches():
        ids, gradients = batch["ids"], batch["rows"]
        for row in set(ids):
            owners = {int(place) // per_device for place in np.flatnonzero(ids == row)}
            signs = np.sign([gradients[place] for place in np.flatnonzero(ids == row)])
            opposed += len(owners) > 2 and bool((signs.min(0) != signs.max(0)).any())
    assert opposed > 20


@every_case
def test_never_compiles_again(ran, case):
    assert ran[f"{case}/compiled"] == 0


@every_spoilt
def test_a_batch_with_nan_leaves_everything_as_it_was_and_is_counted(ran, case):
    before, after = learner(ran, f"{case}/before"), learner(ran, f"{case}/bad/0")
    kept = [name for name in before if not name.startswith("guard")]
    assert {"step", f"buffers/{TABLE}"} | {f"{part}/{n}" for part in ("params", "ema") for n in DENSE} <= set(kept)
    assert any(name.startswith("opt_state") for name in kept)
    for name in kept:
        assert before[name].tobytes() == after[name].tobytes(), name
    assert (after["guard/skipped_steps"], after["guard/consecutive_skipped"]) == (1, 1)
    metrics = learner(ran, f"{case}/bad/2")
    assert (metrics["skipped_steps"], metrics["count"], metrics["lm_loss"]) == (1, 0, 0)


@every_spoilt
def test_after_it_training_goes_on_with_new_examples(ran, case):
    carry = learner(ran, f"{case}/bad/1")
    assert carry["halted"].all() and not carry["steps"].any()
    assert not learner(ran, f"{case}/{BAD - 1}/1")["halted"].all()
    after, last = learner(ran, f"{case}/{BAD}/0"), learner(ran, f"{case}/{STEPS - 1}/0")
    assert (after["guard/skipped_steps"], after["guard/consecutive_skipped"]) == (1, 0)
    assert last["step"] == STEPS and last["guard/skipped_steps"] == 1


def test_a_skipped_step_is_not_taken_again_with_the_same_random_numbers(ran):
    drawn = {case: [float(ran[f"{case}/{n}/2/drawn"]) for n in range(STEPS)] for case in ("adamw", UNSPOILT)}
    assert len(set(drawn[UNSPOILT])) == STEPS
    assert drawn["adamw"][:BAD] == drawn[UNSPOILT][:BAD]
    assert drawn["adamw"][BAD:-1] == drawn[UNSPOILT][BAD + 1 :]


def test_norms_by_group(ran):
    groups = parameter_groups(DENSE)
    assert list(groups) == ["embed_tokens", "lm_head", "q_head", "L_level"]
    for number, batch in enumerate(toy_training.batches()):
        metrics = learner(ran, f"adamw/{number}/2")
        norms = [np.sqrt(sum(np.sum((batch[n].sum(0) / BATCH) ** 2) for n in names)) for names in groups.values()]
        np.testing.assert_allclose(metrics["grad_norm"], norms, rtol=1e-5)
        rows = [batch["rows"][batch["ids"] == row].sum(0) for row in set(batch["ids"])]
        np.testing.assert_allclose(metrics["puzzle_grad_norm"], np.linalg.norm(rows) / BATCH, rtol=1e-5)
        if number and number != BAD:
            was, now = (learner(ran, f"adamw/{n}/0") for n in (number - 1, number))
            moved = [
                np.sqrt(sum(np.sum((now[f"params/{n}"] - was[f"params/{n}"]) ** 2) for n in names))
                for names in groups.values()
            ]
            np.testing.assert_allclose(metrics["update_norm"], moved, rtol=1e-3)  # a difference of nearly equal numbers


def test_when_sequences_halted(ran):
    for number in range(STEPS):
        carry, metrics = learner(ran, f"adamw/{number}/1"), learner(ran, f"adamw/{number}/2")
        halted_at = carry["steps"][carry["halted"]]
        np.testing.assert_array_equal(metrics["halted_at"], [np.sum(halted_at == 1), np.sum(halted_at == 2)])
        assert 0 < metrics["halted_at"].sum() <= BATCH
