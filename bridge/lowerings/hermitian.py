"""Hermitian matrices and their Cholesky factors, of which PyTorch reads one triangle.

Gradients are spread evenly over both triangles of a Hermitian matrix.
"""

import functools

import jax
import jax.numpy as jnp
import torch

from bridge.cells import regraft
from bridge.errors import refusal
from bridge.lowerings.registry import decomposes, lowers

aten = torch.ops.aten


def _adjoint(a: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def _from_triangle(a: jax.Array, upper: bool) -> jax.Array:
    """The Hermitian matrix that has this triangle of `a`, with the gradient path of the Hermitian part of `a`."""
    other = _adjoint(a)
    kept = jnp.tril(jnp.ones(a.shape[-2:], bool))
    value = jnp.where(kept.T if upper else kept, a, other)
    if jnp.iscomplexobj(a):
        value = jnp.where(jnp.eye(a.shape[-1], dtype=bool), jnp.real(value), value)
    return regraft(value, (a + other) / 2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _factor(a: jax.Array, upper: bool) -> jax.Array:
    return jax.lax.linalg.cholesky(_from_triangle(a, upper), symmetrize_input=False)


@_factor.defjvp
def _factor_jvp(upper, primals, tangents):
    """PyTorch's formula, in which the diagonal of a complex factor may have an imaginary tangent."""
    factor = _factor(*primals, upper)
    change = jax.lax.linalg.triangular_solve(factor, *tangents, left_side=True, lower=True)
    change = _adjoint(jax.lax.linalg.triangular_solve(factor, _adjoint(change), left_side=True, lower=True))
    return factor, factor @ (jnp.tril(change) + jnp.tril(_adjoint(change), -1)) / 2


@lowers(aten.linalg_cholesky_ex.default)
def cholesky(a, upper=False, check_errors=False):
    """Where `a` is not positive definite the factor is NaN, and `info` the first minor that is not."""
    factor = _factor(a, upper)
    return _adjoint(factor) if upper else factor, _first_minor(a, upper)


def _first_minor(a: jax.Array, upper: bool) -> jax.Array:
    """The order of the first leading minor that is not positive, zero if there is none. No work unless it is used."""
    if not a.size:
        return jnp.zeros(a.shape[:-2], jnp.int32)
    a = jax.lax.stop_gradient(_adjoint(a) if upper else a)
    place = jnp.arange(a.shape[-1])

    def step(i, state):
        a, info = state
        pivot = jnp.real(a[..., i, i])
        info = jnp.where((info == 0) & ~(pivot > 0), i + 1, info)
        column = jnp.where(place > i, a[..., :, i], 0)
        return a - column[..., :, None] * jnp.conj(column[..., None, :]) / a[..., i, i, None, None], info

    return jax.lax.fori_loop(0, a.shape[-1], step, (a, jnp.zeros(a.shape[:-2], jnp.int32)))[1]


@decomposes(aten.cholesky.default)
def cholesky_of_old(a, upper=False):
    return torch.linalg.cholesky(a, upper=upper)


@lowers(aten.cholesky_solve.default)
def cholesky_solve(b, factor, upper=False):
    """One triangle of the factor decides the value; PyTorch's gradient is that of the product of the whole factor."""
    batch = jnp.broadcast_shapes(b.shape[:-2], factor.shape[:-2])
    b, factor = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (b, factor))
    if not b.size:
        return b
    whole = _adjoint(factor) if upper else factor
    lower = jnp.tril(jax.lax.stop_gradient(whole))
    matrix = regraft(lower @ _adjoint(lower), whole @ _adjoint(whole))
    substitute = functools.partial(jax.lax.linalg.triangular_solve, lower, left_side=True, lower=True)

    def solve(_, b):
        return substitute(substitute(b), transpose_a=True, conjugate_a=True)

    def solve_transposed(_, b):
        return jnp.conj(solve(_, jnp.conj(b)))

    return jax.lax.custom_linear_solve(lambda x: matrix @ x, b, solve, solve_transposed)


@lowers(aten.cholesky_inverse.default)
def cholesky_inverse(factor, upper=False):
    return cholesky_solve(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@decomposes(aten.linalg_ldl_factor_ex.default)
def ldl_factor(a, *, hermitian=False, check_errors=False):
    raise refusal(
        "`torch.linalg.ldl_factor` has no translation: JAX has no factorisation with blocks of two pivots",
        "use torch.linalg.cholesky where the matrix is positive definite, torch.linalg.lu_factor or "
        "torch.linalg.eigh where it is not",
    )


@lowers(aten._linalg_eigh.default)
def eigh(a, uplo="L", compute_v=True):
    vectors, values = jax.lax.linalg.eigh(_from_triangle(a, uplo == "U"), symmetrize_input=False)
    return values, vectors
