"""Determinants, solutions, factorisations and Fourier transforms.

PyTorch reads one triangle of a Hermitian matrix and of a Cholesky factor; gradients are spread evenly over both.
"""

import functools
import math

import jax
import jax.numpy as jnp
import torch

from bridge.context import refusal
from bridge.lowerings.registry import BY_LAYOUT, FUNCTIONS, METAS, decomposes, inlined, is_known, lowers, widened
from bridge.tensor.tensor import regraft

aten = torch.ops.aten


@lowers(aten.addmm.default, aten.addmv.default)
@inlined
def product_added(x, a, b, *, beta=1, alpha=1):
    """Returns `beta * x + alpha * a @ b`; with a `beta` of zero, `x` has no effect, even if it is nan.

    For integers, PyTorch truncates the two numbers to integers; other numbers are multiplied in float32 at least.
    """
    if not is_known(alpha, 1) or not (is_known(beta, 0) or is_known(beta, 1)):
        x, a, b = (widened(v) if jnp.issubdtype(v.dtype, jnp.floating) else v for v in (x, a, b))
    product = jnp.matmul(a, b)
    if jnp.issubdtype(product.dtype, jnp.integer):
        beta = _truncated(beta)
        alpha = _truncated(alpha)
    if not is_known(alpha, 1):
        product = alpha * product
    if is_known(beta, 0):
        return jnp.broadcast_to(product, jnp.broadcast_shapes(x.shape, product.shape))
    return (x if is_known(beta, 1) else beta * x) + product


def _truncated(number):
    if isinstance(number, jax.Array):
        return number.astype(jnp.int32)
    return int(number)


# ---- products of groups of rows, each by a matrix of its own: the experts of a mixture


@lowers(aten._grouped_mm.default)
def grouped_product(a, b, offs=None, bias=None, out_dtype=None):
    """`offs` has the end of each group along the dimension that a matrix shares with all groups."""
    if offs is None:
        return jnp.matmul(a, b)
    ragged = a.shape[-1 if b.ndim == 2 else 0] if a.ndim == 2 else b.shape[1]
    ends = jnp.minimum(offs, ragged)
    sizes = jnp.diff(ends, prepend=0)
    if b.ndim == 3:
        return jax.lax.ragged_dot(a, b, sizes)
    if a.ndim == 3:
        return jax.lax.ragged_dot(b.T, jnp.swapaxes(a, 1, 2), sizes).T
    # JAX has the product over groups only as a gradient, and no gradient of that.
    place = jnp.arange(ragged)
    own = (place >= (ends - sizes)[:, None]) & (place < ends[:, None])
    return jnp.matmul(jnp.where(own[:, None], a, 0), jnp.where(own[:, :, None], b, 0))


def _meta_of_groups(a, b, offs=None, bias=None, out_dtype=None):
    """Returns the meta result, since PyTorch's is for bfloat16 kernels of GPUs. Rows are aligned to 16 bytes."""
    groups = {len(x) for x in (a, b) if x.dim() == 3}
    if offs is not None:
        groups.add(len(offs))
    ragged = a.dim() == 2 or b.dim() == 2
    dtypes = {a.dtype, b.dtype, out_dtype or a.dtype}
    if ragged == (offs is None) or bias is not None or len(groups) > 1 or a.shape[-1] != b.shape[-2] or len(dtypes) > 1:
        raise RuntimeError("matrices, offsets and dtypes of a grouped product do not fit")  # the kernel says which
    rows = a.shape[-2]
    columns = b.shape[-1]
    aligned = math.ceil(columns * a.element_size() / 16) * 16 // a.element_size()
    if a.dim() == b.dim():
        return a.new_empty_strided((*groups, rows, columns), (aligned * rows, aligned, 1))
    return a.new_empty_strided((rows, columns), (aligned, 1))


METAS[aten._grouped_mm.default] = _meta_of_groups


def _adjoint(a: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(a, -1, -2))


# ---- LU, determinants and solutions


def _first(found: jax.Array) -> jax.Array:
    """Returns the place along the last dimension, counted from 1, of the first true entry; zero if there is none."""
    return jnp.where(jnp.any(found, -1), jnp.argmax(found, -1) + 1, 0)


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the factors, the pivots counted from 1 as in LAPACK, and the place of the first zero on the diagonal."""
    if not a.size:
        return a, jnp.zeros(a.shape[:-1], jnp.int32), jnp.zeros(a.shape[:-2], jnp.int32)
    lu, pivots, _ = jax.lax.linalg.lu(a)
    return lu, pivots + 1, _first(jnp.diagonal(lu, axis1=-2, axis2=-1) == 0)


@lowers(aten.linalg_inv_ex.default)
def inverse(a, check_errors=False):
    return (jnp.linalg.inv(a) if a.size else a), _lu(jax.lax.stop_gradient(a))[2]


@lowers(aten.linalg_lu_factor_ex.default)
def lu_factor(a, pivot=True, check_errors=False):
    if not pivot:
        raise NotImplementedError("without pivots")
    return _lu(a)


@lowers(aten.linalg_lu.default)
def lu_matrices(a, *, pivot=True):
    if not pivot:
        raise NotImplementedError("without pivots")
    lu, _, permutation = jax.lax.linalg.lu(a)
    return _matrices(lu, permutation)


@lowers(aten.lu_unpack.default)
def lu_unpack(lu, pivots, unpack_data=True, unpack_pivots=True):
    none = jnp.zeros(0, lu.dtype)
    p, lower, upper = _matrices(lu, jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, lu.shape[-2]))
    if not unpack_pivots:
        p = none
    if not unpack_data:
        lower = upper = none
    return p, lower, upper


def _matrices(lu: jax.Array, permutation: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns P, L and U; P has no gradient."""
    rows, columns = lu.shape[-2:]
    least = min(rows, columns)
    p = (jnp.arange(rows)[:, None] == permutation[..., None, :]).astype(lu.dtype)
    lower = jnp.tril(lu[..., :least], -1) + jnp.eye(rows, least, dtype=lu.dtype)
    return p, lower, jnp.triu(lu[..., :least, :])


@lowers(aten._linalg_det.default)
def determinant(a, *, factors_transposed=False):
    det = jnp.linalg.det(a) if a.size else jnp.ones(a.shape[:-2], a.dtype)
    return det, *_factors(a, factors_transposed)


@lowers(aten._linalg_slogdet.default)
def log_determinant(a, *, factors_transposed=False):
    return *jnp.linalg.slogdet(a), *_factors(a, factors_transposed)


def _factors(a: jax.Array, transposed: bool) -> tuple[jax.Array, jax.Array]:
    if transposed:
        a = jnp.swapaxes(a, -1, -2)
    return _lu(jax.lax.stop_gradient(a))[:2]


def _factors_transposed(a: torch.Tensor) -> dict[str, bool]:
    """PyTorch's gradient formula takes the factors for those of the transpose of a contiguous real matrix."""
    return {"factors_transposed": a.is_contiguous() and not a.is_complex()}


BY_LAYOUT[aten._linalg_det.default] = BY_LAYOUT[aten._linalg_slogdet.default] = _factors_transposed


@lowers(aten._linalg_solve_ex.default)
def solve(a, b, *, left=True, check_errors=False):
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if vector:
        out = jnp.linalg.solve(a, b[..., None])[..., 0]
    elif left:
        out = jnp.linalg.solve(a, b)
    else:
        out = jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)), -1, -2)
    return out, *_lu(jax.lax.stop_gradient(a))


# ---- orthogonal factors, eigenvalues and pseudoinverses


@lowers(aten.linalg_householder_product.default)
def householder_product(a, tau):
    """Returns the first columns of the product of the reflections `I - tau v v^H`; JAX's own has no derivative."""
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
    """PyTorch returns an empty Q if only R is requested."""
    if mode == "r":
        return (jnp.zeros(0, a.dtype), jnp.linalg.qr(a, "r"))
    return jnp.linalg.qr(a, mode)


@lowers(aten._linalg_eigvals.default)
def eigenvalues(a):
    """JAX differentiates the values, but not the vectors, for which PyTorch's decomposition would ask as well."""
    return jnp.linalg.eigvals(a)


FUNCTIONS[torch.linalg.eigvals] = aten._linalg_eigvals.default


@lowers(aten._linalg_eigh.default)
def eigh(a, uplo="L", compute_v=True):
    vectors, values = jax.lax.linalg.eigh(_from_triangle(a, uplo == "U"), symmetrize_input=False)
    return values, vectors


@lowers(aten.linalg_pinv.atol_rtol_tensor)
def pinv(a, *, atol=None, rtol=None, hermitian=False):
    if hermitian:  # PyTorch reads one triangle, with the derivative of a general matrix
        a = regraft(_from_triangle(a, False), a)
    if atol is None:
        ratio = 0
    else:
        ratio = atol / jnp.linalg.norm(jax.lax.stop_gradient(a), 2, (-2, -1))
    if rtol is None:  # the default, unless `atol` is positive
        rtol = jnp.where(ratio > 0, 0, max(a.shape[-2:]) * jnp.finfo(a.dtype).eps)
    return jnp.linalg.pinv(a, jnp.maximum(rtol, ratio))


@decomposes(aten.linalg_lstsq.default)
def lstsq(*args, **kwargs):
    raise refusal(
        "`torch.linalg.lstsq` returns residuals only where the matrix has full rank, so their shape depends on data",
        "write torch.linalg.pinv(A) @ B for the solution, and the residuals from that",
    )


@decomposes(aten.linalg_ldl_factor_ex.default)
def ldl_factor(*args, **kwargs):
    raise refusal(
        "`torch.linalg.ldl_factor` has no translation: JAX has no factorisation with blocks of two pivots",
        "use torch.linalg.cholesky where the matrix is positive definite, torch.linalg.lu_factor or "
        "torch.linalg.eigh where it is not",
    )


# ---- Cholesky factors


def _from_triangle(a: jax.Array, upper: bool) -> jax.Array:
    """Returns the Hermitian matrix with this triangle of `a`, and the gradient path of the Hermitian part of `a`."""
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
    """Uses PyTorch's formula, in which the diagonal of a complex factor may have an imaginary tangent."""
    factor = _factor(*primals, upper)
    change = jax.lax.linalg.triangular_solve(factor, *tangents, left_side=True, lower=True)
    change = _adjoint(jax.lax.linalg.triangular_solve(factor, _adjoint(change), left_side=True, lower=True))
    return factor, factor @ (jnp.tril(change) + jnp.tril(_adjoint(change), -1)) / 2


@lowers(aten.linalg_cholesky_ex.default)
def cholesky(a, upper=False, check_errors=False):
    """If `a` is not positive definite, the factor is NaN and `info` is the first minor that is not."""
    factor = _factor(a, upper)
    return _adjoint(factor) if upper else factor, _first_minor(_from_triangle(a, upper))


def _first_minor(a: jax.Array) -> jax.Array:
    """Returns the order of the first leading minor that is not positive, or zero. It costs nothing unless used."""
    if not a.size:
        return jnp.zeros(a.shape[:-2], jnp.int32)

    def eliminate(a, i):
        pivot = jnp.real(a[..., i, i])
        return a - a[..., :, i, None] * a[..., None, i, :] / pivot[..., None, None], pivot

    _, pivots = jax.lax.scan(eliminate, jax.lax.stop_gradient(a), jnp.arange(a.shape[-1]))
    return _first(jnp.moveaxis(~(pivots > 0), 0, -1))


@decomposes(aten.cholesky.default)
def cholesky_of_old(a, upper=False):
    return torch.linalg.cholesky(a, upper=upper)


@lowers(aten.cholesky_solve.default)
def cholesky_solve(b, factor, upper=False):
    """One triangle of the factor decides the value; PyTorch's gradient is that of the whole factor's product."""
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


# ---- Fourier transforms

_NORMS = ("forward", "ortho", "backward")
"""Normalizations by PyTorch's number: no factor, one over the root of the length, one over the length."""


@lowers(aten._fft_c2r.default)
def real_from_half(x: jax.Array, dims: list[int], norm: int, last: int) -> jax.Array:
    lengths = [x.shape[d] for d in dims]
    lengths[-1] = last  # half a spectrum does not say whether the length is even
    return jnp.fft.irfftn(x, lengths, dims, _NORMS[norm])
