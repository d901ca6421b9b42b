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
NEGATIVE = torch.cat([-torch.arange(0.05, 12, 0.19), torch.tensor([-3.5, -20.25, -100.3, -1000.75, -1e-3])])
POLES = torch.tensor([0.0, -0.0, -1.0, -2.0, -7.0, -1e9, -inf])
POINTS = torch.tensor([-5.0, -2.5, -1.0, -0.99, -0.5, -0.0, 0.0, 0.3, 0.7, 1.0, 1.1, 3.0, inf, -inf])
DEGREES = [-2, 0, 1, 2, 3, 6, 7, 8, 9, 10, 15, 40, 129]
POLYNOMIALS = [
    getattr(torch.special, f"{kind.replace(' ', '_polynomial_')}")
    for kind in (
        *("chebyshev t", "chebyshev u", "chebyshev v", "chebyshev w", "hermite h", "hermite he"),
        *("laguerre l", "legendre p"),
    )
]


def in_jax(function, *inputs):
    fn = bridge.export(Call(function))
    return jax.jit(lambda *xs: fn({}, {}, *xs)[0])(*(jnp.asarray(x.numpy()) for x in inputs))


def assert_same(function, *inputs, tolerance=1e-5):
    ours, expected = in_jax(function, *inputs), function(*inputs)
    for mine, theirs in zip(ours, expected, strict=True):
        assert str(mine.dtype) == str(theirs.dtype).removeprefix("torch.")
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_polygamma_of_negative_numbers(n):
    """Against float64; the gradient is the next order."""
    fn = bridge.export(Call(lambda x: torch.polygamma(n, x)))
    x = jnp.asarray(NEGATIVE.numpy())
    value, pull = jax.vjp(lambda x: fn({}, {}, x)[0], x)
    truth = NEGATIVE.double().requires_grad_()
    expected = torch.polygamma(n, truth)
    expected.sum().backward()
    for ours, theirs in ((value, expected), (pull(jnp.ones_like(x))[0], truth.grad)):
        np.testing.assert_allclose(ours, theirs.detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_polygamma_at_poles(n):
    assert_same(lambda x: [torch.polygamma(n, x)], POLES)


def test_gradient_of_trigamma_is_that_of_pytorch():
    leaf = torch.cat([NEGATIVE, POLES]).requires_grad_()
    torch.polygamma(1, leaf).sum().backward()
    fn = bridge.export(Call(lambda x: torch.polygamma(1, x).sum()))
    gradient = jax.grad(lambda x: fn({}, {}, x)[0])(jnp.asarray(leaf.detach().numpy()))
    np.testing.assert_allclose(gradient, leaf.grad, rtol=2e-5, atol=2e-5)


def test_modified_bessel_functions():
    x = torch.tensor([0.0, 1.0, 3.0, 8.0, 8.5, 20.0, 50.0, 88.0])
    assert_same(lambda x: [torch.special.modified_bessel_i0(x), torch.special.modified_bessel_i1(x)], x)
    assert_same(lambda x: [torch.special.modified_bessel_i0(-x), torch.special.modified_bessel_i1(-x)], x)
    assert_same(lambda x: [torch.special.modified_bessel_k0(x), torch.special.modified_bessel_k1(x)], x[:7])
    assert_same(lambda x: [torch.special.modified_bessel_i1(x)], torch.tensor([100.0, -100.0, inf, nan]))
    assert_same(lambda x: [torch.special.modified_bessel_i1(x)], torch.tensor([3, -9]))


@pytest.mark.parametrize("polynomial", POLYNOMIALS, ids=lambda f: f.__name__)
def test_polynomials(polynomial):
    """By degrees in Python and in tensors, of numbers and of tensors; PyTorch gives them no gradient."""

    def by_numbers(x):
        return [polynomial(x, n) for n in (*DEGREES, 2.7)] + [polynomial(x.nan_to_num(0, 3, -3).int(), 3)]

    def by_tensors(x, n):
        return (
            polynomial(x, n[:, None]),
            polynomial(0.3, n),
            polynomial(-1, n),
            polynomial(x[:0], 2),
            polynomial(x, n[3]),
        )

    assert_same(by_numbers, POINTS, tolerance=5e-5)
    assert_same(by_tensors, POINTS, torch.tensor(DEGREES), tolerance=5e-5)
    fn = bridge.export(Call(lambda x: polynomial(x, 9) * x))
    value, gradient = jax.value_and_grad(lambda x: fn({}, {}, x)[0])(0.3)
    np.testing.assert_allclose(gradient, value / 0.3, rtol=1e-5)


def test_incomplete_gamma_functions_where_an_argument_is_zero_or_infinite():
    numbers = torch.tensor([0.0, 0.3, 1.0, 2.5, 40.0, float("inf"), -1.0, float("nan")])
    a, x = (t.flatten() for t in torch.meshgrid(numbers, numbers, indexing="ij"))
    module = Call(lambda a, x: (torch.igamma(a, x), torch.igammac(a, x)))
    fn = bridge.export(module)
    for ours, theirs in zip(fn({}, {}, a.numpy(), x.numpy())[0], module(a, x), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    compare(Call(lambda x: torch.igamma(torch.tensor(2.5), x.exp())), [randn(4)])
