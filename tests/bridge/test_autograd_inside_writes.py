"""A call that asks PyTorch's engine for a gradient and writes traced values into tensors that it made as constants."""

import jax.numpy as jnp
import pytest
import torch
from eager import Call, Doubled, compare, randn
from torch import nn

import bridge


def layer():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def messages(module, x):
    """Forces of a graph network: the sum over edges starts from zeros."""
    x.requires_grad_()
    edges = torch.tensor([0, 1, 1])
    nodes = torch.zeros(3, 4).index_add_(0, edges, module(x)[edges] ** 2)
    energy = x.pow(3).sum() + nodes.sum()
    return -torch.autograd.grad(energy, x, create_graph=True)[0]


def rows(module, x):
    h = module(x)
    y = torch.empty(3, 4)
    for row in range(3):
        y[row] = h[row].exp() * h.sum()
    return torch.autograd.grad(y.square().sum(), [h, module.weight], create_graph=True)


def view_from_before(module, x):
    """The write goes into a view that was made while all was constant, and another view shows it."""
    h = module(x)
    y = torch.eye(4)
    first, columns = y[0], y.t()
    first.add_(h.sum(0))
    columns[1].mul_(h[1])
    return torch.autograd.grad((y * y).sum() + first.exp().sum() + columns[0].prod(), h, create_graph=True)[0]


def scan(module, x):
    h = module(x)
    states, state = torch.zeros(3, 4), torch.zeros(4)
    for step in range(3):
        state = torch.tanh(state * 0.5 + h[step])
        states[step] = state
    return torch.autograd.grad(states.prod(0).sum(), h, create_graph=True)[0] + states


def running_loss(module, x):
    h, loss = module(x), torch.zeros(())
    loss += h.square().sum()
    loss += module.weight.square().sum()
    return (*torch.autograd.grad(loss, [h, module.weight], create_graph=True), loss)


def partly_without_gradients(module, x):
    """What is written under `no_grad` has no part in the graph, what is detached neither."""
    h = module(x)
    y, z = torch.ones(3, 4), torch.ones(3, 4)
    y.mul_(h)
    with torch.no_grad():
        z.mul_(h)
    slope = torch.autograd.grad((y * z).sum() + (y.detach() * h).sum(), h, create_graph=True)[0]
    return slope, y, z


def by_the_written_tensor(module, x):
    y = torch.zeros(3, 4).add_(module(x))
    return torch.autograd.grad(y.pow(3).sum(), y, create_graph=True)[0]


def leaf_backward(module, x):
    leaf = module(x).detach().requires_grad_()
    torch.zeros(3, 4).copy_(leaf).pow(3).sum().backward()
    return module(x) * leaf.grad


def written_again(module, x):
    """A constant that the first write made traced, and a clone of a constant."""
    h, base = module(x), torch.arange(12.0).reshape(3, 4)
    y = base.clone()
    y.sub_(h)
    y[:, 1:] *= h[:, :1]
    return torch.autograd.grad((y * base).sum(), h, create_graph=True)[0]


CALLS = [
    messages, rows, view_from_before, scan, running_loss, partly_without_gradients, by_the_written_tensor,
    leaf_backward, written_again,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_inside_forward(call):
    compare(Call(call, layer()), [randn(3, 4)], 1e-4)


def test_inside_a_backward():
    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.zeros_like(x).add_(x * x)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = torch.zeros(3, 4).add_(x * x)
            return torch.autograd.grad(out, x, gradient)

    compare(Call(lambda module, x: Recomputed.apply(module(x)), layer()), [randn(3, 4)], 1e-4)


def test_a_custom_function_of_a_written_constant_is_refused():
    def call(module, x):
        h = module(x)
        y = torch.zeros(3, 4).add_(h)
        return torch.autograd.grad(Doubled.apply(y).sum(), h)[0]

    fn = bridge.export(Call(call, layer()))
    with pytest.raises(bridge.BridgeError, match=r"Doubled may be part of its graph.*jax\.grad"):
        fn(fn.params, fn.buffers, jnp.ones((3, 4)))


def test_a_later_write_is_pytorch_s_error():
    def call(module, x):
        h = module(x)
        y = torch.ones(3, 4)
        y.mul_(h)
        z = y.square().sum()
        y.mul_(h)
        return torch.autograd.grad(z, h)[0]

    module = Call(call, layer())
    fn = bridge.export(module)
    for run in (lambda: module(torch.ones(3, 4)), lambda: fn(fn.params, fn.buffers, jnp.ones((3, 4)))):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run()


def test_the_graph_of_a_call_before_is_gone():
    """Documented as different by nature: a buffer is a value between two calls."""

    class Decaying(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))
            self.b = nn.Buffer(torch.tensor(0.0))

        def forward(self):
            self.b = self.b * 0.5 + self.w**2
            return torch.autograd.grad(self.b, self.w, create_graph=True)[0]

    module = Decaying()
    fn = bridge.export(module)
    first, buffers = fn(fn.params, fn.buffers)
    second, _ = fn(fn.params, buffers)
    assert [module().item(), module().item()] == [4, 4 + 2]
    assert [float(first), float(second)] == [4, 4]
