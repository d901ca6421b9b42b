"""What stops a gradient stops it for every tensor: buffers and complex numbers too, which PyTorch does not track."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class State(nn.Module):
    """A hidden state in a buffer; `cut` ends the gradient between two calls."""

    def __init__(self, cut):
        super().__init__()
        torch.manual_seed(0)
        self.cut = cut
        self.w = nn.Parameter(torch.randn(4, 4))
        self.h = nn.Buffer(torch.randn(3, 4))

    def forward(self, x):
        h = self.cut(self.h)
        self.h = torch.tanh(x + h @ self.w)
        return self.h * 1


def without_grad(h):
    with torch.no_grad():
        return torch.tanh(h) * 2


def view_without_grad(h):
    with torch.no_grad():
        return h.view(-1)[:12].view(3, 4)


def written_without_grad(h):
    out = torch.ones_like(h)
    with torch.no_grad():
        out.copy_(h)
    return out


def filled_in_place(h):
    """A write while gradients are off keeps the path of what was there, which the buffer is a part of."""
    out = h * 2
    with torch.no_grad():
        out.mul_(0.5)
    return out


def by_data(h):
    out = torch.zeros_like(h)
    out.data = h.data * 1.5
    return out


def written_after_detach(h):
    """The detached tensor shares the memory and sees the write, not its gradient."""
    base = torch.zeros_like(h)
    seen = base.detach()
    base.add_(h)
    return seen + h.new_zeros(())


def random_around(h):
    return torch.normal(h, 0.0 * h.detach() + 1e-20)


CUTS = {
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "no_grad": without_grad,
    "view": view_without_grad,
    "write": written_without_grad,
    "kept": filled_in_place,
    "data =": by_data,
    "after detach": written_after_detach,
    "normal": random_around,
}


def gradient_over_two_calls_in_pytorch(module):
    total = torch.zeros(())
    for i in range(2):
        total = total + (module(X + i) ** 2).sum()
    total.backward()
    return module.w.grad.numpy()


@pytest.mark.parametrize("name", CUTS)
def test_two_calls_inside_one_gradient(name):
    """Truncated backpropagation: the second call reads what the first one wrote into a buffer."""
    module = State(CUTS[name])
    fn = bridge.export(module)
    expected = gradient_over_two_calls_in_pytorch(State(CUTS[name]))

    def loss(params):
        buffers, total = fn.buffers, 0.0
        for i in range(2):
            out, buffers = fn(params, buffers, X.numpy() + i, rng=jax.random.key(i))
            total = total + (out**2).sum()
        return total

    found = jax.jit(jax.grad(loss))(fn.params)["w"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


class Complex(nn.Module):
    def __init__(self, cut):
        super().__init__()
        torch.manual_seed(0)
        self.cut = cut
        self.a = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        h = torch.fft.fft(x @ self.a)
        assert h.requires_grad
        return self.cut(h).abs() + x @ self.a


def complex_without_grad(h):
    with torch.no_grad():
        return h * 2


@pytest.mark.parametrize("cut", [lambda h: h.detach(), lambda h: h, complex_without_grad])
def test_complex_numbers(cut):
    module = Complex(cut)
    (module(X) ** 2).sum().backward()
    expected = module.a.grad.numpy()
    fn = bridge.export(module)
    found = jax.jit(jax.grad(lambda p: (fn(p, fn.buffers, jnp.asarray(X.numpy()))[0] ** 2).sum()))(fn.params)["a"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
