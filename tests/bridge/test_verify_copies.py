"""`verify` works on copies, which have to be what the module is."""

import weakref

import pytest
import torch
from eager import Call
from torch import nn

import bridge

X = torch.linspace(-1, 2, 12).reshape(4, 3)


def test_a_backward_inside_of_the_call_leaves_no_gradient_of_an_input():
    def forward(x):
        weight = torch.ones(3, requires_grad=True)
        (x * weight).sum().backward()
        return x * weight.grad.detach()

    assert bridge.verify(Call(forward), X[:1]).ok


def test_gradient_hooks_of_parameters_are_refused():
    """A copy of a parameter has none, and `verify` works on copies."""
    for method in ("register_hook", "register_post_accumulate_grad_hook"):
        layer = nn.Linear(3, 2)
        getattr(layer.weight, method)(lambda gradient: None)
        with pytest.raises(bridge.BridgeError, match="parameter weight has a gradient hook"):
            bridge.verify(layer, X)


def test_dicts_of_weak_references_hold_the_copies():
    assert bridge.verify(Held(), torch.randn(5, 3), train=True).ok


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.by_name = weakref.WeakValueDictionary({"norm": self.norm})
        self.names = weakref.WeakKeyDictionary({self.norm: "norm"})

    def forward(self, x):
        return self.by_name[self.names[self.norm]](x) * 2
