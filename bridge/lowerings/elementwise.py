"""Functions of single elements, with PyTorch's gradient where the function has a corner, a boundary or a zero.

Inside in float32, whatever the dtype they are given; the dispatcher rounds to PyTorch's dtype.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import LOWERINGS, decomposes, lowers, widened
from bridge.tensors import regraft

aten = torch.ops.aten


def _inside_float32(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def lowering(x):
        return function(widened(x))

    return lowering


for _op, _function in {
    aten.sigmoid.default: jax.lax.logistic,
    aten.rsqrt.default: jax.lax.rsqrt,
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
def gelu(x, *, approximate="none"):
    return jax.nn.gelu(widened(x), approximate=approximate == "tanh")


@lowers(aten.glu.default)
def glu(x, dim=-1):
    value, gate = jnp.split(widened(x), 2, dim)
    return value * jax.lax.logistic(gate)


@lowers(aten.abs.default)
def absolute(x):
    """Its gradient at zero is zero, as PyTorch's; that of `jnp.abs` is one."""
    return jnp.where(x == 0, 0, jnp.abs(x)).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.abs(x)


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


@lowers(aten.mish.default)
def mish(x):
    x = widened(x)
    return x * jnp.tanh(softplus(x))


@lowers(aten.elu.default)
def elu(x, alpha=1, scale=1, input_scale=1):
    x = widened(x)
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale)) * scale


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
    """PyTorch's gradient takes the size for what it says, and is turned round for a negative one."""
    size, direction = jnp.broadcast_arrays(size, direction)
    unit = jax.lax.complex(jnp.cos(direction), jnp.sin(direction))
    held_size, held_unit = jax.lax.stop_gradient(size), jax.lax.stop_gradient(unit)
    return regraft(held_size * held_unit, held_size * unit + size * (jnp.sign(held_size) * held_unit))


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(x, low=None, high=None):
    """On a boundary the whole gradient is that of `x`; JAX's `maximum` splits it."""
    if low is None or high is None:
        return clamp_min(x, low) if high is None else clamp_max(x, high)
    low, high = jnp.asarray(low), jnp.asarray(high)
    outside = jnp.where((x < low) & (low < high), low, high)
    return jnp.where((x < low) | (x > high), outside, x)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(x, low):
    return jnp.where(x < low, low, x)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(x, high):
    return jnp.where(x > high, high, x)


@lowers(aten.hardtanh.default)
def hardtanh(x, low=-1, high=1):
    """Unlike `clamp`, it has no gradient on its boundaries."""
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


@lowers(aten.hardsigmoid.default)
def hardsigmoid(x):
    x = widened(x)
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, x / 6 + 0.5))


@lowers(aten.hardswish.default)
def hardswish(x):
    x = widened(x)
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, x * (x / 6 + 0.5)))


@lowers(aten.leaky_relu.default)
def leaky_relu(x, slope=0.01):
    return jnp.where(x > 0, x, x * slope)


@lowers(aten.fmax.default)
def fmax(x, y):
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


@lowers(aten.fmin.default)
def fmin(x, y):
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


@jax.custom_jvp
def _power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    return x**exponent


@_power.defjvp
def _power_jvp(primals, tangents):
    """Zero where the formula says 0 * inf: for exponent 0, and for base 0."""
    (x, e), (dx, de) = primals, tangents
    out = x**e
    by_base = jnp.where(e == 0, 0, e * x ** jnp.where(e == 0, 1, e - 1))
    by_exponent = jnp.where((x == 0) & (e >= 0), 0, out * jnp.log(jnp.where(x == 0, 1, x)))
    return out, dx * by_base + de * by_exponent


@lowers(aten.pow.Tensor_Tensor)
def power(x, exponent):
    if not jnp.issubdtype(jnp.result_type(x, exponent), jnp.floating):
        return x**exponent
    x, exponent = jnp.broadcast_arrays(widened(x), widened(exponent))
    return _power(x, exponent)


@lowers(aten.pow.Tensor_Scalar)
def power_of_number(x, exponent):
    floating = jnp.issubdtype(x.dtype, jnp.inexact)
    x = widened(x) if floating or isinstance(exponent, float) else x.astype(jnp.promote_types(x.dtype, jnp.int8))
    if exponent == 0:
        return jnp.ones_like(x)
    if float(exponent).is_integer() and (floating or exponent > 0):
        return jax.lax.integer_pow(x, int(exponent))
    return x**exponent


@jax.custom_jvp
def _xlogy(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.scipy.special.xlogy(x, y)


@_xlogy.defjvp
def _xlogy_jvp(primals, tangents):
    """At (0, 0) the gradient of `x` is zero and that of `y` NaN, as PyTorch's."""
    (x, y), (dx, dy) = primals, tangents
    return _xlogy(x, y), dx * jnp.where((x == 0) & (y <= 0), 0, jnp.log(y)) + dy * (x / y)


@lowers(aten.xlogy.Tensor)
def xlogy(x, y):
    return _xlogy(*jnp.broadcast_arrays(widened(x), widened(y)))


@decomposes(aten.embedding_renorm_.default)
def embedding_renorm(weight, indices, max_norm, norm_type):
    """Rows that are looked up and longer than `max_norm` are shortened in place."""
    norms = torch.linalg.vector_norm(weight, norm_type, 1, keepdim=True)
    used = torch.zeros(weight.shape[0], dtype=torch.int32).index_fill(0, indices.reshape(-1), 1).unsqueeze(1)
    return weight.mul_(torch.where((used > 0) & (norms > max_norm), max_norm / (norms + 1e-7), 1.0))
