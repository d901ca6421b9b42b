"""Gradient hooks are PyTorch's engine's: they are refused by one error, wherever they hang, and never left out."""

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import bridge


def double(gradient):
    return gradient * 2


class Hooked(nn.Module):
    """Registers a hook on the way, by what `method` names."""

    def __init__(self, method, on_parameter=False):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.method, self.on_parameter = method, on_parameter

    def forward(self, x):
        h = self.inner(x)
        target = self.inner.weight if self.on_parameter else h
        arguments = () if self.method == "retain_grad" else (double,)
        getattr(target, self.method)(*arguments)
        return h.sum()


INSIDE = [("register_hook", False), ("register_hook", True), ("retain_grad", False)]


@pytest.mark.parametrize(("method", "on_parameter"), INSIDE)
def test_a_hook_registered_inside(method, on_parameter):
    fn = bridge.export(Hooked(method, on_parameter))
    with pytest.raises(bridge.BridgeError, match=rf"`{method}`.*in the module itself.*autograd\.Function"):
        fn(fn.params, fn.buffers, jnp.ones((2, 4)))


def hooked_parameter(module):
    return module[0].weight.register_hook(double)


def hooked_after_accumulation(module):
    return module[0].weight.register_post_accumulate_grad_hook(lambda p: None)


def hooked_module(module):
    return module[1].register_full_backward_hook(lambda m, inputs, outputs: None)


def hooked_before(module):
    return module[1].register_full_backward_pre_hook(lambda m, outputs: None)


def hooked_globally(module):
    return nn.modules.module.register_module_full_backward_hook(lambda m, inputs, outputs: None)


OUTSIDE = {
    hooked_parameter: "parameter 0.weight",
    hooked_after_accumulation: "parameter 0.weight",
    hooked_module: "module 1",
    hooked_before: "module 1",
    hooked_globally: "every module",
}


@pytest.mark.parametrize("register", OUTSIDE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("late", [False, True], ids=["before export", "after export"])
def test_a_hook_registered_outside(register, late):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fn = bridge.export(module)
    handle = register(module)
    try:
        with pytest.raises(bridge.BridgeError, match=f"{OUTSIDE[register]} has a gradient hook.*remove"):
            if late:
                fn(fn.params, fn.buffers, jnp.ones((2, 4)))
            else:
                bridge.export(module)
    finally:
        handle.remove()
    fn(fn.params, fn.buffers, jnp.ones((2, 4)))


class HookedChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.inner.register_full_backward_hook(lambda m, inputs, outputs: None)
        return self.inner(x)


def test_a_module_hook_registered_inside():
    fn = bridge.export(HookedChild())
    with pytest.raises(bridge.BridgeError, match="hook"):
        fn(fn.params, fn.buffers, jnp.ones((2, 4)))


def test_forward_hooks_are_kept():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module[1].register_forward_hook(lambda m, inputs, output: output * 3)
    report = bridge.verify(module, torch.ones(2, 4))
    assert report.ok, f"\n{report}"
