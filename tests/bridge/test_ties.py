"""Gradients of `clamp`, `fmax` and `fmin` at ties and beside nan, which differ between releases of PyTorch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call

import bridge

VALUES = [0.0, 1.0, 2.0, float("nan")]
OF_TENSORS = {
    "clamp": (torch.clamp, 3),
    "clamp min": (lambda x, low: x.clamp(min=low), 2),
    "clamp max": (lambda x, high: x.clamp(max=high), 2),
    "fmax": (torch.fmax, 2),
    "fmin": (torch.fmin, 2),
}
OF_NUMBERS = [(0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0, 2), (0.0, None), (None, 1)]


def compared(function, arrays):
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    weights = torch.arange(1.0, 1 + len(arrays[0]))
    (function(*tensors) * weights).nansum().backward()
    fn = bridge.export(Call(function))
    ours = jax.grad(lambda leaves: jnp.nansum(fn({}, {}, *leaves)[0] * weights.numpy()))(
        [jnp.asarray(a) for a in arrays]
    )
    for gradient, tensor in zip(ours, tensors, strict=True):
        np.testing.assert_array_equal(gradient, tensor.grad)


@pytest.mark.parametrize("name", OF_TENSORS)
def test_tensors(name):
    function, count = OF_TENSORS[name]
    compared(function, list(np.array(list(itertools.product(VALUES, repeat=count)), np.float32).T))


@pytest.mark.parametrize(("low", "high"), OF_NUMBERS)
def test_numbers(low, high):
    compared(lambda x: x.clamp(low, high), [np.array(VALUES, np.float32)])
