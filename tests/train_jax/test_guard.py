"""Skipped steps, the loss scale of float16, and the end of a run that skips too many steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks.example_puzzles import ExamplePuzzles, example_run
from models_torch.registry import ARCHITECTURES
from train_jax.core.guard import FIRST_SCALE, LARGEST_SCALE, check_finite, new_guard
from train_jax.core.metrics import optimizer_figures, parameter_groups, window_sums
from train_jax.optim.config import OptimConfig
from train_jax.runtime.devices import Devices
from train_jax.start import start
from train_jax.tasks.puzzles.metrics import means

OVERFLOW = [*"...!.......!!.....!...!!!!..........."]
"""A run with overflows (!) and good steps (.)."""


@jax.jit
def check(guard, good):
    return check_finite(guard, jnp.float32(1.0), [jnp.where(good, 1.0, jnp.inf)], growth_steps=3)


def test_the_loss_scale_equals_that_of_grad_scaler():
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


def test_the_loss_scale_stays_in_bounds():
    low = high = new_guard(scales_loss=True)
    for _ in range(40):
        low, high = check(low, jnp.array(False)).guard, check(high, jnp.array(True)).guard
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


@pytest.mark.parametrize("growth_steps", [None, 2])
@pytest.mark.parametrize("norm", [1.0, np.nan])
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
    step, batch = training.parallel_step(), training.batches.at(0)
    state = training.initial_state()
    assert float(state.guard.loss_scale) == FIRST_SCALE
    assert {array.dtype for array in state.params.values()} == {jnp.dtype("float32")}
    carry = training.initial_carry(state, batch)
    state = state._replace(guard=state.guard._replace(loss_scale=jnp.float32(LARGEST_SCALE)))
    state, carry = devices.replicate(state), devices.shard(carry)

    losses, norms, scales, skipped, kept = [], [], [], [], None
    for _ in range(40):
        if kept is None:
            kept = jax.tree.map(np.asarray, state._replace(guard=None))
        state, carry, metrics = step(state, carry, batch, devices.random_key(0))
        skipped.append(bool(metrics["skipped_steps"]))
        scales.append(float(metrics["loss_scale"]))
        losses.append(float(metrics["lm_loss"]))
        norms.append(float(np.linalg.norm(metrics["grad_norm"])))
        if skipped[-1]:
            jax.tree.map(np.testing.assert_array_equal, kept, state._replace(guard=None))
            assert np.asarray(carry.steps).all(), "the carry was reset though only the loss scale was too large"
        else:
            kept = None
    overflows = skipped.index(False)
    assert overflows > 0 and scales[: overflows + 1] == [LARGEST_SCALE / 2**n for n in range(overflows + 1)]
    grown = [i for i in range(len(scales) - 4) if not any(skipped[i : i + 4]) and len({*scales[i : i + 4]}) == 1]
    assert grown and all(scales[i + 4] == 2 * scales[i] for i in grown), "no growth after four good steps"
    good = [loss for loss, left_out in zip(losses, skipped, strict=True) if not left_out]
    assert good[-1] < 0.8 * good[0]
    assert all(0.1 < norm < 100 for norm in np.array(norms)[~np.array(skipped)]), "gradients contain the loss scale"
    assert {array.dtype for array in state.params.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["model.a.w", "model.a.b", "model.b.w"], {"a": ("model.a.w", "model.a.b"), "b": ("model.b.w",)}),
        (["net.weight", "net.bias"], {"weight": ("net.weight",), "bias": ("net.bias",)}),
        (["net.weight"], {"weight": ("net.weight",)}),
        (["scale", "net.weight"], {"scale": ("scale",), "net": ("net.weight",)}),
        ([], {}),
    ],
)
def test_parameter_groups_are_the_first_part_of_the_names_that_differs(names, groups):
    assert parameter_groups(names) == groups


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
