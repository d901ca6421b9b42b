"""`torch.autograd.Function`: the gradient is its backward's, whatever its forward does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, compare
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import bridge
from bridge._compat.torch import Replacements
from bridge.dispatch import tracing


class Reversed(Function):
    """Passes on what it gets; its gradient is turned round and scaled by a number, as in adversarial training."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class StraightThrough(Function):
    """Rounds; the gradient does not notice."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gate(Function):
    """Two inputs, two outputs, saved tensors of all three kinds, one output without gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        hidden = x * 3
        out, index = torch.tanh(x * weight), (x > 0).to(torch.float32)
        ctx.save_for_backward(x, weight, out, hidden)
        ctx.mark_non_differentiable(index)
        return out, index

    @staticmethod
    def backward(ctx, grad, _):
        _, weight, out, hidden = ctx.saved_tensors
        slope = grad * (1 - out * out)
        assert ctx.needs_input_grad == (True, True)
        return slope * weight * 2, (slope * hidden).sum(0)


class WithSetup(Function):
    """The newer form, whose forward has no context."""

    @staticmethod
    def forward(x, power=2):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.power = inputs
        ctx.save_for_backward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.power * x ** (ctx.power - 1) * 5, None


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 7 * grad


class Written(Function):
    """Its results are tensors that no operation on traced ones made: they were written into, or are constant."""

    @staticmethod
    def forward(ctx, x):
        out, kept, sign = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 4)
        out.copy_(x * x)
        kept.copy_(x.exp())
        torch.sign(x, out=sign)
        ctx.save_for_backward(kept)
        ctx.again = out
        ctx.mark_non_differentiable(sign)
        return out, sign, torch.ones(2)

    @staticmethod
    def backward(ctx, grad, of_sign, of_ones):
        made = torch.zeros(3, 4)
        made.copy_(grad * ctx.saved_tensors[0] + ctx.again)
        return made * of_ones.sum()


def written(x, _):
    out, sign, ones = Written.apply(x)
    return (out * sign).sum() + (ones * x[:2, :1].T).sum() * 3


class Module(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))
        self.call = call

    def forward(self, x):
        return self.call(x * self.weight, self.weight)


def in_place(x, _):
    y = x + 1
    z = InPlace.apply(y)
    return (y * z).sum()


def under_no_grad(x, _):
    with torch.no_grad():
        y = StraightThrough.apply(x)
    return y * x


early = StraightThrough.apply  # a reference taken before anything is traced

CALLS = {
    "reversed": lambda x, _: Reversed.apply(x, 0.5),
    "straight through": lambda x, _: early(x) * x,
    "saved tensors": lambda x, w: Gate.apply(x, w)[0] + Gate.apply(x, w)[1],
    "setup_context": lambda x, _: WithSetup.apply(x, 3) + WithSetup.apply(x),
    "in place": in_place,
    "under no_grad": under_no_grad,
    "written": written,
    "one of PyTorch's": lambda x, _: nn.CrossMapLRN2d(3)(x[None, :, :, None]),
    "inside another": lambda x, _: Reversed.apply(StraightThrough.apply(Reversed.apply(x, 2.0)), 3.0),
}
X = torch.linspace(-2, 2, 12).reshape(3, 4)


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_pytorchs(name):
    report = bridge.verify(Module(CALLS[name]), X.clone().requires_grad_(), tolerance=1e-5)
    assert report.ok, report


@pytest.mark.parametrize("transform", ["vmap", "scan", "checkpoint"])
def test_it_composes(transform):
    module = Module(CALLS["saved tensors"])
    fn = bridge.export(module)

    def loss(params, x):
        return fn(params, fn.buffers, x)[0].sum()

    def over_rows(params):
        rows = jnp.asarray(X.numpy())
        if transform == "vmap":
            return jax.vmap(lambda x: loss(params, x[None]))(rows).sum()
        if transform == "scan":
            return jax.lax.scan(lambda total, x: (total + loss(params, x[None]), None), 0.0, rows)[0]
        return jax.checkpoint(loss)(params, rows)

    module(X).sum().backward()
    grads = jax.jit(jax.grad(over_rows))(fn.params)
    np.testing.assert_allclose(grads["weight"], module.weight.grad, rtol=1e-5, atol=1e-5)


def test_second_derivatives():
    """Through the saved input and the saved output."""

    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            y = x * x
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * (2 * x + y)

    class Calls(nn.Module):
        def forward(self, x):
            return Square.apply(x).sum()

    x = torch.linspace(-1, 1, 5, requires_grad=True)
    (slope,) = torch.autograd.grad(Calls()(x), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), x)
    fn = bridge.export(Calls())
    first = jax.grad(lambda x: fn({}, {}, x)[0])
    second = jax.grad(lambda x: first(x).sum())(jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(second, curve.detach(), rtol=1e-5, atol=1e-6)


class WrongShape(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.sum()


def test_a_gradient_of_the_wrong_shape_is_named():
    fn = bridge.export(Module(lambda x, _: WrongShape.apply(x)))
    with pytest.raises(bridge.BridgeError, match=r"backward of WrongShape gave a gradient of shape \(\)"):
        jax.grad(lambda p: fn(p, {}, jnp.ones((3, 4)))[0].sum())(fn.params)


class TwoResults(Function):
    """Its second result is marked, which PyTorch's engine overlooks under `torch.vmap`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin(), x.abs()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, other):
        return ctx.saved_tensors[0].cos() * grad + other


def test_marks_under_a_generated_rule_for_vmap():
    compare(Call(lambda x: torch.vmap(TwoResults.apply)(x)), [X])


def test_outside_a_traced_call_it_is_pytorchs_own():
    x = torch.ones(3, requires_grad=True)
    Reversed.apply(x, 0.5).sum().backward()
    assert x.grad.tolist() == [-0.5] * 3


def test_the_rule_is_needed(monkeypatch):
    """Without it PyTorch's own `apply` runs."""
    monkeypatch.setattr(tracing, "_REPLACED", Replacements())
    report = bridge.verify(Module(CALLS["reversed"]), X.clone().requires_grad_(), tolerance=1e-5)
    assert not report.ok
