"""How parameters move, step by step against PyTorch: one table of optimizers and what each must keep."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch_optimizers
from torch_optimizers import SHAPES

from train_jax.errors import UserError
from train_jax.optim.optimizer import average, dense_optimizer, schedule, sparse_sign_sgd, summed_by_row
from train_jax.run.config import OptimConfig

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
every_optimizer = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def drawn(seed, scale):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


START = drawn(0, 0.3)
# Of lengths a thousandfold apart, and some below the clipping norm: 0.5.
GRADIENTS = [drawn(1 + step, 10 ** -(step % 4)) for step in range(STEPS)]


def jitted(config):
    optimizer = dense_optimizer(config, STEPS)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, step


@every_optimizer
def test_steps_as_pytorch_does(config):
    optimizer, step = jitted(config)
    params = jax.tree.map(jnp.asarray, START)
    state = optimizer.init(params)
    theirs = torch_optimizers.trajectory(config, START, GRADIENTS, peak=config.lr, total_steps=STEPS)
    for number, (gradient, expected) in enumerate(zip(GRADIENTS, theirs, strict=True), 1):
        params, state = step(params, state, gradient)
        for name in SHAPES:
            np.testing.assert_allclose(params[name], expected[name], rtol=0, atol=1e-6, err_msg=f"{name}, {number}")
    moved = max(float(np.abs(params[name] - START[name]).max()) for name in SHAPES)
    assert moved > 10 * config.lr, "hardly anything moved: nothing was compared"


@every_optimizer
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_keeps_dtypes_and_compiles_once(config, kept):
    """Gradients in bfloat16; what is kept stays as it is, float32 masters above all."""
    optimizer, step = jitted(config)
    params = {name: jnp.asarray(array, kept) for name, array in START.items()}
    state = optimizer.init(params)
    before = jax.tree.map(lambda x: (x.shape, x.dtype), (params, state))
    for gradient in GRADIENTS[:3]:
        params, state = step(params, state, {name: jnp.asarray(g, jnp.bfloat16) for name, g in gradient.items()})
        assert jax.tree.map(lambda x: (x.shape, x.dtype), (params, state)) == before
    assert step._cache_size() == 1
    assert all(bool(jnp.isfinite(array).all()) for array in params.values())


@every_optimizer
def test_state_is_an_array_for_each_leaf(config):
    """Donated to a step, an array that stands for two would be given up twice."""
    leaves = [x for x in jax.tree.leaves(dense_optimizer(config, STEPS).init(START)) if x.size]
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_muon_leaves_embeddings_and_heads_to_adamw():
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
    rate = schedule(1e-3, config, total_steps=100)
    np.testing.assert_allclose([rate(count) for count in range(100)], expected, rtol=1e-6, atol=1e-10)
    assert expected[-1] == pytest.approx(ratio * 1e-3) and max(expected) == pytest.approx(1e-3, rel=1e-3)


def test_schedule_in_a_run_shorter_than_its_warm_up():
    rate = schedule(1.0, OptimConfig(warmup_steps=10, lr_min_ratio=0.1), total_steps=4)
    np.testing.assert_allclose([rate(count) for count in range(4)], [0.1, 0.2, 0.3, 0.4], rtol=1e-6)


def test_sign_sgd_moves_each_row_once_by_the_sign_of_its_sum():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(10, 3)).astype(np.float32)
    for number in range(STEPS):
        ids = rng.integers(0, 10, size=6).astype(np.int32)
        gradients = rng.normal(size=(6, 3)).astype(np.float32)
        lr = 0.1 / (1 + number)
        moved = np.asarray(jax.jit(sparse_sign_sgd)(table, summed_by_row(ids, gradients), lr, 0.5))
        expected = torch_optimizers.sparse_sign_sgd(table, ids, gradients, lr, 0.5)
        np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-6)
        untouched = np.setdiff1d(np.arange(10), ids)
        np.testing.assert_array_equal(moved[untouched], table[untouched])
        table = moved


def test_sign_sgd_leaves_a_row_without_gradient_to_its_decay():
    gradients = summed_by_row(jnp.array([1, 1]), jnp.zeros((2, 2)))
    np.testing.assert_allclose(sparse_sign_sgd(jnp.ones((3, 2)), gradients, 0.1, 0.5), [[1, 1], [0.95, 0.95], [1, 1]])


def test_average_over_fifty_steps():
    expected = jnp.asarray(START["model.inner.lm_head.weight"])
    ours, theirs = {"w": expected, "frozen": jnp.ones(2)}, np.asarray(expected)
    for gradient in GRADIENTS:
        now = gradient["model.inner.lm_head.weight"]
        ours = average(ours, {"w": now}, 0.9)
        theirs = np.float32(0.1) * now + np.float32(0.9) * theirs
    np.testing.assert_allclose(ours["w"], theirs, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ours["frozen"], jnp.ones(2))


def test_without_decay_the_average_is_the_weights():
    np.testing.assert_array_equal(average({"w": jnp.array([1.0])}, {"w": jnp.array([2.0])}, 0.0)["w"], [2.0])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lr": -1.0}, "optim.lr is -1.0; use at least 0"),
        ({"beta1": 1.0}, "optim.beta1 is 1.0; use a value from 0 to below 1"),
        ({"ema_decay": float("nan")}, "optim.ema_decay is nan; use a value from 0 to below 1"),
        ({"lr_min_ratio": 1.5}, "optim.lr_min_ratio is 1.5; use a share of lr, from 0 to 1"),
        ({"max_skipped_steps": 0}, "optim.max_skipped_steps is 0; use at least 1"),
        ({"optimizer": "sgd"}, "optim.optimizer is 'sgd'; use one of adamw, adam_atan2, lion, muon"),
    ],
)
def test_a_value_out_of_its_range_is_one_line(fields, said):
    with pytest.raises(UserError) as caught:
        OptimConfig(**fields)
    assert str(caught.value) == said
