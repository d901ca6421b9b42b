"""Functions of single elements, with PyTorch's gradient where the function has a corner, a boundary or a zero.

Inside in float32, whatever the dtype they are given; the dispatcher rounds to PyTorch's dtype.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._compat.torchax import torchax_lowering
from bridge.dispatch.random import generator_of
from bridge.lowerings.derivatives import with_derivatives
from bridge.lowerings.registry import LOWERINGS, METAS, decomposes, inlined, lowers, of_widened, widened
from bridge.tensor.tensor import regraft

aten = torch.ops.aten


def _inside_float32(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return inlined(lambda x: function(widened(x)))


for _op, _function in {
    aten.sigmoid.default: jax.lax.logistic,
    aten.erf.default: jax.lax.erf,
    aten.erfc.default: jax.lax.erfc,
    aten.erfinv.default: jax.lax.erf_inv,
    aten.special_log_ndtr.default: jax.scipy.special.log_ndtr,
    aten.silu.default: lambda x: x * jax.lax.logistic(x),
    aten.tanh.default: jnp.tanh,
    aten.sinc.default: jnp.sinc,
    aten.special_i1.default: jax.scipy.special.i1,
    aten.special_modified_bessel_i1.default: jax.scipy.special.i1,
}.items():
    LOWERINGS[_op] = _inside_float32(_function)


@lowers(aten.gelu.default)
@inlined
def gelu(x, *, approximate="none"):
    return jax.nn.gelu(widened(x), approximate=approximate == "tanh")


@lowers(aten.glu.default)
@inlined
def glu(x, dim=-1):
    value, gate = jnp.split(widened(x), 2, dim)
    return value * jax.lax.logistic(gate)


@lowers(aten.relu.default)
@with_derivatives(lambda t, out, x: jnp.where(out <= 0, 0, t))
def relu(x):
    """The gradient of nan is that of a positive number."""
    return jnp.maximum(x, 0)


@lowers(aten.abs.default)
@with_derivatives(lambda t, out, x: t * sign(x))
def absolute(x):
    """Its gradient at zero is zero, as PyTorch's; that of `jnp.abs` is one."""
    return jnp.abs(x)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(x, y):
    """Integers stay integers: in floating point those beyond 2**24 lose their last digits."""
    return jnp.fmod(x, y)


@lowers(aten.softplus.default)
def softplus(x, beta=1, threshold=20):
    """The exponential is not taken of numbers whose gradient would overflow with it; so in those below."""
    x = widened(x)
    large = x * beta > threshold
    return jnp.where(large, x, jnp.log1p(jnp.exp(jnp.where(large, 0, x * beta))) / beta)


@lowers(aten.complex.default)
def complex_number(real, imag):
    """Keeps the sign of an imaginary zero, which decides the side of a branch cut."""
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


@lowers(aten.mish.default)
def mish(x):
    x = widened(x)
    return x * jnp.tanh(softplus(x))


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid(x):
    """Zero counts as positive throughout: with the derivatives of `abs` and `minimum` the second one would be 0 there.

    PyTorch's second result is memory for its backward.
    """
    x = widened(x)
    decayed = jnp.exp(-jnp.where(x < 0, -x, x))
    return jnp.where(x < 0, x, 0) - jnp.log1p(decayed), decayed


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(gradient, x, buffer):
    return gradient * jax.lax.logistic(-widened(x))


@lowers(aten.elu.default)
def elu(x, alpha=1, scale=1, input_scale=1):
    """At zero the first derivative is that of negative numbers, and the second one is zero."""
    x = widened(x)
    below = alpha * jnp.expm1(jnp.where(x < 0, x, 0) * input_scale)
    return jnp.where(x < 0, below, jnp.where(x == 0, x * (alpha * input_scale), x)) * scale


@lowers(aten.elu_backward.default)
def elu_backward(gradient, alpha, scale, input_scale, is_result, x):
    """`x` is the result of `elu` if `is_result`; the derivative at zero is a constant, as in `elu`."""
    x = widened(x)
    below = jnp.where(x < 0, x, 0)
    slope = (below + alpha * scale if is_result else alpha * scale * jnp.exp(below * input_scale)) * input_scale
    return gradient * jnp.where(x < 0, slope, jnp.where(x == 0, alpha * scale * input_scale, scale))


@lowers(aten.celu.default)
def celu(x, alpha=1.0):
    return elu(x, alpha, 1, 1 / alpha)


@lowers(aten.selu.default)
def selu(x):
    return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@lowers(aten.sign.default, aten.sgn.default)
def sign(x):
    """Of a complex number it has a gradient, which that of `jnp.sign` is not."""
    if jnp.iscomplexobj(x):
        other = jnp.where(x == 0, 1, x)
        return jnp.where(x == 0, 0, other / jnp.abs(other))
    return x if x.dtype == bool else jnp.where(x != x, 0, jnp.sign(x)).astype(x.dtype)  # of nan it is zero


@lowers(aten.angle.default)
def angle(x):
    if not jnp.iscomplexobj(x):
        x = jax.lax.stop_gradient(widened(x) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32))
        return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0))
    x = jnp.where(x == 0, jax.lax.stop_gradient(x), x)
    return jnp.arctan2(jnp.imag(x), jnp.real(x))


def _unit(direction):
    return jax.lax.complex(jnp.cos(direction), jnp.sin(direction))


@lowers(aten.polar.default)
@with_derivatives(
    lambda t, out, size, direction: t * (jnp.sign(size) * _unit(direction)),
    lambda t, out, size, direction: t * (size * _unit(direction + jnp.pi / 2)),
)
def polar(size, direction):
    """PyTorch's gradient takes the size for what it says, and is turned round for a negative one."""
    return size * _unit(direction)


@lowers(aten.acosh.default)
def acosh(x):
    """That of `jnp.arccosh` has the derivative of the other branch left of the imaginary axis."""
    return jnp.log(x + jnp.sqrt(x - 1) * jnp.sqrt(x + 1)) if jnp.iscomplexobj(x) else jnp.arccosh(widened(x))


@lowers(aten.nan_to_num.default)
def nan_to_num(x, nan=None, posinf=None, neginf=None):
    """Replaced numbers have no gradient; each part of a complex number is replaced by itself."""
    if jnp.iscomplexobj(x):
        return jax.lax.complex(*(nan_to_num(part, nan, posinf, neginf) for part in (jnp.real(x), jnp.imag(x))))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    largest = float(jnp.finfo(x.dtype).max)
    x = jnp.where(x == jnp.inf, largest if posinf is None else posinf, x)
    x = jnp.where(x == -jnp.inf, -largest if neginf is None else neginf, x)
    return jnp.where(x != x, 0 if nan is None else nan, x)


@lowers(aten.hardtanh.default)
def hardtanh(x, low=-1, high=1):
    """Unlike `clamp`, it has no gradient on its boundaries."""
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


@lowers(aten.hardsigmoid.default)
@of_widened
@with_derivatives(lambda t, out, x: t * jnp.where((x > -3) & (x < 3), 1 / 6, 0))
def hardsigmoid(x):
    return jnp.clip(x + 3, 0, 6) / 6


@with_derivatives(
    lambda t, out, x, lambd: jnp.where((x >= -lambd) & (x <= lambd), 0, t), lambda t, out, x, lambd: jnp.zeros_like(t)
)
def _softshrink(x, lambd):
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


@lowers(aten.softshrink.default)
def softshrink(x, lambd=0.5):
    return _softshrink(widened(x), lambd)


@lowers(aten.hardswish.default)
@of_widened
@with_derivatives(lambda t, out, x: t * jnp.where(x <= -3, 0, jnp.where(x < 3, x / 3 + 0.5, 1)))
def hardswish(x):
    return x * jnp.clip(x + 3, 0, 6) / 6


@lowers(aten.special_entr.default)
@of_widened
@with_derivatives(lambda t, out, x: t * -(1 + jnp.log(x)))
def entropy(x):
    return jax.scipy.special.entr(x)


@lowers(aten.leaky_relu.default)
def leaky_relu(x, slope=0.01):
    return jnp.where(x > 0, x, widened(x) * slope)


@lowers(aten.rsqrt.default)
@of_widened
@with_derivatives(lambda t, out, x: t * (-0.5 * out**3))
def rsqrt(x):
    return jax.lax.rsqrt(x)


@with_derivatives(
    lambda t, out, x, low, high: (
        t * jnp.where(x < low, _beyond(low), jnp.where(x > high, _beyond(low), 1 / (x * (1 - x))))
    ),
    lambda t, out, x, low, high: jnp.zeros_like(t),
    lambda t, out, x, low, high: jnp.zeros_like(t),
)
def _logit(x, low, high):
    x = jnp.where(low > 0, jnp.clip(x, low, high), x)
    return jnp.log(x / (1 - x))


def _beyond(low):
    """The derivative where the argument is cut off, or no probability."""
    return jnp.where(low > 0, 0, jnp.nan)


@lowers(aten.logit.default)
def logit(x, eps=None):
    eps = 0.0 if eps is None else eps
    return _logit(widened(x), eps, 1 - eps)


def _polynomial(op: Any) -> None:
    """Orthogonal polynomials by torchax, which asks for 64-bit degrees and takes no Python number for one."""

    @lowers(op.default)
    def lowering(x, n):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            of_torchax: Any = torchax_lowering(op.default)
            return of_torchax(x, n)

    decomposes(op.n_scalar)(lambda x, n: op.default(x, torch.full((), n, dtype=x.dtype)))


for _name in (
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "hermite_polynomial_h", "hermite_polynomial_he",
    "laguerre_polynomial_l",
):  # fmt: skip
    _polynomial(getattr(aten, f"special_{_name}"))


@decomposes(aten.native_dropout.default)
def native_dropout(x, p, train):
    """Returns the result and which elements were kept."""
    if train is None:
        raise NotImplementedError("PyTorch's gradient of it is not that of its result for train=None; pass True")
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


@decomposes(aten.rrelu_with_noise.default)
def rrelu(x, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    """`noise` becomes the slopes, 1 where `x` is positive."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    if generator is not None or generator_of(None) is not None:
        raise NotImplementedError("a seeded generator gives slopes to negative entries only, so it depends on data")
    with torch.no_grad():
        slopes = torch.empty_like(x).uniform_(lower, upper)
        noise.copy_(torch.where(x <= 0, slopes, 1))
    return x * noise


@decomposes(aten.rrelu_with_noise_.default)
def rrelu_in_place(x, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    return x.copy_(rrelu(x, noise, lower, upper, training, generator))


@decomposes(aten.embedding_renorm_.default)
def embedding_renorm(weight, indices, max_norm, norm_type):
    """Rows that are looked up and longer than `max_norm` are shortened in place."""
    norms = torch.linalg.vector_norm(weight, norm_type, 1, keepdim=True)
    used = torch.zeros(weight.shape[0], dtype=torch.int32).index_fill(0, indices.reshape(-1), 1).unsqueeze(1)
    return weight.mul_(torch.where((used > 0) & (norms > max_norm), max_norm / (norms + 1e-7), 1.0))


@lowers(aten.special_erfcx.default)
@of_widened
@with_derivatives(lambda t, out, x: t * (2 * x * out - 2 / math.sqrt(math.pi)))
def erfcx(x):
    """The asymptotic series where the product of exp and erfc leaves float32."""
    large = x > 8
    y = jnp.where(large, x, 8)
    square = 1 / (y * y)
    series = 1 - square * (1 / 2 - square * (3 / 4 - square * (15 / 8 - square * 105 / 16)))
    near = jnp.where(large, 0, x)
    return jnp.where(large, series / y / math.sqrt(math.pi), jnp.exp(near * near) * jax.lax.erfc(near))


@lowers(aten.polygamma.default)
def polygamma(n, x):
    """JAX's own is another function where `n` is zero; of numbers below -7 it is wrong, and nan here."""
    x = widened(x)
    return jnp.where(x < -7, jnp.nan, jax.lax.polygamma(jnp.full_like(x, n), x)) if n else jax.lax.digamma(x)


@lowers(aten.digamma.default)
@of_widened
@with_derivatives(lambda t, out, x: t * jnp.where(x == jnp.inf, 0, polygamma(1, x)))
def digamma(x):
    return jax.lax.digamma(x)


@lowers(aten.lgamma.default)
@of_widened
@with_derivatives(lambda t, out, x: t * digamma(x))
def lgamma(x):
    return jax.lax.lgamma(x)


@lowers(aten.i0.default)
@of_widened
@with_derivatives(lambda t, out, x: t * jax.scipy.special.i1(x))
def bessel_i0(x):
    return jax.scipy.special.i0(x)


def _quantized(x, scale, zero_point, low: int, high: int) -> tuple[jax.Array, jax.Array]:
    """The values, and where they were not clipped: there the gradient passes as it is."""
    steps = jnp.round(x * (1 / jnp.asarray(scale, jnp.float32)).astype(x.dtype)) + zero_point
    inside = (steps >= low) & (steps <= high)
    values = (jnp.clip(steps, low, high) - zero_point) * scale
    return regraft(values.astype(x.dtype), jnp.where(inside, x, 0)), inside


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize(x, scale, zero_point, low, high):
    return _quantized(x, scale, zero_point, low, high)


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_by_tensors(x, scale, zero_point, enabled, low, high):
    scale, zero_point = jax.lax.stop_gradient(scale).reshape(()), zero_point.reshape(())
    values, inside = _quantized(x, scale, zero_point, low, high)
    on = enabled.reshape(()) > 0
    return jnp.where(on, values, x), inside | ~on


@lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_by_channel(x, scale, zero_point, axis, low, high):
    shape = [-1 if d == axis % x.ndim else 1 for d in range(x.ndim)]
    return _quantized(x, jax.lax.stop_gradient(scale).reshape(shape), zero_point.reshape(shape), low, high)


def _meta(x: torch.Tensor, *_settings) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


for op in (
    aten.fake_quantize_per_tensor_affine_cachemask.default,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
    aten.fake_quantize_per_channel_affine_cachemask.default,
):
    METAS[op] = _meta
