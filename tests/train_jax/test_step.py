"""The training step on eight virtual devices against PyTorch on the whole batch, with a bad batch in the middle;
skipped steps, and the loss scale of float16."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support import toy_training
from support.markers import slow_unless
from support.scripts import run_script
from support.toy_training import ALL_GOOD, BAD, BATCH, CASES, STEPS, TABLE

from benchmarks.example_puzzles import ExamplePuzzles, example_run
from models_torch.registry import ARCHITECTURES
from tests.references import torch_optimizers
from train_jax.core.guard import FIRST_SCALE, LARGEST_SCALE, check_finite, new_guard
from train_jax.core.metrics import optimizer_figures, parameter_groups, window_sums
from train_jax.core.optim.config import OptimConfig
from train_jax.puzzles.metrics import means
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start

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
    results = results_of(case)
    config = CASES[case]
    assert results[f"{case}/compiled"] == 0, "compiled again after the first step"
    params, table = initial_arrays()
    gradients = [{n: b[n].sum(0) / BATCH for n in DENSE} for b in toy_training.batches()]
    trajectory = torch_optimizers.trajectory(config, params, gradients, peak=config.lr, total_steps=STEPS)
    if config.freeze:
        trajectory = [params] * STEPS
    ema = dict(params)
    tolerance = {"rtol": 0, "atol": 0 if config.freeze else 1e-6}
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
    average = np.zeros(toy_training.WIDTH, np.float32)
    largest = 0
    for number, batch in enumerate(toy_training.batches()):
        average = average + 0.1 * (batch["rows"].mean(0) - average)
        largest = max(largest, batch["ids"].max())
        buffers = part(results_of("adamw"), f"adamw/{number}/0/buffers")
        np.testing.assert_allclose(buffers["average"], average, rtol=0, atol=1e-6)
        assert buffers["largest_id"] == largest


@pytest.mark.parametrize("case", slow_unless(BY_DEFAULT.__contains__, [case for case in CASES if case != ALL_GOOD]))
def test_a_batch_with_nan_changes_no_bit_of_the_state_and_is_counted(results_of, case):
    results = results_of(case)
    before = part(results, f"{case}/before")
    after = part(results, f"{case}/bad/0")
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
    after = part(results, f"{case}/{BAD}/0")
    last = part(results, f"{case}/{STEPS - 1}/0")
    assert (after["guard/skipped_steps"], after["guard/consecutive_skipped"]) == (1, 0)
    assert last["step"] == STEPS and last["guard/skipped_steps"] == 1


def test_the_step_after_a_skipped_one_draws_other_random_numbers(results_of):
    drawn = {case: [float(results_of(case)[f"{case}/{n}/2/drawn"]) for n in range(STEPS)] for case in BY_DEFAULT}
    assert len(set(drawn[ALL_GOOD])) == STEPS
    assert drawn["adamw"][:BAD] == drawn[ALL_GOOD][:BAD]
    assert drawn["adamw"][BAD:-1] == drawn[ALL_GOOD][BAD + 1 :]


def test_the_metrics_of_a_step(results_of):
    """Norms by group, the learning rate, and the histogram of halting."""
    results = results_of("adamw")
    groups = parameter_groups(DENSE)
    assert list(groups) == ["embed_tokens", "lm_head", "q_head", "L_level"]
    for number, batch in enumerate(toy_training.batches()):
        carry = part(results, f"adamw/{number}/1")
        metrics = part(results, f"adamw/{number}/2")
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


# ---- skipped steps and the loss scale of float16

OVERFLOW = [*"...!.......!!.....!...!!!!..........."]
"""A run with overflows (!) and good steps (.)."""


@jax.jit
def check(guard, good):
    return check_finite(guard, jnp.float32(1.0), [jnp.where(good, 1.0, jnp.inf)], growth_steps=3)


def test_the_loss_scale_equals_that_of_grad_scaler_within_bounds():
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    guard = new_guard(scales_loss=True)
    in_a_row = 0
    for step in OVERFLOW:
        assert float(guard.loss_scale) == scaler.get_scale()
        parameter.grad = scaler.scale(torch.tensor([torch.inf if step == "!" else 1.0]))
        scaler.step(optimizer)
        scaler.update()
        guard = check(guard, jnp.array(step == ".")).guard
        in_a_row = in_a_row + 1 if step == "!" else 0
        assert int(guard.consecutive_skipped) == in_a_row
    assert int(guard.skipped_steps) == OVERFLOW.count("!")
    low = high = new_guard(scales_loss=True)
    for _ in range(40):
        low = check(low, jnp.array(False)).guard
        high = check(high, jnp.array(True)).guard
    assert (float(low.loss_scale), float(high.loss_scale)) == (1.0, LARGEST_SCALE)
    assert (int(low.consecutive_skipped), int(high.consecutive_skipped)) == (40, 0)


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "good", "carry_good"),
    [(1, 1, 8, True, True), (1, np.inf, 8, False, True), (1, np.nan, 1, False, False), (np.nan, 1, 8, False, False)],
)
def test_the_carry_is_kept_if_only_the_loss_scale_was_too_large(loss, norm, scale, good, carry_good):
    guard = new_guard(scales_loss=True)._replace(loss_scale=jnp.float32(scale))
    result = check_finite(guard, jnp.float32(loss), [jnp.array([1.0, norm])], growth_steps=5)
    assert (bool(result.good), bool(result.carry_good)) == (good, carry_good)


@pytest.mark.parametrize(("growth_steps", "norm"), [(None, 1.0), (2, np.nan)])
def test_a_step_without_targets_is_not_applied_and_leaves_the_guard(growth_steps, norm):
    """Such a step in the middle of skipped steps neither ends nor continues their row."""
    guard = new_guard(scales_loss=True)._replace(consecutive_skipped=jnp.int32(3), steps_at_scale=jnp.int32(1))
    result = check_finite(guard, jnp.float32(0), [jnp.array(norm)], growth_steps, counted=jnp.float32(0))
    assert not result.good and result.guard == guard
    assert result.metrics["empty_steps"] and not result.metrics["skipped_steps"]
    assert result.metrics["consecutive_skipped"] == 3
    full = check_finite(guard, jnp.float32(0), [jnp.array(norm)], growth_steps, counted=jnp.float32(2))
    without = check_finite(guard, jnp.float32(0), [jnp.array(norm)], growth_steps)
    assert full.good == without.good and full.guard == without.guard
    assert not full.metrics["empty_steps"] and "empty_steps" not in without.metrics


@pytest.mark.slow
def test_trm_in_float16_adapts_its_loss_scale_and_learns():
    arch = dataclasses.replace(ARCHITECTURES["trm"].tiny_config, forward_dtype="float16", mlp_t=True, L_layers=1)
    optim = OptimConfig(lr=3e-3, warmup_steps=0, weight_decay=0.0, loss_scale_growth_steps=4)
    config = example_run("trm", arch, optim=optim, steps=100)
    devices = Devices(1)
    training = start(config, ExamplePuzzles(config), devices)
    step = training.parallel_step()
    batch = training.batches.at(0)
    state = training.initial_state()
    assert float(state.guard.loss_scale) == FIRST_SCALE
    carry = training.initial_carry(state, batch)
    state = state._replace(guard=state.guard._replace(loss_scale=jnp.float32(LARGEST_SCALE)))
    state = devices.replicate(state)
    carry = devices.shard(carry)

    losses = []
    scales = []
    for _ in range(40):
        state, carry, metrics = step(state, carry, batch, devices.random_key(0))
        scales.append(float(metrics["loss_scale"]))
        if metrics["skipped_steps"]:
            assert np.asarray(carry.steps).all(), "the carry was reset though only the loss scale was too large"
        else:
            losses.append(float(metrics["lm_loss"]))
            assert 0.1 < float(np.linalg.norm(metrics["grad_norm"])) < 100, "gradients contain the loss scale"
    assert min(scales) < LARGEST_SCALE and losses[-1] < 0.8 * losses[0]


def test_skipped_steps_do_not_count_in_a_window():
    step = {"count": 2, "lm_loss": 8.0, "exact_accuracy": 1, "halted_at": np.array([1, 1]), "skipped_steps": False}
    step |= {"lr": np.array([0.1, 0.2]), "grad_norm": np.array([3.0, 4.0]), "update_norm": np.array([0.0, 1.0])}
    skipped = step | {"count": 0, "lm_loss": 0.0, "exact_accuracy": 0, "halted_at": np.zeros(2), "skipped_steps": True}
    sums = window_sums([step, skipped, step])
    assert sums.pop("skipped_steps") == 1
    config = example_run("trm", ARCHITECTURES["trm"].tiny_config)
    assert ExamplePuzzles(config).figures(sums, examples=2 * 4) == {
        "count": 4, "lm_loss": 2.0, "exact_accuracy": 0.5, "halted_at/1": 0.5, "halted_at/2": 0.5,
    }  # fmt: skip
    assert optimizer_figures(step, {"a": ("x",), "b": ("y",)}, ["default", "group_0"]) == {
        "lr/default": 0.1, "lr/group_0": 0.2, "grad_norm": 5.0, "grad_norm/a": 3.0, "grad_norm/b": 4.0,
        "update_norm": 1.0, "update_norm/a": 0.0, "update_norm/b": 1.0,
    }  # fmt: skip
    assert means({"count": 0, "accuracy": 0.0, "lm_loss": 0.0}, 0) == {"count": 0}
    assert means({"count": 0, "accuracy": 0.0, "lm_loss": 3.0}, 2) == {"count": 0, "lm_loss": 1.5}
