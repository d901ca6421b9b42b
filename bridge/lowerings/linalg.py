"""Determinants, solutions and factorisations."""

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import lowers
from bridge.semantics import regraft

aten = torch.ops.aten


@lowers(aten.linalg_cholesky_ex.default)
def cholesky(a, upper=False, check_errors=False):
    """Where `a` is not positive definite the result is NaN; nobody can look whether to raise while tracing."""
    factor = jnp.linalg.cholesky(a)
    return jnp.swapaxes(factor, -1, -2) if upper else factor, jnp.zeros(a.shape[:-2], jnp.int32)


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    if not a.size:
        return a, jnp.zeros(a.shape[:-1], jnp.int32)
    lu, pivots, _ = jax.lax.linalg.lu(jax.lax.stop_gradient(a))
    return lu, pivots + 1  # LAPACK counts from 1


@lowers(aten._linalg_det.default)
def determinant(a):
    return (jnp.linalg.det(a) if a.size else jnp.ones(a.shape[:-2], a.dtype), *_lu(a))


@lowers(aten._linalg_slogdet.default)
def log_determinant(a):
    sign, logarithm = jnp.linalg.slogdet(a)
    return (sign, logarithm, *_lu(a))


@lowers(aten._linalg_solve_ex.default)
def solve(a, b, *, left=True, check_errors=False):
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right = b[..., None] if vector else b
    if left or vector:
        out = jnp.linalg.solve(a, right)
    else:
        out = jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(right, -1, -2)), -1, -2)
    return (out[..., 0] if vector else out, *_lu(a), jnp.zeros(a.shape[:-2], jnp.int32))


@lowers(aten._linalg_eigh.default)
def eigh(a, uplo="L", compute_v=True):
    """Values come from one triangle, while the gradient is spread evenly over both: PyTorch's convention."""
    other = jnp.swapaxes(a, -1, -2)
    lower = jnp.tril(jnp.ones(a.shape[-2:], bool), 0 if uplo == "L" else -1)
    symmetric = regraft(jnp.where(lower, a, other) if uplo == "L" else jnp.where(lower, other, a), (a + other) / 2)
    vectors, values = jax.lax.linalg.eigh(symmetric, symmetrize_input=False)
    return values, vectors
