"""Complex numbers: real pairs, conjugates, spectra and Hermitian matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, Calls, array, compare, in_jax, raises, randn
from torch import nn

import bridge

# ---- Complex numbers: views between dtypes, lazy conjugation, FFTs and complex parameters, against PyTorch eager

C = torch.complex64


def rotary(x):
    """The reference code of Llama."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    angles = torch.outer(torch.arange(x.shape[0]).float(), 1.0 / 100.0 ** (torch.arange(0, 4, 2) / 4))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(1).type_as(x)


def written_through_parts(z):
    y = z.clone()
    torch.view_as_real(y)[..., 0].mul_(3)
    y.imag.add_(y.real.detach())
    return y


def written_through_pairs(x):
    y = x.clone()
    torch.view_as_complex(y).mul_(1j)
    return y


def written_through_conjugate(z):
    y = z.clone()
    y.conj()[0] = z[1]
    return y


def parts_of_a_fresh_tensor_set(x):
    y = torch.zeros(x.shape, dtype=C)
    y.real = x.sin()
    y.imag = 2.0
    y.imag[0] = x[0]
    y.real = y.imag.clone() * x
    return y


def short_time(x):
    window = torch.hann_window(8)
    spectrum = torch.stft(x.reshape(-1), 8, window=window, return_complex=True)
    return torch.istft(spectrum * (1 + 0.5j), 8, window=window, length=x.numel())


def at_zero(z):
    y = z.clone()
    with torch.no_grad():
        y[0] = 0
    return y.abs() + torch.sgn(y).real


REAL = {
    "rotary": rotary,
    "written through pairs": lambda x: written_through_pairs(x.reshape(3, 2, 2)),
    "polar": lambda x: torch.polar(x.abs(), x.sin()),
    "complex": lambda x: torch.complex(x, x.sin()).square(),
    "fft": lambda x: torch.fft.fft(x, 5, norm="ortho"),
    "rfft and irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.tensor([1, 2j, 1 - 1j]), 4),
    "irfft, odd": lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j), 5, norm="ortho"),
    "rfft2 and irfft2, odd": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * (1 + 2j), (3, 5), norm="forward"),
    "fft2": lambda x: torch.fft.fft2(x).abs(),
    "fftshift": lambda x: torch.fft.fftshift(torch.fft.fftn(x)).imag,
    "stft and istft": lambda x: short_time(x.repeat(3, 4)),
    "stft as pairs": lambda x: torch.view_as_real(
        torch.stft(x.reshape(-1).repeat(2), 4, window=torch.ones(4), return_complex=True, normalized=True)
    ),
    "complex exponential": lambda x: torch.exp(1j * x).real,
    "parts of a fresh tensor set": parts_of_a_fresh_tensor_set,
    "float to complex": lambda x: x.to(C) * 1j,
}
TABLE = randn(4, 3, seed=4, dtype=C)
"""PyTorch's kernel takes lazy conjugates of its factors, also where it runs while a call is traced."""

COMPLEX = {
    "parts": lambda z: z.real * 3 + z.imag.sin(),
    "view_as_real": torch.view_as_real,
    "conj": lambda z: z.conj() * z.sin(),
    "conj of conj": lambda z: z.conj().conj() * z.conj().resolve_conj(),
    "pairs of a resolved conjugate": lambda z: torch.view_as_real(z.conj().resolve_conj()),
    "adjoint": lambda z: z.mH @ z,
    "abs": lambda z: z.abs(),
    "at zero": at_zero,
    "sgn": torch.sgn,
    "angle": torch.angle,
    "powers": lambda z: z**2 + z**0.5 + z**-1,
    "a complex power": lambda z: z ** (0.5 + 1j) + z.abs() ** 2j + z ** (2 + 0j),
    "power of two tensors": lambda z: z ** z.conj(),
    "elementary": lambda z: z.exp() + z.log() + z.sqrt() + z.tanh() + z.cos() / z,
    "norm": lambda z: z.norm() + torch.linalg.vector_norm(z, 1, dim=0),
    "var": lambda z: z.var(0) + z.std(),
    "mean and sum": lambda z: z.mean(0) * z.sum() + z.prod(0) + z.cumsum(0),
    "matmul": lambda z: z @ z.T + torch.einsum("ij,kj->ik", z, z.conj()),
    "vdot": lambda z: torch.vdot(z[0], z[1]) + torch.dot(z[0], z[1]),
    "solve": lambda z: torch.linalg.solve(z[:, :3] + 3 * torch.eye(3), z[:, 3:]),
    "inverse": lambda z: torch.linalg.inv(z[:, :3] + 3 * torch.eye(3)),
    "pseudoinverse": torch.linalg.pinv,
    "pseudoinverse of a constant": lambda z: z * torch.linalg.pinv(TABLE),
    "fft": lambda z: torch.fft.ifft(torch.fft.fft(z, norm="ortho").square(), 6),
    "irfft": lambda z: torch.fft.irfft(z, 6),
    "written through parts": written_through_parts,
    "written through the conjugate": written_through_conjugate,
    "addcmul": lambda z: torch.addcmul(z, z, z.conj(), value=2),
    "where": lambda z: torch.where(z.real > 0, z, z.conj()),
    "gathered": lambda z: z[[0, 0, 1]].index_add(0, torch.tensor([1]), z[:1]),
}


@pytest.mark.parametrize("name", REAL)
def test_of_real_numbers(name):
    compare(REAL[name], [randn(3, 4)])


@pytest.mark.parametrize("name", COMPLEX)
def test_of_complex_numbers(name):
    compare(COMPLEX[name], [randn(3, 4, dtype=C)], 5e-5)


class Spectral(nn.Module):
    """A Fourier neural operator's layer: a complex weight, and one kept as pairs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(3, seed=2, dtype=C))
        self.pairs = nn.Parameter(randn(3, 2, seed=3))
        self.register_buffer("table", torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, x):
        spectrum = torch.fft.rfft(x) * self.weight.conj() * self.table
        return torch.fft.irfft(spectrum + torch.view_as_complex(self.pairs), 4)


def halved_spectrum(x, window):
    spectrum = torch.stft(x, 8, 2, window=window, return_complex=True)
    return (spectrum * 0.5).istft(8, 2, window=window, length=x.shape[-1])


def test_a_traced_window_is_not_checked():
    x = randn(2, 16)
    compare(lambda x: halved_spectrum(x, torch.hann_window(8)), [x], 1e-5)
    with pytest.raises(RuntimeError, match="window overlap add min"):
        halved_spectrum(x, torch.zeros(8))
    assert not np.isfinite(in_jax(halved_spectrum, x, torch.zeros(8), jit=True)).any()


def test_complex_parameters_and_their_gradients():
    compare(Spectral(), [randn(3, 4)])


def test_descent_takes_the_conjugate_of_jax_s_gradient():
    """One step is then PyTorch's, as docs/bridge.md says."""
    module = Spectral()
    x = randn(3, 4)
    fn = bridge.export(module)
    gradients = jax.grad(lambda p: (fn(p, fn.buffers, array(x))[0] ** 2).sum())(fn.params)
    stepped = jax.tree.map(lambda p, g: p - 0.1 * jnp.conj(g), fn.params, gradients)
    (module(x) ** 2).sum().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(stepped[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-5)
    wrong = fn.params["weight"] - 0.1 * gradients["weight"]
    assert not np.allclose(wrong, module.weight.detach().numpy(), atol=1e-3)


BITS = {
    "float32 as int32": (torch.int32, randn(3, 4)),
    "float32 as int16": (torch.int16, randn(3, 4)),
    "int16 as int32": (torch.int32, torch.arange(8, dtype=torch.int16)),
    "bfloat16 as int16": (torch.int16, randn(3, 4).bfloat16()),
    "uint8 as bool": (torch.bool, torch.tensor([1, 0], dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", BITS)
def test_bits_as_another_dtype(name):
    dtype, x = BITS[name]
    np.testing.assert_array_equal(in_jax(lambda x: x.view(dtype), x), x.view(dtype).numpy())


def test_bits_of_64_bit_numbers_are_refused_without_x64():
    with pytest.warns(bridge.BridgeWarning):
        raises(r"view\.dtype.*x64", lambda x: x.double().view(torch.int64), jnp.ones(3))


@pytest.mark.parametrize("kept_as", [nn.Buffer, lambda tensor: tensor], ids=["buffer", "attribute"])
def test_memory_kept_under_two_dtypes_is_refused(kept_as):
    pairs = nn.Parameter(randn(3, 2))
    other = kept_as(torch.view_as_complex(pairs.detach()))
    module = Calls(lambda m, x: x * m.other.abs() + m.pairs.sum(), pairs=pairs, other=other)
    with pytest.raises(bridge.BridgeError, match=r"share.*dtype.*clone"):
        in_jax(module, jnp.ones(3))


# ---- Matrices of which PyTorch reads one triangle, with other numbers in the other one, and complex Hermitian ones

linalg = torch.linalg
HERMITIAN = torch.complex64
DTYPES = [torch.float32, HERMITIAN]


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
def test_cholesky_reads_one_triangle(dtype, upper):
    x = with_another_triangle(positive(2, 3, 3, dtype=dtype), upper)
    compare(lambda x: linalg.cholesky(x, upper=upper), [x])


def test_a_covariance_that_is_not_quite_symmetric():
    def log_prob(mean, covariance):
        normal = torch.distributions.MultivariateNormal(mean, covariance, validate_args=False)
        return normal.log_prob(torch.ones(3)), normal.entropy()

    compare(log_prob, [randn(3), with_another_triangle(positive(3, 3, dtype=torch.float32), False)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [False, True])
def test_solution_and_inverse_by_a_factor(dtype, upper):
    factors = linalg.cholesky(positive(2, 3, 3, dtype=dtype), upper=upper)
    for factor in (factors[0], with_another_triangle(factors, upper)):
        compare(lambda b, f: torch.cholesky_solve(b, f, upper=upper), [randn(2, 3, 4, dtype=dtype), factor])
        compare(lambda f: torch.cholesky_inverse(f, upper=upper), [factor])
    broadcast = [randn(5, 1, 3, 2, dtype=dtype), factors]
    compare(lambda b, f: torch.cholesky_solve(b, f, upper=upper), broadcast)


def test_second_derivative_of_a_solution_by_a_factor():
    def second(b, factor):
        gradient = torch.func.grad(lambda f: torch.cholesky_solve(b, f).square().sum())
        return gradient(factor).square()

    compare(second, [randn(3, 2), randn(3, 3) + 3 * torch.eye(3)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [False, True])
def test_eigenvalues_and_vectors(dtype, upper):
    x = with_another_triangle(positive(2, 3, 3, dtype=dtype) + torch.diag(torch.arange(3) * 4), upper)
    if dtype == HERMITIAN:
        x = x + 1j * torch.eye(3)  # the imaginary part is ignored
    side = "U" if upper else "L"
    compare(lambda x: linalg.eigvalsh(x, UPLO=side), [x])

    def decomposed(x):
        values, vectors = linalg.eigh(x, UPLO=side)
        return values, without_phase(vectors)

    compare(decomposed, [x])


def test_eigenvalues_of_a_hermitian_matrix_in_forward_mode():
    x = torch.tensor([[2, 1 + 1j], [1 - 1j, 3]])
    fn = bridge.export(Call(linalg.eigvalsh))
    values, tangents = jax.jvp(lambda x: fn({}, {}, x)[0], [array(x)], [jnp.eye(2) + 0j])
    assert values.tolist() == pytest.approx([1, 4], abs=1e-5)
    assert tangents.tolist() == pytest.approx([1, 1], abs=1e-5)


@pytest.mark.parametrize(
    "function", [linalg.ldl_factor, lambda x: linalg.ldl_solve(x, torch.tensor([1, 2, 3], dtype=torch.int32), x)]
)
def test_the_factorisation_of_indefinite_matrices_is_refused(function):
    raises(r"ldl_\w+` has no translation.*Remedy: ", function, jnp.eye(3))


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 3, 4)])
def test_r_alone(shape):
    compare(lambda x: torch.linalg.qr(x.detach(), mode="r").R, [randn(*shape)])
