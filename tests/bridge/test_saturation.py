"""Gradients where values are extreme: saturated attention, and norms of inputs that are large."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bridge


class Attention(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.masked = masked

    def forward(self, q, k, v):
        mask = torch.zeros(q.shape[-2], k.shape[-2]) if self.masked else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def gradients_in_pytorch(module, inputs, dtype):
    module = copy.deepcopy(module).to(dtype)
    inputs = [x.clone().to(dtype).requires_grad_() for x in inputs]
    out = module(*inputs)
    (out * weights_of(out.shape).to(dtype)).sum().backward()
    return out.detach().numpy(), [x.grad.double().numpy() for x in inputs]


def weights_of(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def gradients_in_jax(module, inputs):
    fn = bridge.export(module)

    def loss(inputs):
        out, _ = fn(fn.params, fn.buffers, *inputs)
        return jnp.sum(out * weights_of(out.shape).numpy()), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))([jnp.asarray(x.numpy()) for x in inputs])
    return np.asarray(out), [np.asarray(g, np.float64) for g in gradients]


def numbers(*shape, seed=1):
    """Rounded, because the last bit of `randn` depends on the machine, and scores of 1e12 on the last bit."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(256).round() / 256


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "additive mask"])
@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_saturated_attention(scale, masked):
    """One key has all the weight: queries and keys have hardly a gradient, where rounding times their size gave 8e5.

    Against float64, because PyTorch's own kernel rounds like that in float32.
    """
    module = Attention(masked)
    inputs = [scale * numbers(2, 2, 4, 6, seed=s) for s in range(3)]
    expected_out, expected = gradients_in_pytorch(module, inputs, torch.float64)
    out, found = gradients_in_jax(module, inputs)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-5 * scale)
    largest = max(np.abs(e).max() for e in expected)
    for name, e, f in zip("qkv", expected, found, strict=True):
        assert np.abs(f - e).max() <= 1e-4 * largest, name


@pytest.mark.parametrize("scale", [1.0, 1e8, 1e14, 1e17])
@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.GroupNorm(2, 16)], ids=["layer norm", "group norm"])
def test_norm_of_large_inputs(norm, scale):
    """The cube of the inverse deviation is below float32's smallest number from 1e13 on; the result is not."""
    inputs = [scale * numbers(3, 16)]
    _, (expected,) = gradients_in_pytorch(norm, inputs, torch.float64)
    _, (found,) = gradients_in_jax(norm, inputs)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("module", [nn.LayerNorm(4), Attention(False)], ids=["layer norm", "attention"])
def test_second_derivatives(module):
    """The rules above are written by hand; a gradient of the gradient goes through them."""
    shape = (2, 4) if isinstance(module, nn.LayerNorm) else (1, 1, 3, 4)
    inputs = [numbers(*shape, seed=s) for s in range(1 if len(shape) == 2 else 3)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        value = (module(*leaves) * weights_of(shape)).sum()
    first = torch.autograd.grad(value, leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    fn = bridge.export(module)

    def squares(inputs):
        def loss(inputs):
            return jnp.sum(fn(fn.params, fn.buffers, *inputs)[0] * weights_of(shape).numpy())

        return sum(jnp.sum(g**2) for g in jax.grad(loss)(inputs))

    found = jax.jit(jax.grad(squares))([jnp.asarray(x.numpy()) for x in inputs])
    for e, f in zip(second, found, strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=0, atol=1e-5 * max(g.abs().max().item() for g in second))
