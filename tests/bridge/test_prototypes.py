"""Tensors made by the shape of a traced one: the prototype that stands for it has no values of its own."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

import bridge
from bridge.dispatch.constants import EMBEDDED

SHAPE = EMBEDDED // 64 + 1, 64


class Zeros(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x), torch.ones_like(x) + x, x.new_full(x.shape, 3)


@pytest.mark.parametrize("attempt", range(3))
def test_memory_that_was_used_before_is_not_read(attempt):
    """Wide integers were in it, which a constant of 32 bits would not hold."""
    fn, x = bridge.export(Zeros()), np.ones(SHAPE, np.int32)
    for _ in range(3):
        used = torch.full(SHAPE, 2**55, dtype=torch.int64)
        del used
        lowered = jax.jit(lambda x: fn(fn.params, fn.buffers, x)[0]).lower(x)
        assert f"dense<{2**55}>" not in lowered.as_text() and len(lowered.as_text()) < 3000
    zeros, twos, threes = lowered.compile()(x)
    assert (int(zeros.max()), int(twos.min()), int(threes.max())) == (0, 2, 3)
