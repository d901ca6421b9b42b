"""Modules that keep a wrapper of PyTorch's around a method: `train=` and `overrides=` reach what it wraps."""

import functools

import jax
import numpy as np
import pytest
import torch
from support.markers import slow_unless
from torch import nn
from torch.utils.checkpoint import checkpoint

import bridge


class Wrapping(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.w, self.scale = nn.Parameter(torch.tensor([1.5, -2.0])), 1.0
        self.register_buffer("calls", torch.zeros(2))
        self.step = wrap(self.core)

    def core(self, x):
        if self.training:
            self.calls = self.calls + 1
        return x * self.w * self.scale * (2 if self.training else 1)

    def forward(self, x):
        return self.step(x)


def compiled(function):
    return torch.compile(function, backend="eager")


WRAPPERS = {
    "enable_grad": torch.enable_grad(),
    "autocast": torch.autocast("cpu", enabled=False),
    "compiler.disable": torch.compiler.disable,
    "checkpoint": lambda f: functools.partial(checkpoint, f, use_reentrant=False),
    "wraps": lambda f: functools.wraps(f)(lambda x: f(x)),
    "twice": lambda f: torch.enable_grad()(torch.autocast("cpu", enabled=False)(f)),
    "compile": compiled,
}
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize("name", slow_unless("compile".__ne__, WRAPPERS))
@pytest.mark.parametrize(("exported", "called"), [(True, False), (False, True)])
def test_the_mode_and_overrides_reach_it(name, exported, called):
    fn = bridge.export(Wrapping(WRAPPERS[name]).train(exported))

    def loss(params, scale):
        out, buffers = fn(params, fn.buffers, X.numpy(), train=called, overrides={"scale": scale})
        return out.sum(), (out, buffers)

    (_, (out, buffers)), gradient = jax.value_and_grad(loss, has_aux=True)(fn.params, 3.0)
    expected = Wrapping(lambda f: f).train(called)
    expected.scale = 3.0
    result = expected(X)
    result.sum().backward()
    np.testing.assert_allclose(out, result.detach().numpy())
    np.testing.assert_allclose(gradient["w"], expected.w.grad.numpy())
    np.testing.assert_array_equal(buffers["calls"], expected.calls.numpy())


@pytest.mark.slow
def test_pytorch_still_compiles_after_a_call():
    runs = []

    def backend(graph, _):
        return lambda *args: runs.append(1) or graph.forward(*args)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.5, -2.0]))

        def forward(self, x):
            return torch.sin(x) * self.w

    module = torch.compile(Scaled(), backend=backend, fullgraph=True)
    fn = bridge.export(module)
    out, _ = fn(fn.params, fn.buffers, X.numpy())
    assert not runs, "the bridge runs the code itself"
    np.testing.assert_allclose(out, module(X).detach().numpy(), rtol=1e-6)
    assert len(runs) == 1
    assert torch.compile(Scaled(), backend=backend, fullgraph=True)(torch.ones(3, 2)).shape == (3, 2)
