"""How parameters move, against PyTorch and against the rule written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from train_jax.config import OptimConfig
from train_jax.optim import average, dense_optimizer, schedule, sparse_sign_sgd


def test_schedule_warms_up_and_stays():
    rate = schedule(1e-3, OptimConfig(warmup_steps=4, lr_min_ratio=1.0), total_steps=10)
    np.testing.assert_allclose([rate(s) for s in range(6)], [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3], rtol=1e-6)


def test_schedule_falls_on_a_cosine_to_its_ratio():
    rate = schedule(1e-3, OptimConfig(warmup_steps=0, lr_min_ratio=0.1), total_steps=100)
    assert float(rate(99)) == pytest.approx(1e-4)
    assert float(rate(49)) == pytest.approx(5.5e-4)
    assert all(float(rate(s)) > float(rate(s + 1)) for s in range(98))


def test_adamw_steps_as_pytorch_does_over_fifty_steps():
    config = OptimConfig(lr=1e-2, warmup_steps=5, weight_decay=0.3)
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(7, 5)), rng.normal(size=(50, 7, 5))
    theirs = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    reference = torch.optim.AdamW([theirs], betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)
    optimizer = dense_optimizer(config, 50)
    ours = {"w": jnp.asarray(start, jnp.float32)}
    state = optimizer.init(ours)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for number, gradient in enumerate(gradients):
        theirs.grad = torch.tensor(gradient, dtype=torch.float32)
        reference.param_groups[0]["lr"] = config.lr * min((number + 1) / 5, 1)
        reference.step()
        ours, state = step(ours, state, {"w": jnp.asarray(gradient, jnp.float32)})
    np.testing.assert_allclose(ours["w"], theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_sign_sgd_moves_each_row_once_by_the_sign_of_its_sum():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(10, 3)).astype(np.float32)
    ids = np.array([7, 2, 7, 0, 2, 7], np.int32)
    gradients = rng.normal(size=(6, 3)).astype(np.float32)
    moved = np.asarray(jax.jit(sparse_sign_sgd, static_argnums=4)(table, ids, gradients, 0.1, 0.5))
    for row in range(10):
        if row in ids:
            expected = table[row] * (1 - 0.1 * 0.5) - 0.1 * np.sign(gradients[ids == row].sum(0))
            np.testing.assert_allclose(moved[row], expected, rtol=1e-6)
        else:
            np.testing.assert_array_equal(moved[row], table[row])


def test_sign_sgd_leaves_a_row_without_gradient_to_its_decay():
    moved = sparse_sign_sgd(jnp.ones((3, 2)), jnp.array([1, 1]), jnp.zeros((2, 2)), 0.1, 0.5)
    np.testing.assert_allclose(moved, [[1, 1], [0.95, 0.95], [1, 1]])


def test_average():
    ema = average({"w": jnp.array([1.0])}, {"w": jnp.array([2.0])}, 0.9)
    np.testing.assert_allclose(ema["w"], [1.1], rtol=1e-6)
