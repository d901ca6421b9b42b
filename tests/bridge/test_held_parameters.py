"""Parameters, buffers and modules held by objects, closures and classes of the user's own: the call's own ones."""

import dataclasses
import functools
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge


class Helper:
    """An object that hangs on a module."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


@dataclasses.dataclass(frozen=True)
class Group:
    params: tuple
    rates: dict


class Rates(dict):
    """A dict that is no plain one."""


class Module(nn.Module):
    def __init__(self, call, holder):
        super().__init__()
        self.l, self.b, self.drop = nn.Linear(3, 3), nn.Buffer(torch.ones(3)), nn.Dropout(0.5)
        self.call = call
        self.held = holder(self)

    def forward(self, x):
        return self.call(self, x)


def in_a_closure(m):
    w, b = m.l.weight, m.b
    return lambda x: (w is m.l.weight, b is m.b, x)


def in_a_nested_closure(m):
    w = m.l.weight

    def outer():
        def inner():
            return w

        return inner

    return outer()


def in_a_proxy(m):
    p = weakref.proxy(m)
    return lambda x: p.l(x)


def by_default(m):
    def test(w=m.l.weight):
        return w is m.l.weight

    return test


def written(m, x):
    with torch.no_grad():
        m.held.b.mul_(2)
    return x * m.b


CASES = {
    "object": (lambda m: Helper(w=m.l.weight), lambda m, x: x * (2 if m.held.w is m.l.weight else 1)),
    "frozen dataclass": (
        lambda m: Group((m.l.weight, m.l.bias), {m.b: 3.0}),
        lambda m, x: x * (2 if m.held.params[1] is m.l.bias else 1) * m.held.rates.get(m.b, 1),
    ),
    "dict of a class": (
        lambda m: Rates({m.b: 2.0, "x": 1}),
        lambda m, x: x * m.held.get(m.b, 1) * list(m.held)[1:].index("x"),
    ),
    "closure": (in_a_closure, lambda m, x: x * (2 if all(m.held(x)[:2]) else 1)),
    "nested closure": (lambda m: Helper(f=in_a_nested_closure(m)), lambda m, x: x * (m.held.f() is m.l.weight)),
    "default": (by_default, lambda m, x: x * (2 if m.held() else 1)),
    "partial": (
        lambda m: Helper(f=functools.partial(torch.nn.functional.linear, weight=m.l.weight)),
        lambda m, x: m.held.f(x) * (m.held.f.keywords["weight"] is m.l.weight),
    ),
    "bound method": (lambda m: Helper(f=m.l.forward), lambda m, x: m.held.f(x) * (m.held.f.__self__ is m.l)),
    "weak reference": (lambda m: Helper(r=weakref.ref(m.l)), lambda m, x: x * (m.held.r() is m.l)),
    "proxy of the module": (lambda m: Helper(p=weakref.proxy(m)), lambda m, x: m.held.p.l(x) * m.held.p.drop.training),
    "proxy of a child": (lambda m: [weakref.proxy(m.l)], lambda m, x: m.held[0](x) * (m.held[0].bias is m.l.bias)),
    "proxy of a buffer": (lambda m: [weakref.proxy(m.b)], lambda m, x: m.held[0] * x + m.held[0].sum()),
    "proxy in a closure": (in_a_proxy, lambda m, x: m.held(x) * (m.held.__closure__[0].cell_contents.b is m.b)),
    "proxy of nothing": (lambda m: Helper(p=weakref.proxy(Helper())), lambda m, x: m.l(x)),
    "weak keys": (
        lambda m: weakref.WeakKeyDictionary({m.l: 3.0}),
        lambda m, x: x * m.held.get(m.l, 1),
    ),
    "mode of a module": (lambda m: Helper(drop=m.drop), lambda m, x: m.held.drop(x)),
    "module, its list": (
        lambda m: (Helper(items=[m.l]), types.SimpleNamespace(back=m)),
        lambda m, x: x * (m.held[0].items[0] is m.l) * (m.held[1].back is m),
    ),
    "written": (lambda m: Helper(b=m.b), written),
}


@pytest.mark.parametrize("name", CASES)
def test_objects_hold_the_parameters_of_the_call(name):
    holder, call = CASES[name]
    torch.manual_seed(0)
    module, x = Module(call, holder), torch.ones(1, 3)
    before = [type(p) for p in module.parameters()]
    fn = bridge.export(module)
    params, buffers, expected = fn.params, fn.buffers, module.eval()
    for _ in range(2):
        outputs, buffers = fn(params, buffers, jnp.asarray(x.numpy()), train=False)
    for _ in range(2):
        wanted = expected(x)
    np.testing.assert_allclose(outputs, wanted.detach().numpy(), rtol=1e-6)
    assert [type(p) for p in module.parameters()] == before


def test_what_a_call_writes_through_a_proxy_is_seen():
    def call(m, x):
        m.held.p.b = m.held.p.b + x.sum()
        return x * m.b

    module = Module(call, lambda m: Helper(p=weakref.proxy(m)))
    fn = bridge.export(module)
    outputs, buffers = fn(fn.params, fn.buffers, jnp.ones(3))
    assert outputs.tolist() == buffers["b"].tolist() == [4.0] * 3
    assert module.held.p.b is module.b and module.b.tolist() == [1.0] * 3


def test_the_objects_are_as_before():
    module = Module(lambda m, x: x * m.held.w.sum(), lambda m: Helper(w=m.l.weight, rates=Rates({m.b: 1.0, "x": 2.0})))
    fn = bridge.export(module)
    jax.jit(lambda x: fn(fn.params, fn.buffers, x, train=False))(jnp.ones(3))
    with pytest.raises(bridge.BridgeError):
        fn(fn.params, fn.buffers, jnp.ones(3), method="no_method")
    assert module.held.w is module.l.weight
    assert list(module.held.rates) == [module.b, "x"]
