"""State that a call makes or removes, or that JAX's own state stands beside."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge


class Module(nn.Module):
    def __init__(self, forward, **attributes):
        super().__init__()
        self.w = nn.Parameter(torch.eye(3))
        for name, value in attributes.items():
            setattr(self, name, value)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


class LateParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("g", None)

    def forward(self, x):
        if self.g is None:
            self.g = nn.Parameter(torch.ones(x.shape[-1]))
        return x * self.g


def test_a_parameter_that_the_first_call_makes_is_refused():
    """All calls would compute the same, and PyTorch's optimizer would change it."""
    fn, late = bridge.export(LateParameter()), LateParameter()
    with pytest.raises(bridge.BridgeError, match=r"changes `g` .* or call the module once before `export`"):
        fn({}, {}, jnp.ones(3))
    late(torch.ones(3))
    assert bridge.verify(late, torch.ones(3)).ok


def test_a_buffer_that_the_call_removes_is_refused():
    def forward(self, x):
        x = x + self.k
        self.k = None
        return x

    module = Module(forward)
    module.register_buffer("k", torch.ones(3))
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match="sets k to None"):
        fn(fn.params, fn.buffers, jnp.ones(3))


@pytest.mark.parametrize("key", [lambda: KEY, lambda: jax.random.key(1)], ids=["enclosed", "made inside"])
def test_state_beside_draws_under_jit(key):
    def forward(self, x):
        self.n += 1
        return torch.nn.functional.dropout(x) * self.n

    fn = bridge.export(Module(forward, n=0))
    with pytest.raises(bridge.BridgeError, match="changes `n` and a later call would read it"):
        jax.jit(lambda p, x: fn(p, {}, x, rng=key(), train=True))(fn.params, jnp.ones(3))


KEY = jax.random.key(0)


def test_a_weak_set_beside_an_array():
    module = Module(lambda self, x: self.layer(x), layer=nn.Linear(3, 3), array=np.ones(3))
    module.weak = weakref.WeakSet([module.layer])
    assert bridge.verify(module, torch.ones(2, 3)).ok


def prefill(self, x):
    if len(x) > 1:
        self.start = len(x)
        return x @ self.w
    return x * self.start


def table_for_another_mode(self, x):
    if self.training:
        self.table = torch.arange(3.0)
        return x * self.table
    return x if self.table is None else x * self.table


@pytest.mark.parametrize(("forward", "name", "value"), [(prefill, "start", 1), (table_for_another_mode, "table", None)])
def test_what_another_kind_of_call_would_read_is_one_warning(forward, name, value):
    """This kind of call does not read it: it would write the same again."""
    fn = bridge.export(Module(forward, **{name: value}))
    with pytest.warns(bridge.BridgeWarning, match=f"writes `{name}`, which is lost") as seen:
        for _ in range(2):
            fn(fn.params, {}, jnp.ones((3, 3)))
    assert len(seen) == 1
