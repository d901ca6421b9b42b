"""Special functions over the range in which PyTorch computes them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, compare, randn

import bridge

inf, nan = math.inf, math.nan
NEGATIVE = -torch.arange(0.05, 7, 0.19)
NEGATIVE = NEGATIVE[(NEGATIVE - NEGATIVE.round()).abs() > 0.03]


def in_jax(function, *inputs):
    fn = bridge.export(Call(function))
    return jax.jit(lambda *xs: fn({}, {}, *xs)[0])(*(jnp.asarray(x.numpy()) for x in inputs))


def assert_same(function, *inputs, tolerance=1e-5):
    ours, expected = in_jax(function, *inputs), function(*inputs)
    for mine, theirs in zip(ours, expected, strict=True):
        assert str(mine.dtype) == str(theirs.dtype).removeprefix("torch.")
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_polygamma_of_negative_numbers(n):
    """Against float64; below -7 JAX has another number, and the bridge nan."""
    fn = bridge.export(Call(lambda x: torch.polygamma(n, x)))
    ours = fn({}, {}, jnp.asarray(NEGATIVE.numpy()))[0]
    np.testing.assert_allclose(ours, torch.polygamma(n, NEGATIVE.double()), rtol=2e-5, atol=2e-5)
    assert np.isnan(fn({}, {}, jnp.array([-7.5, -100.25]))[0]).all()


def test_modified_bessel_functions():
    x = torch.tensor([0.0, 1.0, 3.0, 8.0, 8.5, 20.0, 50.0, 88.0])
    assert_same(lambda x: [torch.special.modified_bessel_i0(x), torch.special.modified_bessel_i1(x)], x)
    assert_same(lambda x: [torch.special.modified_bessel_i0(-x), torch.special.modified_bessel_i1(-x)], x)
    assert_same(lambda x: [torch.special.modified_bessel_k0(x), torch.special.modified_bessel_k1(x)], x[:7])
    assert_same(lambda x: [torch.special.modified_bessel_i1(x)], torch.tensor([100.0, -100.0, inf, nan]))
    assert_same(lambda x: [torch.special.modified_bessel_i1(x)], torch.tensor([3, -9]))


def test_incomplete_gamma_functions():
    a, x = (t.flatten() for t in torch.meshgrid(*[torch.tensor([0.3, 1.0, 2.5, 40.0])] * 2, indexing="ij"))
    module = Call(lambda a, x: (torch.igamma(a, x), torch.igammac(a, x)))
    for ours, theirs in zip(bridge.export(module)({}, {}, a.numpy(), x.numpy())[0], module(a, x), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    compare(Call(lambda x: torch.igamma(torch.tensor(2.5), x.exp())), [randn(4)])


@pytest.mark.parametrize("degree", [0, 3])
@pytest.mark.parametrize("name", ["chebyshev_polynomial_t", "chebyshev_polynomial_u", "hermite_polynomial_h"])
def test_a_polynomial_of_a_python_degree(name, degree):
    x = torch.linspace(-0.9, 0.9, 5)
    fn = bridge.export(Call(lambda x: getattr(torch.special, name)(x, degree)))
    np.testing.assert_allclose(fn({}, {}, x.numpy())[0], getattr(torch.special, name)(x, degree), rtol=1e-5, atol=1e-6)
