"""Leaves of PyTorch's graph: frozen for a while, and not to be written in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, Restored, compare, gradients, in_jax, raises, randn
from torch import nn

import bridge

X = randn(3, 4)


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


# ---- frozen and trained again


def frozen_critic(module, x):
    """Steps a generator through a frozen critic, and then the critic itself."""
    h = x * 2
    for p in module.parameters():
        p.requires_grad_(False)
    through = module(h).tanh()
    for p in module.parameters():
        p.requires_grad_(True)
    return through + module(x.detach()) * 0.1


def by_attribute(module, x):
    module.weight.requires_grad = False
    first = module(x)
    module.weight.requires_grad = True
    return first * module(x)


def views_keep_what_they_were_taken_with(module, x):
    before = module.weight[0]
    module.requires_grad_(False)
    during = module.weight[1]
    module.requires_grad_(True)
    return x * before + x * during * 3


def written_while_frozen(module, x):
    """The leaf has the new value and its own gradient."""
    module.requires_grad_(False)
    module.weight.mul_(2)
    first = module(x)
    module.requires_grad_(True)
    return module(x) + x.detach() @ module.weight.detach() + first.detach()


def data_assigned_while_frozen(module, x):
    old = module.weight.data
    module.requires_grad_(False)
    module.weight.data = old * 3
    first = module(x)
    module.requires_grad_(True)
    return first * module(x)


def detached_in_place(module, x):
    module.weight.detach_()
    first = module(x)
    module.weight.requires_grad_()
    return first * module(x)


def in_a_penalty(module, x):
    module.requires_grad_(False)
    y = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(module(y).square().sum(), y, create_graph=True)
    module.requires_grad_(True)
    return module(x) * slope


def under_checkpoint(module, x):
    def toggled(x):
        module.requires_grad_(False)
        h = module(x).tanh()
        module.requires_grad_(True)
        return h * module(x)

    return torch.utils.checkpoint.checkpoint(toggled, x, use_reentrant=False) * module(x)


TOGGLED = [
    frozen_critic, by_attribute, views_keep_what_they_were_taken_with, written_while_frozen,
    data_assigned_while_frozen, detached_in_place, in_a_penalty, under_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("call", TOGGLED, ids=lambda f: f.__name__)
def test_a_leaf_may_be_frozen_for_a_while(call):
    compare(Restored(Call(call, linear())), [X], 1e-4)


def frozen_for_good(module, x):
    module.bias.requires_grad_(False)
    return module(x) * x


def test_a_leaf_may_stay_frozen():
    """Code that freezes its backbone in every call does this."""
    slopes = gradients(Call(frozen_for_good, linear()), X)
    module = linear()
    frozen_for_good(module, X).sum().backward()
    np.testing.assert_allclose(slopes["module.weight"], module.weight.grad, rtol=1e-5)
    assert module.bias.grad is None and not slopes["module.bias"].any()


def frozen_after_its_use(module, x):
    out = module(x)
    module.requires_grad_(False)
    return out


def test_a_leaf_that_stays_frozen_after_its_use_is_refused():
    """PyTorch drops the gradient of the first call, and the second has none."""
    message = r"`module.weight.requires_grad`.*a later call would read it"
    raises(message, Call(frozen_after_its_use, linear()), X)


# ---- what PyTorch refuses


REFUSED = {
    "a leaf": lambda m, x: m.weight.mul_(2),
    "a view of a leaf": lambda m, x: m.weight.__setitem__(0, x[0]),
    "a leaf transposed in place": lambda m, x: m.weight.t_(),
    "a leaf made inside": lambda m, x: x.detach().requires_grad_().add_(1),
    "a result frozen": lambda m, x: m(x).requires_grad_(False),
    "a result set": lambda m, x: setattr(m(x), "requires_grad", False),
    "integers": lambda m, x: (x > 0).long().requires_grad_(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pytorch_s_own_errors(name):
    with pytest.raises(RuntimeError) as expected:
        REFUSED[name](linear(), X)
    with pytest.raises(RuntimeError) as raised:
        in_jax(Call(REFUSED[name], linear()), X)
    assert str(raised.value).split(" ")[:8] == str(expected.value).split(" ")[:8]
    assert type(raised.value) is RuntimeError


def saved_and_written(module, x):
    h = module(x)
    y = h.exp()
    z = y * h
    y.mul_(2)
    return z + y


def test_a_saved_tensor_may_be_written():
    """PyTorch computes the values and refuses the gradient, which is that of the same code with a clone."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved_and_written(linear(), X).sum().backward()

    slopes = gradients(Call(saved_and_written, linear()), X)
    module = linear()
    h = module(X)
    y = h.exp()
    (y.clone() * h + y * 2).sum().backward()
    np.testing.assert_allclose(slopes["module.weight"], module.weight.grad, rtol=1e-4, atol=1e-4)


def test_a_saved_tensor_may_be_given_other_data():
    """PyTorch does not count that as a write: its gradient is that of the new data, of values that were not used."""

    def function(scale, x):
        y = x * scale.weight
        scale.weight.data = scale.weight.data * 0.5
        return y

    scale = nn.Linear(1, 1, bias=False)
    scale.weight.requires_grad_(False).fill_(2.0)
    x = torch.ones(1, 1, requires_grad=True)
    fn = bridge.export(Call(function, scale))
    slope = jax.grad(lambda x: fn(fn.params, fn.buffers, x)[0].sum())(jnp.ones((1, 1)))
    function(scale, x).sum().backward()
    assert (slope.item(), x.grad.item()) == (2.0, 1.0)
