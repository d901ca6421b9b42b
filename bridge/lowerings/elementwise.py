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
from bridge.lowerings.derivatives import Derivative, with_derivatives
from bridge.lowerings.registry import LOWERINGS, METAS, decomposes, inlined, lowers, of_widened, widened
from bridge.tensor.tensor import regraft

aten = torch.ops.aten


def differentiated(function: Callable[..., jax.Array], *derivatives: Derivative) -> Callable[..., jax.Array]:
    return with_derivatives(*derivatives)(function)


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
    aten.i0.default: differentiated(jax.scipy.special.i0, lambda t, out, x: t * jax.scipy.special.i1(x)),
    aten.rsqrt.default: differentiated(jax.lax.rsqrt, lambda t, out, x: t * (-0.5 * out**3)),
    aten.special_entr.default: differentiated(jax.scipy.special.entr, lambda t, out, x: t * -(1 + jnp.log(x))),
    aten.lgamma.default: differentiated(jax.lax.lgamma, lambda t, out, x: t * digamma(x)),
    aten.hardsigmoid.default: differentiated(
        lambda x: jnp.clip(x + 3, 0, 6) / 6, lambda t, out, x: t * jnp.where((x > -3) & (x < 3), 1 / 6, 0)
    ),
    aten.hardswish.default: differentiated(
        lambda x: x * jnp.clip(x + 3, 0, 6) / 6,
        lambda t, out, x: t * jnp.where(x <= -3, 0, jnp.where(x < 3, x / 3 + 0.5, 1)),
    ),
}.items():
    LOWERINGS[_op] = of_widened(_function)


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


@lowers(aten.elu.default)
def elu(x, alpha=1, scale=1, input_scale=1):
    """At zero the first derivative is that of negative numbers, and the second one is zero."""
    x = widened(x)
    below = alpha * jnp.expm1(jnp.where(x < 0, x, 0) * input_scale)
    return jnp.where(x < 0, below, jnp.where(x == 0, x * (alpha * input_scale), x)) * scale


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


@lowers(aten.polar.default)
def polar(size, direction):
    """A size of zero has no gradient."""
    size = jnp.where(size == 0, jax.lax.stop_gradient(size), size)
    return size * jax.lax.complex(jnp.cos(direction), jnp.sin(direction))


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


@lowers(aten.softshrink.default)
def softshrink(x, lambd=0.5):
    x = widened(x)
    return jnp.where((x >= -lambd) & (x <= lambd), 0, x - lambd * jnp.sign(x))


@lowers(aten.leaky_relu.default)
def leaky_relu(x, slope=0.01):
    return jnp.where(x > 0, x, widened(x) * slope)


@with_derivatives(lambda t, out, x: jnp.where((x < 0) | (x > 1), jnp.nan, t / (x * (1 - x))))
def _log_odds(x):
    return jnp.log(x / (1 - x))


@lowers(aten.logit.default)
def logit(x, eps=None):
    x = widened(x)
    return _log_odds(jnp.where(x < eps, eps, jnp.where(x > 1 - eps, 1 - eps, x)) if eps else x)


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


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize(x, scale, zero_point, low, high):
    """The values, and where they were not clipped: there the gradient passes as it is."""
    steps = jnp.round(x * (1 / jnp.asarray(scale, jnp.float32)).astype(x.dtype)) + zero_point
    inside = (steps >= low) & (steps <= high)
    values = (jnp.clip(steps, low, high) - zero_point) * scale
    return regraft(values.astype(x.dtype), jnp.where(inside, x, 0)), inside


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_by_tensors(x, scale, zero_point, enabled, low, high):
    values, inside = fake_quantize(x, scale.reshape(()), zero_point.reshape(()), low, high)
    on = enabled.reshape(()) > 0
    return jnp.where(on, values, x), inside | ~on


@lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_by_channel(x, scale, zero_point, axis, low, high):
    shape = [-1 if d == axis % x.ndim else 1 for d in range(x.ndim)]
    return fake_quantize(x, scale.reshape(shape), zero_point.reshape(shape), low, high)


METAS |= dict.fromkeys(
    (
        aten.fake_quantize_per_tensor_affine_cachemask.default,
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
        aten.fake_quantize_per_channel_affine_cachemask.default,
    ),
    lambda x, *_settings: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)),
)
