"""Functions of single elements, with PyTorch's gradient where the function has a corner, a boundary or a zero.

Inside in float32, whatever the dtype they are given; the dispatcher rounds to PyTorch's dtype.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from bridge.generators import generator_of
from bridge.inlining import inlined
from bridge.lowerings.custom_gradients import with_derivatives
from bridge.lowerings.registry import LOWERINGS, decomposes, lowers, widened

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


@jax.custom_jvp
def _complex_acosh(x):
    return jnp.arccosh(x)


@_complex_acosh.defjvp
def _complex_acosh_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return _complex_acosh(x), t * jax.lax.rsqrt(x - 1) * jax.lax.rsqrt(x + 1)


@lowers(aten.acosh.default)
def acosh(x):
    """That of `jnp.arccosh` has the derivative of the other branch left of the imaginary axis."""
    return _complex_acosh(x) if jnp.iscomplexobj(x) else jnp.arccosh(widened(x))


@lowers(aten.frexp.Tensor)
def frexp(x):
    """Of infinities and nan the exponent is zero."""
    exponent = jnp.frexp(jax.lax.stop_gradient(x))[1]
    return jnp.ldexp(x, -exponent), exponent


@lowers(aten.nan_to_num.default)
def nan_to_num(x, nan=None, posinf=None, neginf=None):
    """What is replaced has no gradient; of a complex number each part is replaced by itself."""
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


@with_derivatives(lambda t, out, x: t * jnp.where((x > -3) & (x < 3), 1 / 6, 0))
def _hardsigmoid(x):
    return jnp.clip(x + 3, 0, 6) / 6


@lowers(aten.hardsigmoid.default)
def hardsigmoid(x):
    return _hardsigmoid(widened(x))


@with_derivatives(
    lambda t, out, x, lambd: jnp.where((x >= -lambd) & (x <= lambd), 0, t), lambda t, out, x, lambd: jnp.zeros_like(t)
)
def _softshrink(x, lambd):
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


@lowers(aten.softshrink.default)
def softshrink(x, lambd=0.5):
    return _softshrink(widened(x), lambd)


@with_derivatives(lambda t, out, x: t * jnp.where(x <= -3, 0, jnp.where(x < 3, x / 3 + 0.5, 1)))
def _hardswish(x):
    return x * jnp.clip(x + 3, 0, 6) / 6


@lowers(aten.hardswish.default)
def hardswish(x):
    return _hardswish(widened(x))


@with_derivatives(lambda t, out, x: t * -(1 + jnp.log(x)))
def _entropy(x):
    return jax.scipy.special.entr(x)


@lowers(aten.special_entr.default)
def entropy(x):
    return _entropy(widened(x))


@lowers(aten.leaky_relu.default)
def leaky_relu(x, slope=0.01):
    return jnp.where(x > 0, x, widened(x) * slope)


@with_derivatives(lambda t, out, x: t * (-0.5 * out**3))
def _rsqrt(x):
    return jax.lax.rsqrt(x)


@lowers(aten.rsqrt.default)
def rsqrt(x):
    return _rsqrt(widened(x))


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
