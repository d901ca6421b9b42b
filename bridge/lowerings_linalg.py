"""Norms, determinants and factorisations."""

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings_registry import lowers, widened
from bridge.semantics import jax_dtype

aten = torch.ops.aten


@lowers(aten.linalg_vector_norm.default)
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """Its gradient at zero is zero, PyTorch's choice among the subgradients; `jnp.linalg.norm` gives NaN."""
    x = jnp.abs(widened(x if dtype is None else x.astype(jax_dtype(dtype))))
    axes = tuple(range(x.ndim)) if dim is None or not x.ndim else tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if ord == float("inf"):
        return jnp.max(x, axes, keepdims=keepdim)
    if ord == float("-inf"):
        return jnp.min(x, axes, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(jax.lax.stop_gradient(x) != 0, axes, keepdims=keepdim).astype(x.dtype)
    if ord == 1:
        return jnp.sum(x, axes, keepdims=keepdim)
    if ord == 2:
        total = jnp.sum(jnp.square(x), axes, keepdims=keepdim)
        return jnp.where(total == 0, 0, jnp.sqrt(jnp.where(total == 0, 1, total)))
    at_zero = 0.0 if ord > 0 else jnp.inf
    powers = jnp.where(x == 0, at_zero, jnp.where(x == 0, 1, x) ** ord)
    total = jnp.sum(powers, axes, keepdims=keepdim)
    return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / ord))


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
