"""Modules of which only the shapes matter: large tensors are not filled, all others are."""

import torch
from torch import nn

from models_torch.uninitialized import LARGE, Uninitialized


def test_large_tensors_are_not_filled():
    large, small = torch.full((LARGE,), 3.0), torch.full((LARGE - 1,), 3.0)
    with Uninitialized(), torch.no_grad():
        for fill in (nn.init.zeros_, nn.init.ones_, nn.init.normal_, nn.init.uniform_, torch.Tensor.zero_):
            fill(large)
        large.mul_(2)
        nn.init.zeros_(small)
        layer = nn.Linear(1024, 1024)
    assert (large == 6).all() and (small == 0).all()
    assert layer.weight.shape == (1024, 1024) and layer.weight.requires_grad and layer.bias.abs().max() > 0
    nn.init.zeros_(large)
    assert (large == 0).all()


def test_a_large_tensor_is_not_drawn_until_its_values_are_within_bounds():
    """The tensor's memory has the values of the tensor that had it before, and they would stay."""
    large, small = torch.full((LARGE,), 9.0), torch.full((LARGE - 1,), 9.0)
    with Uninitialized():
        for tensor in (large, small):
            nn.init.trunc_normal_(tensor, std=1.0, a=-2.0, b=2.0)
    assert (large == 9).all() and small.abs().max() <= 2
    nn.init.trunc_normal_(large, std=1.0, a=-2.0, b=2.0)
    assert large.abs().max() <= 2
