"""`bridge.export(name_scopes=True)`: operations have the qualified names of the submodules that they come from."""

import inspect
import re

import jax
import numpy as np
import pytest
import torch
from torch import nn

import bridge


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        return torch.tanh(self.linear(x)) * scale


class Net(nn.Module):
    """Calls a submodule twice, looks at the signature of its `forward`, and holds it in two places."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.first = self.layers[0]

    def forward(self, x):
        assert list(inspect.signature(self.first.forward).parameters) == ["x", "scale"]
        for layer in (*self.layers, self.first):
            x = layer(x, scale=0.5)
        return x


X = np.ones((3, 4), np.float32)


def names(**options):
    """The names of the products in the gradient, as they are in the compiled program."""
    fn = bridge.export(Net(), **options)
    compiled = jax.jit(jax.grad(lambda params: fn(params, fn.buffers, X)[0].sum())).lower(fn.params).compile()
    return {name for name in re.findall(r'op_name="([^"]*)"', compiled.as_text()) if "dot_general" in name}


@pytest.mark.parametrize("recompute", ["", r"layers\.\d"])
def test_products_have_the_names_of_their_linears(recompute):
    both = names(name_scopes=True, recompute=recompute)
    for linear in ("layers.0.linear[Linear]", "layers.1.linear[Linear]"):
        assert any(name.endswith(f"{linear}/dot_general") and "transpose(" in name for name in both), both
        # The product of the forward pass may be merged with that of the recomputation.
        assert recompute or any(name.endswith(f"{linear}/dot_general") and "transpose(" not in name for name in both)
    assert all("[Net]" in name and "[Block]" in name for name in both)


def test_without_the_option_there_are_no_names():
    assert not any("[" in name for name in names())


def test_results_and_the_module_are_the_same():
    module = Net()
    with_names, without = (bridge.export(module, name_scopes=on) for on in (True, False))
    results = [fn(fn.params, fn.buffers, X)[0] for fn in (with_names, without)]
    np.testing.assert_array_equal(*results)
    assert all("forward" not in vars(m) for m in module.modules())
