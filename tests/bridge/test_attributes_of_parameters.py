"""`grad` in a forward, and other attributes of parameters in a backward."""

import pytest
import torch
from eager import Call, compare, randn
from torch import nn
from torch.autograd import Function

import bridge

X = randn(4, 6)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def assigned(m, x):
    m[0].weight.grad = torch.ones(5, 6)
    return m(x)


def added(m, x):
    weight = m[0].weight
    weight.grad = torch.ones(5, 6) if weight.grad is None else weight.grad.add_(1)
    return m(x)


def of_an_input(m, x):
    x.grad = x.detach() * 2
    return m(x)


@pytest.mark.parametrize("call", [assigned, added, of_an_input])
def test_assigned_in_forward(call):
    fn = bridge.export(Call(call, small()))
    with pytest.raises(bridge.BridgeError, match=r"`\.grad` of a parameter.* is assigned.*Remedy: "):
        fn(fn.params, fn.buffers, X.numpy())


def norm(m, x):
    gradient = m[0].weight.grad
    return x if gradient is None else x * gradient.norm()


def accumulated(m, x):
    if m[0].weight.grad is not None:
        m[0].weight.grad.add_(1)
    return x


@pytest.mark.parametrize("call", [norm, accumulated])
def test_a_gradient_from_before_the_call(call):
    module = Call(call, small())
    fn = bridge.export(module)
    assert (fn(fn.params, fn.buffers, X.numpy())[0] == X.numpy()).all()
    module.module(X).sum().backward()
    with pytest.raises(bridge.BridgeError, match=r"uses the `\.grad` that PyTorch's engine has left on a parameter"):
        fn(fn.params, fn.buffers, X.numpy())


def reset(m, x):
    """As `delta.grad.zero_()` of an attack, and `zero_grad` after it."""
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        (x.detach() * delta).sin().sum().backward()
        with torch.no_grad():
            delta += 0.1 * delta.grad.sign()
        delta.grad.zero_()
    m.zero_grad()
    return m(x + delta.detach())


def test_leaves_of_the_call_s_own():
    compare(Call(reset, small()), [X])


class AttributesOfTensors(nn.Module):
    """As `main_grad`, which large-model code keeps on parameters."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.5, -2.0]))
        self.w.main_grad = torch.tensor([3.0, 4.0])

    def forward(self, x):
        def forward(ctx, x, w):
            x.scale = x.detach() * 2
            ctx.save_for_backward(x, w)
            return x * w

        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * x.scale, g * w.main_grad

        scaled = type("Scaled", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
        return scaled.apply(x * 2, self.w)


def test_attributes_of_tensors():
    report = bridge.verify(AttributesOfTensors(), torch.tensor([1.0, 0.5], requires_grad=True))
    assert report.ok, report
