"""The training step on eight virtual devices against PyTorch on the whole batch, with a bad batch in the middle."""

import functools

import numpy as np
import pytest
from support import torch_optimizers, toy_training
from support.markers import slow_unless
from support.scripts import run_script
from support.toy_training import ALL_GOOD, BAD, BATCH, CASES, STEPS, TABLE

from train_jax.core.metrics import parameter_groups

DENSE = tuple(torch_optimizers.SHAPES)
BY_DEFAULT = ("adamw", ALL_GOOD)


@pytest.fixture(scope="module")
def results_of(made_once):
    """`results_of(case)`: state, carry and metrics after every step, by `case/number/part/name`."""

    @functools.cache
    def trained(name, cases):
        folder = made_once(name, lambda folder: run_script("toy_training", folder / "out.npz", *cases))
        return dict(np.load(folder / "out.npz"))

    def of(case):
        if case in BY_DEFAULT:
            return trained("toy", BY_DEFAULT)
        return trained("toy-others", tuple(other for other in CASES if other not in BY_DEFAULT))

    return of


def part(results, prefix):
    prefix += "/"
    return {name.removeprefix(prefix): array for name, array in results.items() if name.startswith(prefix)}


def initial_arrays():
    module = toy_training.Toy(1)
    params = {name: p.detach().numpy().copy() for name, p in module.named_parameters()}
    return params, module.puzzle_emb.weights.numpy().copy()


@pytest.mark.parametrize("case", slow_unless(BY_DEFAULT.__contains__, CASES))
def test_parameters_ema_and_table_rows_equal_pytorch(results_of, case):
    """PyTorch does not get the bad batch: it must leave no trace, not even in the schedule."""
    results, config = results_of(case), CASES[case]
    assert results[f"{case}/compiled"] == 0, "compiled again after the first step"
    params, table = initial_arrays()
    gradients = [{n: b[n].sum(0) / BATCH for n in DENSE} for b in toy_training.batches()]
    trajectory = torch_optimizers.trajectory(config, params, gradients, peak=config.lr, total_steps=STEPS)
    if config.freeze:
        trajectory = [params] * STEPS
    ema, tolerance = dict(params), {"rtol": 0, "atol": 0 if config.freeze else 1e-6}
    for number, (expected, batch) in enumerate(zip(trajectory, toy_training.batches(), strict=True)):
        ours = part(results, f"{case}/{number}/0")
        lr = torch_optimizers.rate(number + 1, config.sparse_lr, config, STEPS)
        table = torch_optimizers.sparse_sign_sgd(table, batch["ids"], batch["rows"], lr, config.sparse_weight_decay)
        np.testing.assert_allclose(ours[f"buffers/{TABLE}"], table, rtol=0, atol=1e-6, err_msg=f"{number}")
        for name in DENSE:
            np.testing.assert_allclose(ours[f"params/{name}"], expected[name], **tolerance, err_msg=f"{name} {number}")
            if not config.freeze:
                ema[name] = np.float32(config.ema_decay) * ema[name] + np.float32(1 - config.ema_decay) * expected[name]
            np.testing.assert_allclose(ours[f"ema/{name}"], ema[name], **tolerance, err_msg=f"{name} {number}")


def test_buffers_are_those_of_the_whole_batch(results_of):
    """The mean of what devices write to statistics, the maximum of counters; PyTorch does not get the bad batch."""
    average, largest = np.zeros(toy_training.WIDTH, np.float32), 0
    for number, batch in enumerate(toy_training.batches()):
        average, largest = average + 0.1 * (batch["rows"].mean(0) - average), max(largest, batch["ids"].max())
        buffers = part(results_of("adamw"), f"adamw/{number}/0/buffers")
        np.testing.assert_allclose(buffers["average"], average, rtol=0, atol=1e-6)
        assert buffers["largest_id"] == largest


@pytest.mark.parametrize("case", slow_unless(BY_DEFAULT.__contains__, [case for case in CASES if case != ALL_GOOD]))
def test_a_batch_with_nan_changes_no_bit_of_the_state_and_is_counted(results_of, case):
    results = results_of(case)
    before, after = part(results, f"{case}/before"), part(results, f"{case}/bad/0")
    kept = [name for name in before if not name.startswith("guard")]
    assert {"step", f"buffers/{TABLE}"} | {f"{part}/{n}" for part in ("params", "ema") for n in DENSE} <= set(kept)
    assert any(name.startswith("opt_state") for name in kept)
    for name in kept:
        assert before[name].tobytes() == after[name].tobytes(), name
    assert (after["guard/skipped_steps"], after["guard/consecutive_skipped"]) == (1, 1)
    metrics = part(results, f"{case}/bad/2")
    assert (metrics["skipped_steps"], metrics["count"], metrics["lm_loss"]) == (1, 0, 0)
    carry = part(results, f"{case}/bad/1")
    assert carry["halted"].all() and not carry["steps"].any(), "training continues with new examples"
    assert not part(results, f"{case}/{BAD - 1}/1")["halted"].all()
    after, last = part(results, f"{case}/{BAD}/0"), part(results, f"{case}/{STEPS - 1}/0")
    assert (after["guard/skipped_steps"], after["guard/consecutive_skipped"]) == (1, 0)
    assert last["step"] == STEPS and last["guard/skipped_steps"] == 1


def test_the_step_after_a_skipped_one_draws_other_random_numbers(results_of):
    drawn = {case: [float(results_of(case)[f"{case}/{n}/2/drawn"]) for n in range(STEPS)] for case in BY_DEFAULT}
    assert len(set(drawn[ALL_GOOD])) == STEPS
    assert drawn["adamw"][:BAD] == drawn[ALL_GOOD][:BAD]
    assert drawn["adamw"][BAD:-1] == drawn[ALL_GOOD][BAD + 1 :]


def test_the_metrics_of_a_step(results_of):
    """Norms by group, the learning rate, and the histogram of halting."""
    results, groups = results_of("adamw"), parameter_groups(DENSE)
    assert list(groups) == ["embed_tokens", "lm_head", "q_head", "L_level"]
    for number, batch in enumerate(toy_training.batches()):
        carry, metrics = part(results, f"adamw/{number}/1"), part(results, f"adamw/{number}/2")
        norms = [np.sqrt(sum(np.sum((batch[n].sum(0) / BATCH) ** 2) for n in names)) for names in groups.values()]
        np.testing.assert_allclose(metrics["grad_norm"], norms, rtol=1e-5)
        rows = [batch["rows"][batch["ids"] == row].sum(0) for row in set(batch["ids"])]
        np.testing.assert_allclose(metrics["sparse_grad_norm"], np.linalg.norm(rows) / BATCH, rtol=1e-5)
        if number and number != BAD:
            was, now = (part(results, f"adamw/{n}/0/params") for n in (number - 1, number))
            norms = [np.sqrt(sum(np.sum((now[n] - was[n]) ** 2) for n in names)) for names in groups.values()]
            np.testing.assert_allclose(metrics["update_norm"], norms, rtol=1e-3)  # a difference of nearly equal numbers
        rate = torch_optimizers.rate(number + 1, CASES["adamw"].lr, CASES["adamw"], STEPS)
        np.testing.assert_allclose(metrics["lr"], [rate], rtol=1e-5)
        halted_at = carry["steps"][carry["halted"]]
        np.testing.assert_array_equal(metrics["halted_at"], [np.sum(halted_at == 1), np.sum(halted_at == 2)])
        assert 0 < metrics["halted_at"].sum() <= BATCH
