"""Parameter groups, frozen parameters, linear decay, and optimizers from outside the project."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from train_jax.errors import UserError
from train_jax.optim.chain import dense_optimizer, group_labels, learning_rates, trainable
from train_jax.optim.config import OptimConfig, ParameterGroup, from_fields
from train_jax.optim.schedule import learning_rate

SHAPES = {"embed.weight": (5, 4), "layers.0.weight": (4, 4), "layers.0.bias": (4,), "head.weight": (5, 4)}
STEPS = 30
GROUPS = (
    ParameterGroup("embed.*", lr=0.2, beta1=0.8, eps=1e-10, weight_decay=0.0, warmup_steps=0),
    ParameterGroup(r".*\.bias", weight_decay=0.0),
)
CONFIG = OptimConfig(lr=1e-2, warmup_steps=5, weight_decay=0.3, groups=GROUPS)


def test_the_learning_rates_in_use_are_named():
    def rates(config, names=tuple(SHAPES)):
        return {name: round(float(rate(0)), 6) for name, rate in learning_rates(names, config, STEPS).items()}

    assert rates(CONFIG) == {"default": 0.002, "group_0": 0.2, "group_1": 0.002}
    assert (
        rates(dataclasses.replace(CONFIG, groups=GROUPS[1:]))
        == rates(OptimConfig(lr=0.002, warmup_steps=0))
        == {"": 0.002}
    )
    everything = (dataclasses.replace(GROUPS[0], pattern=".*"),)
    assert rates(dataclasses.replace(CONFIG, groups=everything)) == {"": 0.2}, "no parameter has the rate of optim.lr"
    assert rates(CONFIG, ["embed.weight", "layers.0.bias"]) == {"group_0": 0.2, "group_1": 0.002}
    assert rates(OptimConfig(), []) == {}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def in_pytorch(config, gradients):
    """AdamW with PyTorch's own parameter groups; the rates are set before every step."""
    params = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in arrays(0).items()}
    labels = group_labels({name: jnp.zeros(()) for name in SHAPES}, config)
    configs = {"default": config, **{f"group {n}": config.of_group(g) for n, g in enumerate(config.groups)}}
    groups = [
        {"params": [params[name] for name in SHAPES if labels[name] == label], "betas": (c.beta1, c.beta2),
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
    optimizer = dense_optimizer(config, STEPS)
    params = {name: jnp.asarray(array) for name, array in arrays(0).items()}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params


def test_groups_as_pytorch_has_them():
    gradients = [arrays(1 + step) for step in range(STEPS)]
    expected, params = in_pytorch(CONFIG, gradients), in_jax(CONFIG, gradients)
    for name in SHAPES:
        # Embeddings take steps twenty times as long, so their rounding is as much larger.
        atol = 2e-5 if name.startswith("embed") else 1e-6
        np.testing.assert_allclose(params[name], expected[name], rtol=0, atol=atol, err_msg=name)
    without = in_jax(dataclasses.replace(CONFIG, groups=()), gradients)
    assert np.abs(params["embed.weight"] - without["embed.weight"]).max() > 0.1
    np.testing.assert_array_equal(params["head.weight"], without["head.weight"])


def test_the_first_group_that_matches_takes_a_parameter_and_an_empty_one_is_refused():
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    groups = (ParameterGroup("layers.*"), ParameterGroup(r".*\.bias"))
    with pytest.raises(UserError, match=r"the pattern '\.\*\\\\\.bias' matches no trained parameter"):
        group_labels(params, dataclasses.replace(CONFIG, groups=groups))
    labels = group_labels(params, dataclasses.replace(CONFIG, groups=groups[::-1]))
    assert labels["layers.0.bias"] == "group 0" and labels["layers.0.weight"] == "group 1"
    assert labels["head.weight"] == "default"


def test_frozen_parameters_by_pattern():
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    assert set(trainable(params, OptimConfig(freeze="layers.*"))) == {"embed.weight", "head.weight"}
    assert trainable(params, OptimConfig(freeze=".*")) == {}
    with pytest.raises(UserError, match=r"optim\.freeze 'layer' matches no parameter"):
        trainable(params, OptimConfig(freeze="layer"))


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_linear_decay_over_the_last_share_of_the_steps(share):
    config = OptimConfig(warmup_steps=20, decay="linear", decay_share=share, lr_min_ratio=0.1)
    rate = learning_rate(2.0, config, 100)
    begin = 100 - round(share * 80)
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
    with pytest.raises(UserError, match=r"optim.optimizer 'their_rules:none': 'their_rules' has no 'none'"):
        dense_optimizer(dataclasses.replace(config, optimizer="their_rules:none"), 1)


def test_groups_go_to_json_and_back():
    assert from_fields(dataclasses.asdict(CONFIG)) == CONFIG
    with pytest.raises(UserError, match=r"optim.groups: lr is -1; use"):
        ParameterGroup("a", lr=-1)
    with pytest.raises(UserError, match=r"optim.groups: pattern '\(' is not a regular expression"):
        ParameterGroup("(")


def test_muon_with_groups_of_other_parameters():
    """The parameters of other groups have no shape where Muon chooses its matrices."""
    groups = (ParameterGroup("embed.*", optimizer="adamw", lr=0.2), ParameterGroup("head.*", optimizer="adamw"))
    gradients = [arrays(1), arrays(2)]
    grouped = in_jax(dataclasses.replace(CONFIG, optimizer="muon", groups=groups), gradients)
    common = in_jax(dataclasses.replace(CONFIG, optimizer="muon", groups=()), gradients)
    for name in ("layers.0.weight", "layers.0.bias", "head.weight"):
        np.testing.assert_allclose(grouped[name], common[name], rtol=0, atol=1e-6)
    assert not np.allclose(grouped["embed.weight"], common["embed.weight"])
