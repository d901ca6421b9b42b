"""Inputs require no grad, as in PyTorch where nobody asks for their gradient; JAX has it all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, compare, randn
from torch import nn

import bridge


class Needy(torch.autograd.Function):
    """Computes what it is asked for."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return (
            gradient * y * 3 if ctx.needs_input_grad[0] else None,
            gradient * x * 5 if ctx.needs_input_grad[1] else None,
        )


def branches(x):
    seen = [x.requires_grad, (x * 2).requires_grad, x[0].requires_grad, torch.nn.functional.relu(x).requires_grad]
    return x + torch.tensor([float(s) for s in seen])


def test_inputs_and_what_comes_of_them_do_not_require_grad():
    x = randn(3, 4)
    fn = bridge.export(Call(branches))
    np.testing.assert_array_equal(fn({}, {}, jnp.asarray(x.numpy()))[0], branches(x).numpy())


def test_with_a_parameter_results_do():
    module = Call(lambda m, x: x * (2.0 if m(x).requires_grad else 3.0), nn.Linear(4, 4))
    compare(module, [randn(3, 4)])


def required_inside(x):
    h = x * 2
    x.requires_grad_()
    seen = [x.requires_grad, h.requires_grad, (x * 2).requires_grad]
    return x * x * h.detach() + torch.tensor([float(s) for s in seen]).sum()


def test_an_input_made_to_require_grad_inside():
    """In PyTorch the caller then finds its `grad`."""
    x = randn(3, 4)
    fn = bridge.export(Call(required_inside))
    out, slope = jax.jit(jax.value_and_grad(lambda x: fn({}, {}, x)[0].sum()))(jnp.asarray(x.numpy()))
    expected = required_inside(x).sum()
    expected.backward()
    np.testing.assert_allclose(out, expected.detach(), rtol=1e-5)
    np.testing.assert_allclose(slope, x.grad, rtol=1e-5)


@pytest.mark.parametrize("module", [Call(Needy.apply), Call(lambda x, y: Needy.apply(x + 1, y.sin()))])
def test_the_gradient_of_an_input_goes_through_a_custom_function(module):
    compare(module, [randn(3, 4), randn(3, 4, seed=2)])
