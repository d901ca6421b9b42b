"""Optimizers step by step against PyTorch, and the properties that all of them have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import torch_optimizers
from support.torch_optimizers import SHAPES

from train_jax.errors import UserError
from train_jax.optim.chain import dense_optimizer
from train_jax.optim.config import OptimConfig
from train_jax.optim.rules import sparse_sign_sgd, sum_by_row, update_ema
from train_jax.optim.schedule import learning_rate

STEPS = 50
BASE = OptimConfig(lr=1e-2, warmup_steps=5, lr_min_ratio=0.1, weight_decay=0.3)
CASES = {
    "adamw": BASE,
    "adam_atan2": dataclasses.replace(BASE, optimizer="adam_atan2"),
    "lion": dataclasses.replace(BASE, optimizer="lion", lr=1e-3, beta2=0.99),
    "muon": dataclasses.replace(BASE, optimizer="muon"),
    "adamw_clipped": dataclasses.replace(BASE, clip_norm=0.5),
    # At lr 1e-2 PyTorch's own rounding of `1 - lr * weight_decay`, the same at every step, comes to 1.1e-6 over fifty.
    "adam_atan2_constant": dataclasses.replace(BASE, optimizer="adam_atan2", lr=5e-3, lr_min_ratio=1.0, warmup_steps=0),
}
NANOCHAT = {
    "muon_2025": dataclasses.replace(BASE, optimizer="muon_2025"),
    "muon_2026": dataclasses.replace(
        BASE, optimizer="muon_2026", cautious_decay=True, momentum_start=0.85, momentum_warmup_steps=10
    ),
}
"""Optimizers whose steps are compared in `test_nanochat_optimizers`."""
every_optimizer = pytest.mark.parametrize("config", (CASES | NANOCHAT).values(), ids=CASES | NANOCHAT)


def random_arrays(seed, scale):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


START = random_arrays(0, 0.3)
# The norms differ by factors of 1000, and some are below the clipping norm 0.5.
GRADIENTS = [random_arrays(1 + step, 10 ** -(step % 4)) for step in range(STEPS)]


def jitted(config):
    optimizer = dense_optimizer(config, STEPS)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, step


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_steps_equal_pytorch(config):
    optimizer, step = jitted(config)
    params = jax.tree.map(jnp.asarray, START)
    state = optimizer.init(params)
    theirs = torch_optimizers.trajectory(config, START, GRADIENTS, peak=config.lr, total_steps=STEPS)
    for number, (gradient, expected) in enumerate(zip(GRADIENTS, theirs, strict=True), 1):
        params, state = step(params, state, gradient)
        for name in SHAPES:
            np.testing.assert_allclose(params[name], expected[name], rtol=0, atol=1e-6, err_msg=f"{name}, {number}")
    assert step._cache_size() == 1
    largest = max(float(np.abs(params[name] - START[name]).max()) for name in SHAPES)
    assert largest > 10 * config.lr, "parameters hardly changed: nothing was compared"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_dtypes_are_kept(config, dtype):
    """Parameters and state keep their dtype also with gradients in bfloat16."""
    optimizer, step = jitted(config)
    params = {name: jnp.asarray(array, dtype) for name, array in START.items()}
    gradient = {name: jnp.asarray(array, jnp.bfloat16) for name, array in GRADIENTS[0].items()}
    state = optimizer.init(params)
    after = jax.eval_shape(step, params, state, gradient)
    before = jax.eval_shape(lambda *trees: trees, params, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), before)


@pytest.mark.parametrize("config", NANOCHAT.values(), ids=NANOCHAT)
def test_bfloat16_parameters_keep_the_dtypes_of_the_optimizers_of_nanochat(config):
    test_dtypes_are_kept(config, "bfloat16")


@every_optimizer
def test_no_two_leaves_of_the_state_share_a_buffer(config):
    """A step donates every leaf; a shared one would be donated twice."""
    leaves = [x for x in jax.tree.leaves(dense_optimizer(config, STEPS).init(START)) if x.size]
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_muon_updates_embeddings_and_heads_by_adamw():
    rows = {"lm_head.weight", "q_head.bias", "embed_tokens.embedding_weight", "embed_pos.embedding_weight"}
    rows |= {"tok_emb.weight", "transformer.wpe_embedding.weight", "head.weight", "conv.weight", "norm.scale"}
    hidden = {"layers.0.self_attn.qkv_proj.weight", "multihead_attn.out_proj.weight", "layers.1.mlp.down_proj.weight"}
    params = {name: jnp.zeros((4, 4)) for name in rows | hidden}
    params |= {"conv.weight": jnp.zeros((4, 4, 3)), "norm.scale": jnp.zeros(4), "q_head.bias": jnp.zeros(4)}
    state = dense_optimizer(dataclasses.replace(BASE, optimizer="muon"), STEPS).init(params)
    states = next(s for s in state if hasattr(s, "inner_states")).inner_states
    squares = states["adamw"].inner_state.nu
    assert {name for name, array in squares.items() if isinstance(array, jax.Array)} == rows


@pytest.mark.parametrize("ratio", [1.0, 0.1, 0.0])
@pytest.mark.parametrize("warmup", [0, 7])
def test_schedule_is_the_published_one_at_every_step(ratio, warmup):
    config = OptimConfig(warmup_steps=warmup, lr_min_ratio=ratio)
    expected = [torch_optimizers.rate(step, 1e-3, config, 100) for step in range(1, 101)]
    rate = learning_rate(1e-3, config, total_steps=100)
    np.testing.assert_allclose([rate(count) for count in range(100)], expected, rtol=1e-6, atol=1e-10)
    assert expected[-1] == pytest.approx(ratio * 1e-3) and max(expected) == pytest.approx(1e-3, rel=1e-3)


def test_schedule_in_a_run_shorter_than_its_warm_up():
    rate = learning_rate(1.0, OptimConfig(warmup_steps=10, lr_min_ratio=0.1), total_steps=4)
    np.testing.assert_allclose([rate(count) for count in range(4)], [0.1, 0.2, 0.3, 0.4], rtol=1e-6)


def test_sign_sgd_updates_each_row_once_by_the_sign_of_its_sum():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(10, 3)).astype(np.float32)
    for number in range(STEPS):
        ids = rng.integers(0, 10, size=6).astype(np.int32)
        gradients = rng.normal(size=(6, 3)).astype(np.float32)
        lr = 0.1 / (1 + number)
        updated = np.asarray(jax.jit(sparse_sign_sgd)(table, sum_by_row(ids, gradients), lr, 0.5))
        expected = torch_optimizers.sparse_sign_sgd(table, ids, gradients, lr, 0.5)
        np.testing.assert_allclose(updated, expected, rtol=0, atol=1e-6)
        untouched = np.setdiff1d(np.arange(10), ids)
        np.testing.assert_array_equal(updated[untouched], table[untouched])
        table = updated


def test_sign_sgd_only_decays_a_row_whose_gradient_is_zero():
    gradients = sum_by_row(jnp.array([1, 1]), jnp.zeros((2, 2)))
    np.testing.assert_allclose(sparse_sign_sgd(jnp.ones((3, 2)), gradients, 0.1, 0.5), [[1, 1], [0.95, 0.95], [1, 1]])


def test_ema_over_fifty_steps():
    expected = jnp.asarray(START["model.inner.lm_head.weight"])
    ours, theirs = {"w": expected, "frozen": jnp.ones(2)}, np.asarray(expected)
    for gradient in GRADIENTS:
        now = gradient["model.inner.lm_head.weight"]
        ours = update_ema(ours, {"w": now}, 0.9)
        theirs = np.float32(0.1) * now + np.float32(0.9) * theirs
    np.testing.assert_allclose(ours["w"], theirs, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ours["frozen"], jnp.ones(2))


def test_a_value_outside_its_range_is_an_error():
    with pytest.raises(UserError, match=r"^optim\.beta1 is 1\.0; use a value from 0 to below 1$"):
        OptimConfig(beta1=1.0)


def test_the_error_for_an_unknown_optimizer_names_those_that_there_are():
    message = r"is 'sgd'; use one of adamw, adam_atan2, adam_atan2_published, lion, muon"
    with pytest.raises(UserError, match=message):
        dense_optimizer(OptimConfig(optimizer="sgd"), 1)
