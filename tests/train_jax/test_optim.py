"""Optimizers and parameter groups step by step against PyTorch, and the properties that all of them have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from tests.references import torch_optimizers
from tests.references.torch_optimizers import SHAPES
from train_jax.core.optim.chain import dense_optimizer, group_labels, trainable
from train_jax.core.optim.config import OptimConfig, ParameterGroup, from_fields
from train_jax.core.optim.schedule import learning_rate
from train_jax.errors import UserError

STEPS = 50
BASE = OptimConfig(lr=1e-2, warmup_steps=5, lr_min_ratio=0.1, weight_decay=0.3)
CASES = {
    "adamw": BASE,
    "adam_atan2": dataclasses.replace(BASE, optimizer="adam_atan2"),
    "lion": dataclasses.replace(BASE, optimizer="lion", lr=1e-3, beta2=0.99),
    "muon": dataclasses.replace(BASE, optimizer="muon"),
    "adamw_clipped": dataclasses.replace(BASE, clip_norm=0.5),
}
NANOCHAT = {
    "muon_2025": dataclasses.replace(BASE, optimizer="muon_2025"),
    "muon_2026": dataclasses.replace(
        BASE, optimizer="muon_2026", cautious_decay=True, momentum_start=0.85, momentum_warmup_steps=10
    ),
}
"""Optimizers whose steps are compared in `test_nanochat_optimizers`."""


def random_arrays(seed, scale, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


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


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(config, dtype) for config in CASES.values() for dtype in ("float32", "bfloat16")]
    + [(config, "bfloat16") for config in NANOCHAT.values()],
)
def test_dtypes_are_kept_and_no_two_leaves_of_the_state_share_a_buffer(config, dtype):
    """Also with gradients in bfloat16. A step donates every leaf; a shared one would be donated twice."""
    optimizer, step = jitted(config)
    params = {name: jnp.asarray(array, dtype) for name, array in START.items()}
    gradient = {name: jnp.asarray(array, jnp.bfloat16) for name, array in GRADIENTS[0].items()}
    state = optimizer.init(params)
    after = jax.eval_shape(step, params, state, gradient)
    before = jax.eval_shape(lambda *trees: trees, params, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), before)
    leaves = [x for x in jax.tree.leaves(state) if x.size]
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


@pytest.mark.parametrize(("ratio", "warmup"), [(1.0, 0), (0.1, 7)])
def test_schedule_is_the_published_one_at_every_step(ratio, warmup):
    config = OptimConfig(warmup_steps=warmup, lr_min_ratio=ratio)
    expected = [torch_optimizers.rate(step, 1e-3, config, 100) for step in range(1, 101)]
    rate = learning_rate(1e-3, config, total_steps=100)
    np.testing.assert_allclose([rate(count) for count in range(100)], expected, rtol=1e-6, atol=1e-10)
    assert expected[-1] == pytest.approx(ratio * 1e-3) and max(expected) == pytest.approx(1e-3, rel=1e-3)
    shorter = learning_rate(1.0, OptimConfig(warmup_steps=10, lr_min_ratio=ratio), total_steps=4)
    np.testing.assert_allclose([shorter(count) for count in range(4)], [0.1, 0.2, 0.3, 0.4], rtol=1e-6)


# ---- groups

GROUP_SHAPES = {"embed.weight": (5, 4), "layers.0.weight": (4, 4), "layers.0.bias": (4,), "head.weight": (5, 4)}
GROUPS = (
    ParameterGroup("embed.*", lr=0.2, beta1=0.8, eps=1e-10, weight_decay=0.0, warmup_steps=0),
    ParameterGroup(r".*\.bias", weight_decay=0.0),
)
GROUPED = OptimConfig(lr=1e-2, warmup_steps=5, weight_decay=0.3, groups=GROUPS)


def arrays(seed):
    return random_arrays(seed, 1.0, GROUP_SHAPES)


def in_pytorch(config, gradients):
    """AdamW with PyTorch's own parameter groups; the rates are set before every step."""
    params = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in arrays(0).items()}
    labels = group_labels({name: jnp.zeros(()) for name in GROUP_SHAPES}, config)
    configs = {"default": config, **{f"group {n}": config.of_group(g) for n, g in enumerate(config.groups)}}
    groups = [
        {"params": [params[name] for name in GROUP_SHAPES if labels[name] == label], "betas": (c.beta1, c.beta2),
         "eps": c.eps, "weight_decay": c.weight_decay, "lr": 0.0}
        for label, c in configs.items()
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups)
    for step, gradient in enumerate(gradients):
        for group, c in zip(optimizer.param_groups, configs.values(), strict=True):
            group["lr"] = float(learning_rate(c.lr, c, STEPS)(step))
        for name, parameter in params.items():
            parameter.grad = torch.tensor(gradient[name])
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in params.items()}


def in_jax(config, gradients):
    optimizer, step = jitted(config)
    params = {name: jnp.asarray(array) for name, array in arrays(0).items()}
    state = optimizer.init(params)
    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params


def test_groups_as_pytorch_has_them():
    gradients = [arrays(1 + step) for step in range(30)]
    expected = in_pytorch(GROUPED, gradients)
    params = in_jax(GROUPED, gradients)
    for name in GROUP_SHAPES:
        # Embeddings take steps twenty times as long, so their rounding is as much larger.
        atol = 2e-5 if name.startswith("embed") else 1e-6
        np.testing.assert_allclose(params[name], expected[name], rtol=0, atol=atol, err_msg=name)
    without = in_jax(dataclasses.replace(GROUPED, groups=()), gradients)
    assert np.abs(params["embed.weight"] - without["embed.weight"]).max() > 0.1
    np.testing.assert_array_equal(params["head.weight"], without["head.weight"])


def test_parameters_are_grouped_and_frozen_by_patterns():
    """The first group that matches takes a parameter."""
    params = {name: jnp.zeros(shape) for name, shape in GROUP_SHAPES.items()}
    groups = (ParameterGroup("layers.*"), ParameterGroup(r".*\.bias"))
    with pytest.raises(UserError, match=r"the pattern '\.\*\\\\\.bias' matches no trained parameter"):
        group_labels(params, dataclasses.replace(GROUPED, groups=groups))
    labels = group_labels(params, dataclasses.replace(GROUPED, groups=groups[::-1]))
    assert labels["layers.0.bias"] == "group 0" and labels["layers.0.weight"] == "group 1"
    assert labels["head.weight"] == "default"
    assert from_fields(dataclasses.asdict(GROUPED)) == GROUPED, "through JSON"
    with pytest.raises(UserError, match=r"optim.groups: pattern '\(' is not a regular expression"):
        ParameterGroup("(")
    assert set(trainable(params, OptimConfig(freeze="layers.*"))) == {"embed.weight", "head.weight"}
    assert trainable(params, OptimConfig(freeze=".*")) == {}
    with pytest.raises(UserError, match=r"optim\.freeze 'layer' matches no parameter"):
        trainable(params, OptimConfig(freeze="layer"))


def test_linear_decay_over_the_last_share_of_the_steps():
    config = OptimConfig(warmup_steps=20, decay="linear", decay_share=0.25, lr_min_ratio=0.1)
    rate = learning_rate(2.0, config, 100)
    begin = 80
    expected = [
        2.0 * (step / 20 if step < 20 else 1.0 if step <= begin else 1 - 0.9 * (step - begin) / (100 - begin))
        for step in range(1, 101)
    ]
    np.testing.assert_allclose([rate(count) for count in range(100)], expected, rtol=1e-6)


def test_an_optimizer_from_outside(tmp_path, monkeypatch):
    (tmp_path / "their_rules.py").write_text(
        "import jax.numpy as jnp, optax\n"
        "def signed(config):\n"
        "    return optax.stateless_with_tree_map(lambda g, _: jnp.sign(g) * (1 - config.beta1))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = OptimConfig(optimizer="their_rules:signed", lr=1e-2, warmup_steps=0, weight_decay=0.0)
    gradients = [arrays(1)]
    for name, array in in_jax(config, gradients).items():
        np.testing.assert_allclose(array - arrays(0)[name], -1e-3 * np.sign(gradients[0][name]), rtol=1e-3)
    with pytest.raises(UserError, match="is 'sgd'; use one of adamw, adam_atan2, adam_atan2_published, lion, muon"):
        dense_optimizer(OptimConfig(optimizer="sgd"), 1)
