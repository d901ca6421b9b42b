"""What Python code asks of a traced tensor besides its value: its place in PyTorch's graph, its class, its version."""

import queue

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, randn
from torch import nn

import bridge

X = randn(3, 4)


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def answers(module, x):
    h = module(x)
    leaf = h.detach().requires_grad_()
    with torch.no_grad():
        k = module.weight * 1
    parameter = nn.Parameter(module.weight.detach())
    tensors = [x, x * 2, module.weight, module.weight.view(-1), module.weight.data, h, h.detach(), leaf, leaf[0]]
    tensors += [k, k * module.weight, parameter, torch.ones(3), torch.ones(3, requires_grad=True), h > 0]
    return torch.tensor([(t.is_leaf, t.grad_fn is None, t.requires_grad) for t in tensors])


def written(module, x):
    out = torch.zeros(3, 4)
    before = out.is_leaf, out.grad_fn is None
    out.copy_(module(x))
    return torch.tensor([before, (out.is_leaf, out.grad_fn is None)])


def kinds(module, x):
    return torch.tensor(
        [
            x.__class__ is torch.Tensor,
            module.weight.__class__ is nn.Parameter,
            isinstance(x, nn.Parameter),
            isinstance(module.weight, nn.Parameter),
            isinstance(x, torch.Tensor),
        ]
    )


def versions(module, x):
    """Writes that PyTorch counts: not those through `.data`, and a module's weights may have been written before."""
    y = x * 1
    seen = [y._version]
    y.data.mul_(3)
    seen += [y._version, y.data._version]
    y[0].mul_(2)
    y.detach().add_(1)
    seen += [y._version, y[1]._version, y.detach()._version]
    with torch.no_grad():
        y.copy_(x)
    y.data = x * 2
    return torch.tensor([*seen, y._version])


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.clamp_(-1, 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def versions_of_dirty_tensors(module, x):
    """`mark_dirty` counts as a write, whether there is a gradient or not."""
    y, z, places = module(x), module(x).detach(), torch.arange(3) * x.argmax()
    Dirty.apply(y)
    with torch.no_grad():
        Dirty.apply(z)
    Dirty.apply(places)
    return torch.tensor([y._version, z._version, places._version])


@pytest.mark.parametrize("call", [answers, written, kinds, versions, versions_of_dirty_tensors])
def test_what_code_asks_of_a_tensor(call):
    fn = bridge.export(Call(call, linear()))
    np.testing.assert_array_equal(fn(fn.params, fn.buffers, jnp.asarray(X.numpy()))[0], call(linear(), X).numpy())


def test_what_no_python_code_can_answer():
    """`type(x)` sees the class itself, and a print says that there are no numbers yet."""
    seen = queue.SimpleQueue()  # a list would be empty again after the call

    def call(module, x):
        seen.put((type(x) is torch.Tensor, type(module.weight) is nn.Parameter, repr(x), str(module.weight)))
        return x

    fn = bridge.export(Call(call, linear()))
    fn(fn.params, fn.buffers, jnp.ones((3, 4)))
    *same_types, x_text, weight_text = seen.get()
    assert same_types == [False, False]
    assert all("BridgeTensor(shape=" in text and "traced" in text for text in (x_text, weight_text))


GRAPH = {
    "register_prehook": lambda h: h.grad_fn.register_prehook(lambda g: (g[0] * 3,)),
    "register_hook": lambda h: h.grad_fn.register_hook(lambda i, o: None),
    "next_functions": lambda h: h.grad_fn.next_functions,
    "name": lambda h: h.grad_fn.name(),
}


@pytest.mark.parametrize("name", GRAPH)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_node_of_pytorch_s_graph_is_refused(name, recorded):
    def call(module, x):
        h = module(x)
        if recorded:
            torch.autograd.grad(h.sum(), h, retain_graph=True)
        try:
            GRAPH[name](h)
        except Exception:
            return x
        return h

    fn = bridge.export(Call(call, linear()))
    with pytest.raises(bridge.BridgeError, match=rf"`grad_fn.{name}`.*test_tensor_attributes.py.*autograd.Function"):
        fn(fn.params, fn.buffers, jnp.ones((3, 4)))


class Views(nn.Module):
    """Which tensor owns the memory of a view, asked before and after traced values are written."""

    def __init__(self):
        super().__init__()
        self.buf = nn.Buffer(torch.zeros(3, 4))
        self.row = nn.Buffer(self.buf[0])
        self.w = nn.Parameter(torch.ones(3, 4))

    def forward(self, x):
        state = self.buf[1]
        state.add_(x)
        said = [state._base is self.buf, state._is_view(), self.row._base is self.buf, self.row._is_view()]
        said += [self.w[0]._base is self.w, self.w.detach()._base is None, (x * 2)._is_view(), x._base is None]
        made = torch.zeros(3, 4)
        before, other = made[1], made.view(-1)[2:6].view(2, 2)
        said += [before._base is made, before._is_view()]
        other[0] += x[:2]
        said += [view._base is made for view in (before, other, made[2])]
        said += [before._is_view(), other._is_view(), made._is_view(), made._base is None]
        slot = torch.zeros(3, 4)[-1]
        slot.copy_(x)
        assert slot._base is not None
        slot._base.sub_(1.0)
        return slot._base * 1, said


def test_which_tensor_owns_the_memory():
    module, x = Views(), torch.arange(4.0)
    fn = bridge.export(module)
    (ours, said), _ = fn(fn.params, fn.buffers, jnp.asarray(x.numpy()))
    theirs, expected = module(x)
    assert said == expected
    np.testing.assert_array_equal(ours, theirs.detach())
