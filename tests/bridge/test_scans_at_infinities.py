"""`logcumsumexp` of rows with infinities and nan at every place: values and gradients are those of PyTorch."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call

import bridge

inf, nan = math.inf, math.nan


def rows(values, dtype):
    return torch.tensor([*itertools.product(values, repeat=3)], dtype=dtype)


REAL = rows([-inf, inf, nan, 1.0, 2.0], torch.float32)
COMPLEX = rows([-inf, inf, 1 + 1j, 2 - 0.5j], torch.complex64)
CASES = {
    "rows": (REAL, 1),
    "columns": (REAL.T.contiguous(), 0),
    "the middle one of three dimensions": (REAL.reshape(5, 25, 3).transpose(1, 2).contiguous(), 1),
    "complex": (COMPLEX, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_logcumsumexp(name):
    x, dim = CASES[name]
    leaf = x.clone().requires_grad_()
    expected = leaf.logcumsumexp(dim)
    weight = (torch.arange(x.numel()).view(x.shape) % 4 / 4).to(x.dtype)  # zeros among them
    (wanted,) = torch.autograd.grad(expected, leaf, weight)
    fn = bridge.export(Call(lambda x: x.logcumsumexp(dim)))

    @jax.jit
    def both(x, weight):
        out, pull = jax.vjp(lambda x: fn({}, {}, x)[0], x)
        return out, pull(weight)[0]

    out, gradient = both(jnp.asarray(x.numpy()), jnp.asarray(weight.numpy()))
    np.testing.assert_allclose(out, expected.numpy(force=True), rtol=1e-5)
    np.testing.assert_allclose(gradient.conj(), wanted.resolve_conj().numpy(), rtol=1e-5, atol=1e-6)
