"""The gradient of a residual stream is computed once on a CPU, and as before on other platforms."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, randn, verified
from torch import nn

import bridge
from bridge.lowerings import residual

BLOCKS = 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(width=64, count=BLOCKS):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(count)))


def gradient_of(module):
    fn = bridge.export(module)
    gradient = jax.jit(jax.grad(lambda params, x: jnp.square(fn(params, fn.buffers, x)[0]).mean()))
    return gradient, fn.params


def test_no_loop_adds_up_the_gradients_of_all_later_layers():
    """The residual stream is as large as one of a small model: 256 rows of 64 features."""
    gradient, params = gradient_of(blocks())
    program = gradient.lower(params, np.ones((256, 64), np.float32)).compile().as_text()
    fusions = re.findall(r" fusion\(([^)]*)\)", program)
    assert fusions and max(operands.count("%") for operands in fusions) <= BLOCKS


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_get_the_same_program(platform, monkeypatch):
    def program():
        jax.clear_caches()
        gradient, params = gradient_of(blocks(count=2))
        traced = gradient.trace(params, np.ones((256, 64), np.float32))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    found = program()
    monkeypatch.setattr(residual, "SMALLEST", float("inf"))
    assert found == program()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_pytorchs(dtype, monkeypatch):
    monkeypatch.setattr(residual, "SMALLEST", 1)
    verified(blocks(8).to(dtype), randn(4, 8).to(dtype))


TRANSFORMS = {
    "grad": jax.grad,
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "jacrev of jacrev": lambda function: jax.jacrev(jax.jacrev(function)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_sum_is_transformed_as_any_other(name, monkeypatch):
    monkeypatch.setattr(residual, "SMALLEST", 1)

    def function(x, y):
        return ((x * y + y) ** 3).sum()

    fn = bridge.export(Call(function))
    ours = TRANSFORMS[name](lambda x, y: fn({}, {}, x, y)[0])
    plain = TRANSFORMS[name](function)
    x, y = randn(5, 3).numpy(), randn(5, 3, seed=2).numpy()
    np.testing.assert_allclose(ours(x[0], y[0]), plain(x[0], y[0]), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(ours)(x, y), jax.vmap(plain)(x, y), rtol=2e-5, atol=1e-5)
