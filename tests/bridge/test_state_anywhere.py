"""State of every kind of object, wherever the user's code keeps it: refused, and as it was after the call."""

import collections
import types
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch
from holding import Calls
from torch import nn

import bridge


class Counts(dict):
    n = 0


class Callback:
    """An object that is called, and calls others."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls


class Inner(nn.Module):
    n = 0


class Helper(nn.Module):
    child: Inner

    def __init__(self):
        super().__init__()
        self.n, self.child = 0, Inner()

    def forward(self, x):
        self.n += 1
        self.child.n += 1
        return x * (self.n + self.child.n)


def add(container, key, value=1):
    container[key] += value
    return float(container[key])


def up(thing, name="n"):
    setattr(thing, name, getattr(thing, name) + 1)
    return getattr(thing, name)


def rotated(m, x):
    m.it.rotate()
    return x * m.it[0]


def popped(m, x):
    m.it[0].discard(len(m.it[0]))
    return x * len(m.it[0])


HELD = {
    "deque": (rotated, lambda: collections.deque([1.0, 2.0, 3.0])),
    "Counter": (lambda m, x: x * add(m.it, "n"), collections.Counter),
    "defaultdict": (lambda m, x: x * add(m.it, "n"), lambda: collections.defaultdict(int)),
    "OrderedDict": (lambda m, x: x * add(m.it, "n"), lambda: collections.OrderedDict(n=0)),
    "subclass of dict": (lambda m, x: x * add(m.it, "n"), lambda: Counts(n=0)),
    "set in a list": (popped, lambda: [{1, 2, 3}]),
    "callable": (lambda m, x: x * m.it(), Callback),
    "namespace": (lambda m, x: x * up(m.it), lambda: types.SimpleNamespace(n=0)),
    "module in a list": (lambda m, x: m.it[0](x), lambda: [Helper()]),
}


def state(value):
    """All that is in it, by value."""
    if isinstance(value, (Callback, types.SimpleNamespace)):
        return dict(vars(value))
    if isinstance(value, Helper):
        return value.n, value.child.n
    if isinstance(value, weakref.ref):
        return state(value())
    return [state(v) for v in value] if isinstance(value, (list, tuple)) else repr(value)


def differs_in_pytorch(module):
    x = torch.ones(2, 3)
    one, two = (module(x).detach().clone() for _ in range(2))
    return not torch.equal(one, two)


def refused(module, match):
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match=match):
        jax.make_jaxpr(lambda p, x: fn(p, fn.buffers, x)[0])(fn.params, jnp.ones((2, 3)))


READ = "the call changes .*a later call would read it"


@pytest.mark.parametrize("name", HELD)
def test_what_a_module_holds(name):
    function, make = HELD[name]
    assert differs_in_pytorch(Calls(function, it=make()))
    module = Calls(function, it=make())
    held, before = module.it, state(make())
    refused(module, READ)
    assert module.it is held and state(held) == before
