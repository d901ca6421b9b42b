"""Numbers in attributes, given as traced inputs by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge
from models_torch.registry import architecture, build, example_batch


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float = 2.0
    name: str = "a"


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.power = config, 2
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x**self.power * self.config.scale)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.inner = Inner(self.config)

    def forward(self, x):
        return self.inner(x) + self.config.scale


X = jnp.arange(1.0, 5.0)


def test_a_new_value_compiles_nothing_and_everybody_who_shares_it_sees_it():
    fn, compiles = bridge.export(Outer().eval()), 0

    @jax.jit
    def call(scale, power):
        nonlocal compiles
        compiles += 1
        return fn({}, {}, X, overrides={"config.scale": scale, "inner.power": power})[0]

    for scale, power in ((2.0, 2.0), (3.0, 1.0)):
        np.testing.assert_allclose(call(scale, power), X**power * scale + scale, rtol=1e-6)
    assert compiles == 1
    assert fn.module.config.scale == 2.0 and fn.module.inner.config is fn.module.config
    np.testing.assert_allclose(fn({}, {}, X)[0], X**2 * 2 + 2)


def test_it_has_a_gradient():
    fn = bridge.export(Outer().eval())
    slope = jax.grad(lambda s: fn({}, {}, X, overrides={"config.scale": s})[0].sum())(2.0)
    np.testing.assert_allclose(slope, (X**2 + 1).sum())


def test_a_dropout_rate():
    fn = bridge.export(nn.Dropout(0.5).train())

    @jax.jit
    def call(p):
        return fn({}, {}, jnp.ones(20_000), rng=jax.random.key(0), overrides={"p": p})[0]

    for p in (0.0, 0.25, 1.0):
        out = call(p)
        assert abs(float((out == 0).mean()) - p) < 0.01
        kept = out[out != 0]
        np.testing.assert_allclose(kept, 1 / (1 - p) if p < 1 else kept, rtol=1e-6)


@pytest.mark.slow
def test_exploration_of_trm():
    """Halting exploration is off at 0 and always on at 1, in one compiled function."""
    arch = architecture("trm")
    config = dataclasses.replace(arch.tiny_config, halt_max_steps=4)
    torch.manual_seed(0)
    module = build("trm", config)
    module.model.inner.q_head.bias.data.fill_(5.0)  # wants to halt at once
    fn = bridge.export(module)
    batch = {k: jnp.asarray(v.numpy()) for k, v in example_batch(config, 4, seed=0).items()}
    carry, _ = fn(fn.params, fn.buffers, batch, method="initial_carry")

    @jax.jit
    def halted(probability, key):
        outputs, *_ = fn.run(
            fn.params,
            fn.buffers,
            carry=carry,
            batch=batch,
            rng=key,
            train=True,
            overrides={"model.config.halt_exploration_prob": probability},
        )
        return outputs[0].halted

    keys = jax.random.split(jax.random.key(0), 20)
    assert all(halted(0.0, key).all() for key in keys)
    assert not any(halted(1.0, key).any() for key in keys)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.scales", r"names no number: scales is not there in config \(Config\); numbers there: scale"),
        ("config.name", r"names no number: name is 'a'"),
        ("outer.x", r"names no number: outer is not there in the module \(Outer\); numbers there: none"),
    ],
)
def test_a_wrong_name_is_said(name, message):
    fn = bridge.export(Outer())
    with pytest.raises(bridge.BridgeError, match=message):
        fn({}, {}, X, overrides={name: 1.0})
