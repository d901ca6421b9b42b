"""Matrices of which PyTorch reads one triangle, with other numbers in the other one, and complex Hermitian ones."""

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call, compare, randn

import bridge

linalg = torch.linalg
COMPLEX = torch.complex64
DTYPES = [torch.float32, COMPLEX]


def positive(*shape, dtype):
    x = randn(*shape, dtype=dtype)
    return x @ x.mH + 3 * torch.eye(shape[-1])


def with_another_triangle(x, upper):
    """`x` with other numbers on the side that is not read."""
    other = randn(*x.shape, seed=5, dtype=x.dtype)
    return x.triu() + other.tril(-1) if upper else x.tril() + other.triu(1)


def without_phase(vectors):
    return vectors[..., :, None, :] * vectors[..., None, :, :].conj()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3)])
def test_cholesky_reads_one_triangle(dtype, upper, shape):
    x = with_another_triangle(positive(*shape, dtype=dtype), upper)
    compare(Call(lambda x: linalg.cholesky(x, upper=upper)), [x])
    compare(Call(lambda x: linalg.cholesky_ex(x, upper=upper)[0]), [x])


def test_a_covariance_that_is_not_quite_symmetric():
    def log_prob(mean, covariance):
        normal = torch.distributions.MultivariateNormal(mean, covariance, validate_args=False)
        return normal.log_prob(torch.ones(3)), normal.entropy()

    compare(Call(log_prob), [randn(3), with_another_triangle(positive(3, 3, dtype=torch.float32), False)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [False, True])
def test_solution_and_inverse_by_a_factor(dtype, upper):
    factors = linalg.cholesky(positive(2, 3, 3, dtype=dtype), upper=upper)
    for factor in (factors, factors[0], with_another_triangle(factors, upper)):
        compare(Call(lambda b, f: torch.cholesky_solve(b, f, upper=upper)), [randn(2, 3, 4, dtype=dtype), factor])
        compare(Call(lambda f: torch.cholesky_inverse(f, upper=upper)), [factor])
    broadcast = [randn(5, 1, 3, 2, dtype=dtype), factors]
    compare(Call(lambda b, f: torch.cholesky_solve(b, f, upper=upper)), broadcast)


def test_second_derivative_of_a_solution_by_a_factor():
    def second(b, factor):
        gradient = torch.func.grad(lambda f: torch.cholesky_solve(b, f).square().sum())
        return gradient(factor).square()

    compare(Call(second), [randn(3, 2), randn(3, 3) + 3 * torch.eye(3)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [False, True])
def test_eigenvalues_and_vectors(dtype, upper):
    x = with_another_triangle(positive(2, 3, 3, dtype=dtype) + torch.diag(torch.arange(3) * 4), upper)
    if dtype == COMPLEX:
        x = x + 1j * torch.eye(3)  # which is ignored
    side = "U" if upper else "L"
    compare(Call(lambda x: linalg.eigvalsh(x, UPLO=side)), [x])

    def decomposed(x):
        values, vectors = linalg.eigh(x, UPLO=side)
        return values, without_phase(vectors)

    compare(Call(decomposed), [x])


def test_eigenvalues_of_a_hermitian_matrix_in_forward_mode():
    x = torch.tensor([[2, 1 + 1j], [1 - 1j, 3]])
    fn = bridge.export(Call(linalg.eigvalsh))
    values, tangents = jax.jvp(lambda x: fn({}, {}, x)[0], [jnp.asarray(x.numpy())], [jnp.eye(2) + 0j])
    assert values.tolist() == pytest.approx([1, 4], abs=1e-5)
    assert tangents.tolist() == pytest.approx([1, 1], abs=1e-5)


@pytest.mark.parametrize(
    "function", [linalg.ldl_factor, lambda x: linalg.ldl_solve(x, torch.tensor([1, 2, 3], dtype=torch.int32), x)]
)
def test_the_factorisation_of_indefinite_matrices_is_refused(function):
    with pytest.raises(bridge.BridgeError, match=r"ldl_\w+` has no translation.*Remedy: "):
        bridge.export(Call(function))({}, {}, jnp.eye(3))


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3), (2, 3, 4)])
def test_r_alone(shape):
    compare(Call(lambda x: torch.linalg.qr(x.detach(), mode="r").R), [randn(*shape)])
    compare(Call(lambda x: torch.linalg.qr(x.detach(), mode="r").Q), [randn(*shape)])


def test_r_alone_has_no_derivative():
    fn = bridge.export(Call(lambda x: torch.linalg.qr(x, mode="r").R))
    with pytest.raises(bridge.BridgeError, match=r"no derivative of `linalg_qr`.*mode='reduced'"):
        jax.grad(lambda x: fn({}, {}, x)[0].sum())(jnp.eye(3))
    compare(Call(lambda x: torch.linalg.qr(x).R), [randn(4, 3)])
