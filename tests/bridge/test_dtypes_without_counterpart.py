"""`torch.complex32` and other dtypes that JAX does not have: one error that names the dtype and what to do."""

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call, compare, randn
from torch import nn

import bridge

X = randn(3)
HALF = torch.complex32
WITHIN = r"a tensor is torch\.complex32, which JAX does not have in the module.*, at .*Remedy: .*torch\.complex64"


def caught(x):
    try:
        return (x.half() * 1j).abs()
    except Exception:
        return x


def autocast(x):
    with torch.autocast("cpu", torch.float16):
        return (x[None] @ x[:, None]) * 1j


MADE = {
    "Python number": lambda x: (x.half() * 1j).abs().float(),
    "sum": lambda x: x.half() + 1j,
    "autocast": autocast,
    "cast": lambda x: x.to(HALF).abs(),
    "type": lambda x: x.half().type(HALF),
    "like": lambda x: torch.zeros_like(x, dtype=HALF),
    "parts": lambda x: torch.complex(x.half(), x.half()).abs(),
    "view as complex": lambda x: torch.view_as_complex(torch.stack([x, x], -1).half()).abs(),
    "view": lambda x: x.view(HALF),
    "where": lambda x: torch.where(x > 0, x.half(), 1j),
    "draws": lambda x: torch.randn(3, dtype=HALF) * x,
    "constant": lambda x: torch.ones(3, dtype=HALF) * x,
    "constant written": lambda x: torch.zeros(3, dtype=HALF).copy_(x).abs(),
    "constant returned": lambda x: torch.ones(3, dtype=HALF),
    "out": lambda x: torch.mul(x.half(), 1j, out=torch.empty(3, dtype=HALF)),
    "in a try": caught,
}


@pytest.mark.parametrize("name", MADE)
def test_refused_in_a_call(name):
    MADE[name](X)
    fn = bridge.export(Call(MADE[name]))
    with pytest.raises(bridge.BridgeError, match=WITHIN):
        jax.eval_shape(lambda x: fn({}, {}, x, rng=jax.random.key(0))[0], X.numpy())


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.half() * 1j).abs().float()


def test_refused_in_a_backward():
    fn = bridge.export(Call(Backward.apply))
    with pytest.raises(bridge.BridgeError, match=r"complex32, which JAX does not have"):
        jax.eval_shape(jax.grad(lambda x: fn({}, {}, x)[0].sum()), X.numpy())


class State(nn.Module):
    def __init__(self, kind: str, dtype: torch.dtype = HALF):
        super().__init__()
        tensor = torch.ones(3, dtype=dtype)
        if kind == "buffer":
            self.register_buffer("weight", tensor)
        else:
            self.weight = nn.Parameter(tensor, requires_grad=kind == "parameter")

    def forward(self, x):
        return (self.weight.to(torch.complex64) * x).abs()


@pytest.mark.parametrize("kind", ["parameter", "frozen parameter", "buffer"])
def test_refused_as_state(kind):
    what = r"weight is torch\.complex32, which JAX does not have; convert it before, to torch\.complex64"
    with pytest.raises(bridge.BridgeError, match=what):
        bridge.export(State(kind))
    with pytest.raises(bridge.BridgeError, match=what):
        bridge.verify(State(kind), X)


def test_refused_as_an_argument_or_loaded_weight():
    what = r"complex32, which JAX does not have.*\.to\(torch\.complex64\)"
    with pytest.raises(bridge.BridgeError, match=what):
        bridge.verify(Call(lambda x: x.to(torch.complex64).abs()), X.to(HALF))
    fn = bridge.export(State("parameter", torch.complex64))
    with pytest.raises(bridge.BridgeError, match=what):
        bridge.into(fn, {"weight": X.to(HALF)})


def test_refused_in_a_survey_and_for_other_dtypes():
    with pytest.raises(bridge.BridgeError, match=WITHIN):
        bridge.export(Call(MADE["sum"])).survey(jnp.ones(3))
    fn = bridge.export(Call(lambda x: x.to(torch.float8_e8m0fnu)))
    with pytest.raises(bridge.BridgeError, match=r"float8_e8m0fnu, which has no counterpart .*torch\.float32"):
        jax.eval_shape(lambda x: fn({}, {}, x)[0], X.numpy())


def test_what_is_done_about_it():
    """Constants may have any dtype of PyTorch's."""
    compare(Call(lambda x: (x.half().float() * 1j + torch.ones(3, dtype=HALF).to(torch.complex64)).abs()), [X])
