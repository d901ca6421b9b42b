"""Entries that are compared with their largest one under `jit`, where XLA computes them again with another rounding.

Without care none is equal to it, and its gradient is lost. JAX's own `max` loses it, too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.markers import slow_unless
from torch import nn

import bridge

CASES = {
    "amax": lambda h: h.amax(0),
    "amax of two dimensions": lambda h: h.amax((0, 2)),
    "amin": lambda h: h.amin(0),
    "aminmax": lambda h: torch.stack(torch.aminmax(h, dim=0)),
    "max": lambda h: h.max(),
    "max along": lambda h: h.max(0).values,
    "median": lambda h: h.median(),
    "norm": lambda h: torch.linalg.vector_norm(h, float("inf"), dim=0),
    "smallest of absolute values": lambda h: torch.linalg.vector_norm(h, float("-inf"), dim=(0, 1)),
    "distances": lambda h: torch.cdist(h.flatten(1), h.flatten(1) * 0.3, p=float("inf")),
    "scatter_reduce": lambda h: torch.full((1, 4, 5, 6), -9.0).scatter_reduce(0, h.long() * 0, h, "amax"),
    "cummax": lambda h: h.cummax(0).values,
    "cummin": lambda h: h.cummin(0).values,
    "pooling": lambda h: F.max_pool2d(h, 2, 1, 1, return_indices=True)[0],
    "dilated pooling": lambda h: F.max_pool2d(h, 2, 1, 1, dilation=2),
    "adaptive pooling": lambda h: F.adaptive_max_pool2d(h, (2, 3)),
    "adaptive pooling to one": lambda h: F.adaptive_max_pool2d(h, 1, return_indices=True)[0],
    "kthvalue": lambda h: h.kthvalue(2, 0).values,
    "logsumexp": lambda h: h.logsumexp(0),
    "logcumsumexp": lambda h: h.logcumsumexp(0),
}


class Normalised(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.norm, self.function = nn.GroupNorm(3, 6), function
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5, generator=generator)
            self.norm.bias.normal_(generator=generator)

    def forward(self, x):
        return self.function(self.norm(x).transpose(1, 3))


def gradients(fn, x, weights):
    def loss(params, x):
        return (fn(params, fn.buffers, x)[0] * weights).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(fn.params, x)


@pytest.fixture(autouse=True)
def as_users_compile():
    """With all of XLA's optimizations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


RED_BEFORE = {"amax", "amin", "aminmax", "norm", "distances", "scatter_reduce"}


@pytest.mark.parametrize("name", slow_unless(RED_BEFORE.__contains__, CASES))
def test_gradient_under_jit(name):
    for seed in range(2):
        x = torch.randn(4, 6, 5, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        module = Normalised(CASES[name])
        out = module(x)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
        (out * weights).sum().backward()
        ours = gradients(bridge.export(module), jnp.asarray(x.detach().numpy()), jnp.asarray(weights.numpy()))
        largest = float(x.grad.abs().max())
        np.testing.assert_allclose(ours[1], x.grad.numpy(), rtol=0, atol=1e-5 * largest)
        largest = float(module.norm.bias.grad.abs().max())
        np.testing.assert_allclose(ours[0]["norm.bias"], module.norm.bias.grad.numpy(), rtol=0, atol=1e-5 * largest)
