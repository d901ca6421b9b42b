"""Faults planted in the bridge: `verify` is red on each, in the leaves that it spoils, and green without it.

`test_meaning.py` takes out the rules of the bridge themselves.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import differentiated
from rules import call_file
from support.markers import slow_unless
from torch import nn

import bridge
from bridge._compat.torchax import torchax_lowering
from bridge.autograd.function import _Backward
from bridge.dispatch.random import RANDOM
from bridge.lowerings import LOWERINGS, METAS

aten = torch.ops.aten
stop = jax.lax.stop_gradient


class Module(nn.Module):
    """A function of itself and the input, with a weight, a gate of zero, a buffer and a child that has a hook."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.w = nn.Parameter(torch.randn(4, 4).to(dtype))
        self.gate = nn.Parameter(torch.zeros((), dtype=dtype))
        self.b = nn.Buffer(torch.arange(1.0, 5.0))
        self.child = nn.Identity()
        self.child.register_forward_hook(lambda m, args, out: out * 3)

    def forward(self, x):
        return self.function(self, x)


class Fault(NamedTuple):
    plant: Callable
    function: Callable
    spoils: set[str]
    """The kinds of leaves that are red."""
    dtype: torch.dtype = torch.float32
    settings: Mapping[str, Any] = MappingProxyType({})


def replacing(op, faulty):
    """`faulty(original, *args)` instead of the op's lowering."""

    def plant(monkeypatch):
        original = LOWERINGS.get(op) or torchax_lowering(op)
        monkeypatch.setitem(LOWERINGS, op, lambda *args, **kwargs: faulty(original, *args, **kwargs))

    return plant


def returning(change):
    """`change(result, params, buffers)` instead of what a call returns."""

    def plant(monkeypatch):
        run = bridge.Functional.run
        monkeypatch.setattr(
            bridge.Functional, "run", lambda self, p, b, *args, **kwargs: change(run(self, p, b, *args, **kwargs), p, b)
        )

    return plant


def steeper(original, *args):
    """The function with twice its gradient."""
    return 2 * original(*args) - stop(original(*args))


def without_forward_hooks(monkeypatch):
    shadow = call_file.shadow

    def hookless(*args):
        copied, copies = shadow(*args)
        for m in copied.modules():
            m._forward_hooks = {}
        return copied, copies

    monkeypatch.setattr(call_file, "shadow", hookless)


def without_backward(monkeypatch):
    """The backward of a `torch.autograd.Function` is skipped."""
    monkeypatch.setattr(_Backward, "__call__", lambda self, saved, cotangents: (list(cotangents), None))


def drawn_while_tracing(monkeypatch):
    monkeypatch.delitem(RANDOM, aten.rand_like.default)
    numbers = np.random.default_rng(0)
    monkeypatch.setitem(LOWERINGS, aten.rand_like.default, lambda x, **_: jnp.asarray(numbers.random(x.shape)))


def in_float32(monkeypatch):
    monkeypatch.setitem(METAS, aten.linear.default, lambda x, w, b=None: x.new_empty(*x.shape, dtype=torch.float32))


def with_frozen_input(monkeypatch):
    wrap = call_file.wrap  # parameters are tracked, inputs are not
    monkeypatch.setattr(call_file, "wrap", lambda a, meta, **kw: wrap(a if kw["tracked"] else stop(a), meta, **kw))


Doubled = differentiated(lambda ctx, x: x.clone(), lambda ctx, gradient: 2 * gradient)


def accumulated(module, x):
    module.b.mul_(0.5).add_(x.detach().mean(0))
    return x * module.w + module.b


def assigned(module, x):
    module.b = module.b * 0.5 + x.detach().mean(0)
    return x * module.w + module.b


def complex_of(module, x):
    return torch.complex(module.w, x)


def product(module, x):
    return x * module.w


ALL = {"output", "gradient", "input gradient"}
GRADIENTS = {"gradient", "input gradient"}
ONCE = {"steps": 1}

FAULTS = {
    # gradients
    "input gradient lost": Fault(with_frozen_input, product, {"input gradient"}),
    "gradient of one factor lost": Fault(
        replacing(aten.mul.Tensor, lambda f, a, b: f(stop(a), b)), product, {"input gradient"}
    ),
    "gradient twice as large": Fault(
        replacing(aten.tanh.default, steeper), lambda m, x: torch.tanh(x * m.w), GRADIENTS
    ),
    "gradient of NaN": Fault(
        replacing(aten.relu.default, lambda f, x: jnp.where(x > 0, jnp.sqrt(jnp.maximum(x, 0)) ** 2, 0)),
        lambda m, x: torch.relu(x * m.w),
        GRADIENTS,
    ),
    "backward of an autograd.Function skipped": Fault(without_backward, lambda m, x: Doubled.apply(x * m.w), GRADIENTS),
    "gradient lost behind a gate of zero": Fault(
        replacing(aten.relu.default, lambda f, x: stop(f(x))),
        lambda m, x: x + torch.relu(x @ m.w) * m.gate,
        {"gradient"},
    ),
    # values
    "gelu by tanh": Fault(
        replacing(aten.gelu.default, lambda f, x, approximate="none": jax.nn.gelu(x, approximate=True)),
        lambda m, x: F.gelu(x * m.w),
        ALL,
        settings={"tolerance": 1e-5},
    ),
    "another epsilon": Fault(
        replacing(aten.native_layer_norm.default, lambda f, x, s, w, b, e: f(x, s, w, b, 1e3 * e)),
        lambda m, x: F.layer_norm(x * m.w, (4,)),
        ALL,
    ),
    "integers divided towards zero": Fault(
        replacing(aten.floor_divide.default, lambda f, a, b: jax.lax.div(a, jnp.full_like(a, b))),
        lambda m, x: (x * m.w, (10 * x).int() // 3),
        {"output"},
    ),
    "a number of another dtype": Fault(in_float32, lambda m, x: F.linear(x, m.w), {"output"}, dtype=torch.bfloat16),
    "imaginary part lost": Fault(
        replacing(aten.exp.default, lambda f, x: jnp.real(f(x)).astype(x.dtype)),
        lambda m, x: torch.exp(complex_of(m, x)),
        ALL,
    ),
    "an output lost": Fault(
        returning(lambda r, *_: r._replace(outputs=r.outputs[:1])), lambda m, x: (x * m.w, x.detach() + 1), {"output"}
    ),
    "an output too many": Fault(
        returning(lambda r, *_: r._replace(outputs=(*r.outputs, r.outputs[0]))), lambda m, x: (x * m.w,), ALL
    ),
    "outputs in another order": Fault(
        returning(lambda r, *_: r._replace(outputs=r.outputs[::-1])), lambda m, x: (x * m.w, x + m.w), ALL
    ),
    # state
    "a hook lost": Fault(without_forward_hooks, lambda m, x: m.child(x * m.w), ALL),
    "a buffer missing": Fault(returning(lambda r, *_: r._replace(buffers={})), accumulated, {"buffer"}),
    "a buffer of another name": Fault(
        returning(lambda r, *_: r._replace(buffers={"c": r.buffers["b"]})), accumulated, {"buffer"}, settings=ONCE
    ),
    "a buffer in another dtype": Fault(
        returning(lambda r, *_: r._replace(buffers={"b": r.buffers["b"].astype("bfloat16")})), accumulated, {"buffer"}
    ),
    "a buffer that was assigned lost": Fault(returning(lambda r, p, b: r._replace(buffers=b)), assigned, {"buffer"}),
    "state not carried on": Fault(returning(lambda r, p, b: r._replace(buffers=b)), accumulated, {"output", "buffer"}),
    # random numbers and constants
    "drawn while tracing": Fault(drawn_while_tracing, lambda m, x: x * m.w + torch.rand_like(x), {"output"}),
}


def verified(fault):
    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    torch.manual_seed(1)
    settings = {"jit": False, "steps": 2 if fault.spoils == {"output", "buffer"} else 1, **fault.settings}
    return bridge.verify(Module(fault.function, fault.dtype), x.to(fault.dtype), **settings)


@pytest.mark.parametrize("name", slow_unless(lambda name: list(FAULTS).index(name) % 2 == 0, FAULTS))
def test_red_with_the_fault_and_green_without(name, monkeypatch):
    fault = FAULTS[name]
    with monkeypatch.context() as planted:
        fault.plant(planted)
        report = verified(fault)
    assert {row.kind for row in report.rows if row.verdict == "beyond tolerance"} == fault.spoils, f"\n{report}"
    assert (report := verified(fault)).ok, f"\n{report}"
