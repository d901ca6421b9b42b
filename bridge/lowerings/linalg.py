"""Determinants, solutions, factorisations and Fourier transforms.

PyTorch reads one triangle of a Hermitian matrix and of a Cholesky factor; gradients are spread evenly over both.
"""

import functools

import jax
import jax.numpy as jnp
import torch

from bridge.errors import refusal
from bridge.lowerings.registry import BY_LAYOUT, FUNCTIONS, decomposes, inlined, lowers, widened
from bridge.tensor.tensor import regraft

aten = torch.ops.aten


@lowers(aten.addmm.default, aten.addmv.default)
@inlined
def product_added(x, a, b, *, beta=1, alpha=1):
    """`beta * x + alpha * a @ b`; with a `beta` of zero `x` counts nothing, even where it is nan.

    Beside integers PyTorch cuts the numbers off to integers; other numbers multiply in float32 at least.
    """
    if alpha != 1 or beta not in (0, 1):
        x, a, b = (widened(v) if jnp.issubdtype(v.dtype, jnp.floating) else v for v in (x, a, b))
    product = jnp.matmul(a, b)
    if jnp.issubdtype(product.dtype, jnp.integer):
        beta, alpha = int(beta), int(alpha)
    product = product if alpha == 1 else alpha * product
    if beta == 0:
        return jnp.broadcast_to(product, jnp.broadcast_shapes(x.shape, product.shape))
    return (x if beta == 1 else beta * x) + product


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    if not a.size:
        return a, jnp.zeros(a.shape[:-1], jnp.int32)
    lu, pivots, _ = jax.lax.linalg.lu(jax.lax.stop_gradient(a))
    return lu, pivots + 1  # LAPACK counts from 1


def _first_zero(lu: jax.Array) -> jax.Array:
    """The place, counted from 1, of the first zero on the diagonal: the matrix is singular. Zero if there is none."""
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    return jnp.where(jnp.any(zero, -1), jnp.argmax(zero, -1) + 1, 0) if lu.size else jnp.zeros(lu.shape[:-2], jnp.int32)


@lowers(aten.linalg_inv_ex.default)
def inverse(a, check_errors=False):
    return (jnp.linalg.inv(a) if a.size else a), _first_zero(_lu(a)[0])


@lowers(aten.linalg_lu_factor_ex.default)
def lu_factor(a, pivot=True, check_errors=False):
    if not pivot:
        raise NotImplementedError("without pivots")
    lu, pivots, _ = jax.lax.linalg.lu(a)
    return lu, pivots + 1, _first_zero(lu)


@lowers(aten.linalg_lu.default)
def lu_matrices(a, *, pivot=True):
    if not pivot:
        raise NotImplementedError("without pivots")
    lu, _, permutation = jax.lax.linalg.lu(a)
    return _matrices(lu, permutation)


@lowers(aten.lu_unpack.default)
def lu_unpack(lu, pivots, unpack_data=True, unpack_pivots=True):
    permutation = jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, lu.shape[-2]) if unpack_pivots else None
    p, lower, upper = _matrices(lu, permutation)
    none = jnp.zeros(0, lu.dtype)
    return p if unpack_pivots else none, *((lower, upper) if unpack_data else (none, none))


def _matrices(lu: jax.Array, permutation: jax.Array | None) -> tuple:
    """P, L and U, of which P has no gradient."""
    rows, columns = lu.shape[-2:]
    least = min(rows, columns)
    lower = jnp.tril(lu[..., :least], -1) + jnp.eye(rows, least, dtype=lu.dtype)
    if permutation is None:
        return None, lower, jnp.triu(lu[..., :least, :])
    p = (jnp.arange(rows)[:, None] == permutation[..., None, :]).astype(lu.dtype)
    return p, lower, jnp.triu(lu[..., :least, :])


@lowers(aten.linalg_householder_product.default)
def householder_product(a, tau):
    """The first columns of the product of the reflections `I - tau v v^H`; JAX's own has no derivative."""
    rows, columns = a.shape[-2:]
    count = tau.shape[-1]
    vectors = jnp.tril(a[..., :count], -1) + jnp.eye(rows, count, dtype=a.dtype)

    def reflect(q, given):
        v, t = given
        return q - t[..., None, None] * v[..., :, None] * (jnp.conj(v)[..., None, :] @ q), None

    start = jnp.broadcast_to(jnp.eye(rows, columns, dtype=a.dtype), a.shape)
    given = jnp.moveaxis(vectors, -1, 0), jnp.moveaxis(tau, -1, 0)
    return jax.lax.scan(reflect, start, given, reverse=True)[0]


@lowers(aten.linalg_qr.default)
def qr(a, mode="reduced"):
    """PyTorch returns an empty Q where only R is asked for."""
    return (jnp.zeros(0, a.dtype), jnp.linalg.qr(a, "r")) if mode == "r" else jnp.linalg.qr(a, mode)


@decomposes(aten.linalg_lstsq.default)
def lstsq(a, b, rcond=None, *, driver=None):
    raise refusal(
        "`torch.linalg.lstsq` returns residuals only where the matrix has full rank, so their shape depends on data",
        "write torch.linalg.pinv(A) @ B for the solution, and the residuals from that",
    )


@lowers(aten._linalg_det.default)
def determinant(a, *, factors_transposed=False):
    det = jnp.linalg.det(a) if a.size else jnp.ones(a.shape[:-2], a.dtype)
    return (det, *_lu(jnp.swapaxes(a, -1, -2) if factors_transposed else a))


@lowers(aten._linalg_slogdet.default)
def log_determinant(a, *, factors_transposed=False):
    sign, logarithm = jnp.linalg.slogdet(a)
    return (sign, logarithm, *_lu(jnp.swapaxes(a, -1, -2) if factors_transposed else a))


def _factors_transposed(a: torch.Tensor) -> dict[str, bool]:
    """Of which matrix PyTorch's formula for the gradient takes the factors to be."""
    return {"factors_transposed": a.is_contiguous() and not a.is_complex()}


BY_LAYOUT[aten._linalg_det.default] = BY_LAYOUT[aten._linalg_slogdet.default] = _factors_transposed


@lowers(aten._linalg_solve_ex.default)
def solve(a, b, *, left=True, check_errors=False):
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right = b[..., None] if vector else b
    if left or vector:
        out = jnp.linalg.solve(a, right)
    else:
        out = jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(right, -1, -2)), -1, -2)
    lu, pivots = _lu(a)
    return (out[..., 0] if vector else out, lu, pivots, _first_zero(lu))


@jax.custom_jvp
def _eigen(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = jnp.linalg.eig(a)
    return values, vectors


@_eigen.defjvp
def _eigen_jvp(primals, tangents):
    """PyTorch's formula: eigenvectors keep their length, and their phase does not count."""
    values, vectors = _eigen(*primals)
    inner = jnp.linalg.solve(vectors, tangents[0].astype(vectors.dtype) @ vectors)
    diagonal = jnp.diagonal(inner, axis1=-2, axis2=-1)
    gaps = values[..., None, :] - values[..., :, None]
    own = jnp.eye(values.shape[-1], dtype=bool)
    turned = jnp.where(own, 0, inner / jnp.where(own, 1, gaps))
    lengths = jnp.real(jnp.sum(jnp.conj(vectors) * (vectors @ turned), axis=-2))
    return (values, vectors), (diagonal, vectors @ turned - vectors * lengths[..., None, :])


@lowers(aten.linalg_eig.default)
def eigen(a):
    return _eigen(a) if a.size else tuple(jnp.linalg.eig(a))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _pinv(a: jax.Array, atol: jax.Array, rtol: jax.Array, hermitian: bool) -> jax.Array:
    if hermitian:
        vectors, values = jax.lax.linalg.eigh(a, symmetrize_input=False)
        left, right = vectors, jnp.conj(jnp.swapaxes(vectors, -1, -2))
    else:
        u, values, vh = jnp.linalg.svd(a, full_matrices=False)
        left, right = (jnp.conj(jnp.swapaxes(m, -1, -2)) for m in (vh, u))
    size = jnp.abs(values)
    bound = jnp.maximum(atol[..., None], rtol[..., None] * jnp.max(size, -1, keepdims=True))
    inverse = jnp.where(size > bound, 1 / jnp.where(size > bound, values, 1), 0)
    return (left * inverse[..., None, :].astype(a.dtype)) @ right


@_pinv.defjvp
def _pinv_jvp(hermitian, primals, tangents):
    """PyTorch's formula, which takes `a` as it is given: also where only one triangle of it decides the value."""
    a, da = primals[0], tangents[0]
    inverse = _pinv(*primals, hermitian)
    adjoint, da_adjoint = (jnp.conj(jnp.swapaxes(m, -1, -2)) for m in (inverse, da))
    change = -inverse @ da @ inverse
    change = change + inverse @ adjoint @ (da_adjoint - da_adjoint @ a @ inverse)
    return inverse, change + (da_adjoint - inverse @ a @ da_adjoint) @ adjoint @ inverse


@lowers(aten.linalg_pinv.atol_rtol_tensor)
def pinv(a, *, atol=None, rtol=None, hermitian=False):
    if not a.size:
        return jnp.swapaxes(a, -1, -2)
    epsilon = max(a.shape[-2:]) * jnp.finfo(a.dtype).eps
    if rtol is None:
        rtol = jnp.asarray(epsilon) if atol is None else jnp.where(atol > 0, 0.0, epsilon)
    return _pinv(a, jnp.asarray(0.0 if atol is None else atol), jnp.asarray(rtol), hermitian)


@lowers(aten._linalg_eigvals.default)
def eigenvalues(a):
    """Taken whole: JAX differentiates the values, and not the vectors, which PyTorch would ask for besides."""
    return jnp.linalg.eigvals(a)


FUNCTIONS[torch.linalg.eigvals] = aten._linalg_eigvals.default


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


_NORMS = ("forward", "ortho", "backward")
"""By PyTorch's number: no factor, one over the root of the length, one over the length."""


@lowers(aten._fft_c2r.default)
def real_from_half(x: jax.Array, dims: list[int], norm: int, last: int) -> jax.Array:
    return jnp.fft.irfftn(x, [*(x.shape[d] for d in dims[:-1]), last], dims, _NORMS[norm])
