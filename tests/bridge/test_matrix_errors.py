"""Singular and indefinite matrices: what PyTorch raises, its info, and code that catches the error."""

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call, close, compare, randn

import bridge

INDEFINITE = torch.diag(torch.tensor([1.0, 4.0, -2.0, 3.0]))
SINGULAR = torch.diag(torch.tensor([2.0, 0.0, 5.0, 0.0]))
GOOD = (lambda m: m @ m.mT + 4 * torch.eye(4))(randn(4, 4))
STACK = torch.stack([GOOD, INDEFINITE, SINGULAR])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.cholesky_ex(x).info,
        lambda x: torch.linalg.cholesky_ex(x, upper=True).info,
        lambda x: torch.linalg.inv_ex(x).info,
        lambda x: torch.linalg.solve_ex(x, x).info,
        lambda x: torch.linalg.lu_factor_ex(x).info,
    ],
    ids=["cholesky", "upper", "inverse", "solution", "factors"],
)
def test_info(function):
    ours = jax.jit(lambda x: bridge.export(Call(function))({}, {}, x)[0])(STACK.numpy())
    assert ours.tolist() == function(STACK).tolist()


def test_code_that_chooses_by_info():
    def regularised(x):
        info = torch.linalg.cholesky_ex(x).info
        safe = torch.where((info > 0)[:, None, None], torch.eye(4), x)
        return torch.where((info > 0)[:, None, None], x * 2, torch.linalg.cholesky(safe))

    compare(Call(regularised), [STACK])


def test_values_that_are_known_raise_pytorchs_error():
    for function, matrix in ((torch.linalg.cholesky, INDEFINITE), (torch.linalg.inv, SINGULAR)):
        with pytest.raises(torch.linalg.LinAlgError) as expected:
            function(matrix)
        with pytest.raises(torch.linalg.LinAlgError) as ours:
            bridge.export(Call(function))({}, {}, jnp.asarray(matrix.numpy()))
        assert str(ours.value) == str(expected.value)


class Solved(torch.autograd.Function):
    """Its backward may raise in PyTorch, outside of every `try` of the module's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        matrix = torch.diag(x.square() + 1)
        factor = torch.linalg.cholesky(matrix)
        return torch.linalg.inv(matrix) @ torch.linalg.solve(matrix, gradient) + factor @ gradient


def guarded_apply(x):
    try:
        return Solved.apply(x)
    except RuntimeError:
        return x


def gradient_of(function):
    fn = bridge.export(Call(function))
    return jax.grad(lambda x: fn({}, {}, x)[0].sum())


@pytest.mark.parametrize("function", [Solved.apply, guarded_apply], ids=["plain", "guarded"])
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, jax.jacrev])  # pyright: ignore
def test_code_that_catches_errors_around_the_gradient_is_not_the_modules(transform, function):
    try:
        jax.eval_shape(transform(gradient_of(function)), jnp.arange(1.0, 4.0))
    except RuntimeError as error:
        pytest.fail(str(error))


@pytest.mark.slow
def test_nor_is_code_around_verify_whose_second_derivative_is_pytorchs_too():
    x = torch.arange(1.0, 4.0)
    expected = torch.autograd.functional.jacobian(
        lambda x: Solved.backward(type("", (), {"saved_tensors": (x,)}), torch.ones(3)), x
    )
    try:
        second = jax.jit(jax.jacrev(gradient_of(Solved.apply)))(x.numpy())
        report = bridge.verify(Call(Solved.apply), x)
    except RuntimeError as error:
        pytest.fail(str(error))
    close(second, expected, 1e-5)
    assert report.ok
