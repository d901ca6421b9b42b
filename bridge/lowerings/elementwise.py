"""Functions of elements, with PyTorch's gradient at corners, boundaries, ties, zeros and nan.

Most compute in float32, whatever the dtype of their arguments; the dispatcher rounds to PyTorch's dtype. The given
derivatives are PyTorch's formulas; where one of these gives 0 * inf or shares a tie, so does the other.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._compat.torch import ROUNDS_THRESHOLDS, TIES_ARE_SHARED
from bridge._compat.torchax import torchax_lowering
from bridge.context import CURRENT, refusal
from bridge.lowerings.derivatives import Derivative, converted, with_derivatives
from bridge.lowerings.registry import (
    LOWERINGS,
    METAS,
    decomposes,
    inlined,
    is_known,
    is_number,
    lowers,
    of_widened,
    widened,
)
from bridge.lowerings.residual import sum_of
from bridge.tensor.tensor import regraft

aten = torch.ops.aten


@lowers(aten.gelu.default)
@inlined
def gelu(x, *, approximate="none"):
    return jax.nn.gelu(widened(x), approximate=approximate == "tanh")


@lowers(aten.glu.default)
@inlined
def glu(x, dim=-1):
    value, gate = jnp.split(widened(x), 2, dim)
    return value * jax.lax.logistic(gate)


@lowers(aten.abs.default)
@with_derivatives(lambda t, out, x: t * sign(x))
def absolute(x):
    """Its gradient at zero is zero, as in PyTorch; that of `jnp.abs` is one."""
    return jnp.abs(x)


@lowers(aten.softplus.default)
def softplus(x, beta=1, threshold=20):
    """Numbers above the threshold are replaced before the exponential, whose gradient would overflow."""
    x = widened(x)
    large = x * beta > threshold
    return jnp.where(large, x, jnp.log1p(jnp.exp(jnp.where(large, 0, x * beta))) / beta)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid(x):
    """Zero counts as positive throughout: derivatives of `abs` and `minimum` would make the second one zero there.

    PyTorch's second result is memory for its backward.
    """
    x = widened(x)
    decayed = jnp.exp(-jnp.where(x < 0, -x, x))
    return jnp.where(x < 0, x, 0) - jnp.log1p(decayed), decayed


@lowers(aten.elu.default)
def elu(x, alpha=1, scale=1, input_scale=1):
    """At zero the first derivative is that of negative numbers, and the second one is zero, as in PyTorch."""
    x = widened(x)
    below = alpha * jnp.expm1(jnp.where(x < 0, x, 0) * input_scale)
    return jnp.where(x < 0, below, jnp.where(x == 0, x * (alpha * input_scale), x)) * scale


lowers(aten.celu.default)(lambda x, alpha=1.0: elu(x, alpha, 1, 1 / alpha))
lowers(aten.leaky_relu.default)(lambda x, slope=0.01: jnp.where(x > 0, x, widened(x) * slope))
# The gradient on a boundary is zero, unlike that of `clamp`.
lowers(aten.hardtanh.default)(lambda x, low=-1, high=1: jnp.where(x <= low, low, jnp.where(x >= high, high, x)))


@lowers(aten.sign.default, aten.sgn.default)
def sign(x):
    """A complex number has the gradient of `x / abs(x)`; that of `jnp.sign` is zero."""
    if jnp.iscomplexobj(x):
        other = jnp.where(x == 0, 1, x)
        return jnp.where(x == 0, 0, other / jnp.abs(other))
    if x.dtype == bool:
        return x
    return jnp.where(x != x, 0, jnp.sign(x)).astype(x.dtype)  # for nan it is zero


@lowers(aten.angle.default)
def angle(x):
    if not jnp.iscomplexobj(x):
        x = jax.lax.stop_gradient(widened(x))
        return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0))
    x = jnp.where(x == 0, jax.lax.stop_gradient(x), x)
    return jnp.arctan2(jnp.imag(x), jnp.real(x))


@lowers(aten.polar.default)
def polar(size, direction):
    """The gradient of a size of zero is zero, as in PyTorch."""
    size = jnp.where(size == 0, jax.lax.stop_gradient(size), size)
    return size * jax.lax.complex(jnp.cos(direction), jnp.sin(direction))


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


@lowers(aten.softshrink.default)
def softshrink(x, lambd=0.5):
    if ROUNDS_THRESHOLDS:
        lambd = widened(jnp.asarray(lambd, x.dtype))
    x = widened(x)
    return jnp.where((x >= -lambd) & (x <= lambd), 0, x - lambd * jnp.sign(x))


@with_derivatives(lambda t, out, x: t * jnp.where((x < 0) | (x > 1), jnp.nan, 1 / (x * (1 - x))))
def _log_odds(x):
    return jnp.log(x / (1 - x))


@lowers(aten.logit.default)
def logit(x, eps=None):
    x = widened(x)
    return _log_odds(jnp.where(x < eps, eps, jnp.where(x > 1 - eps, 1 - eps, x)) if eps else x)


for _name in (
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "hermite_polynomial_h", "hermite_polynomial_he",
    "laguerre_polynomial_l",
):  # fmt: skip
    _op = getattr(aten, f"special_{_name}")
    # torchax accepts no Python number as the degree.
    decomposes(_op.n_scalar)(lambda x, n, of=_op.default: of(x, torch.full((), n, dtype=x.dtype)))


@decomposes(aten.native_dropout.default)
def native_dropout(x, p, train):
    """Returns the result and a mask of the elements that were kept."""
    if train is None:
        raise NotImplementedError("PyTorch's gradient of it is not that of its result for train=None; pass True")
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


@decomposes(aten.rrelu_with_noise.default)
def rrelu(x, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    """Turns `noise` into the slopes, which are 1 where `x` is positive."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    if generator is not None or (CURRENT.call is not None and getattr(CURRENT.generator, "seeded", False)):
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
    """Shortens, in place, rows that are looked up and longer than `max_norm`."""
    norms = torch.linalg.vector_norm(weight, norm_type, 1, keepdim=True)
    used = torch.zeros(weight.shape[0], dtype=torch.int32).index_fill(0, indices.reshape(-1), 1).unsqueeze(1)
    return weight.mul_(torch.where((used > 0) & (norms > max_norm), max_norm / (norms + 1e-7), 1.0))


@with_derivatives(lambda t, out, x: t * (2 * x * out - 2 / math.sqrt(math.pi)))
def _scaled_erfc(x):
    return jnp.exp(x * x) * jax.lax.erfc(x)


@lowers(aten.special_erfcx.default)
@of_widened
def erfcx(x):
    """Returns the asymptotic series where the product of exp and erfc leaves float32.

    The series has its own derivatives: those of the product are differences of numbers that are almost equal there.
    """
    large = x > 8
    y = jnp.where(large, x, 8)
    square = 1 / (y * y)
    series = 1 - square * (1 / 2 - square * (3 / 4 - square * (15 / 8 - square * 105 / 16)))
    return jnp.where(large, series / y / math.sqrt(math.pi), _scaled_erfc(jnp.where(large, 0, x)))


@lowers(aten.special_log_ndtr.default)
@of_widened
def log_ndtr(x):
    """PyTorch's formula: derivatives of JAX's own function are quotients of rounded numbers far below zero."""
    below = x < -1
    y = x * math.sqrt(0.5)
    far = jnp.where(below, -y, 1)
    near = jnp.where(below, 0, y)
    return jnp.where(below, jnp.log(erfcx(far) / 2) - far * far, jnp.log1p(-jax.lax.erfc(near) / 2))


@with_derivatives(lambda t, out, x: t * i1(x))
def i0(x):
    return jax.scipy.special.i0(x)


def _slope_of_i1(t: jax.Array, out: jax.Array, x: jax.Array) -> jax.Array:
    """Is a constant near zero, as in PyTorch, and for nan."""
    far = jnp.abs(x) > jnp.finfo(x.dtype).eps
    y = jnp.where(far, x, 1)
    return t * jnp.where(far, i0(y) - out / y, 0.5)


@with_derivatives(_slope_of_i1)
def i1(x):
    return jax.scipy.special.i1(x)


@lowers(aten.polygamma.default)
def polygamma(n, x):
    """`jax.lax.polygamma` is another function for `n` = 0, and wrong for numbers below -7.

    Below -7 the function for `n` = 1 is reflected, as in PyTorch, and the others return nan.
    """
    x = widened(x)
    if n == 1:
        far = jnp.where(x < -7, x, 0.5)  # is finite in the branch that is not taken, whose gradient would be nan
        near = jax.lax.polygamma(jnp.ones_like(x), jnp.where(x < -7, 1 - x, x))
        return jnp.where(x < -7, jnp.square(jnp.pi / jnp.sin(jnp.pi * (far - jnp.round(far)))) - near, near)
    if n:
        return jnp.where(x < -7, jnp.nan, jax.lax.polygamma(jnp.full_like(x, n), x))
    return jax.lax.digamma(x)


def differentiated(function: Callable[..., jax.Array], *derivatives: Derivative) -> Callable[..., jax.Array]:
    return with_derivatives(*derivatives)(function)


real_acosh = differentiated(jnp.arccosh, lambda t, out, x: t * jax.lax.rsqrt(x * x - 1))
"""Has PyTorch's derivative also below -1, where the value is nan; since JAX 0.12 that of `jnp.arccosh` is nan there."""

_IN_FLOAT32: dict[Any, Callable[..., jax.Array]] = {
    aten.sigmoid.default: jax.lax.logistic,
    aten.erf.default: jax.lax.erf,
    aten.erfc.default: jax.lax.erfc,
    aten.erfinv.default: jax.lax.erf_inv,
    aten.silu.default: lambda x: x * jax.lax.logistic(x),
    aten.tanh.default: jnp.tanh,
    aten.sinc.default: jnp.sinc,
    aten.mish.default: lambda x: x * jnp.tanh(softplus(x)),
    aten.exp2.default: jnp.exp2,
    aten.i0.default: i0,
    aten.special_i1.default: i1,
    aten.special_modified_bessel_i1.default: i1,
    # `jnp.arccosh` has the derivative of the other branch left of the imaginary axis.
    aten.acosh.default: lambda x: (
        jnp.log(x + jnp.sqrt(x - 1) * jnp.sqrt(x + 1)) if jnp.iscomplexobj(x) else real_acosh(x)
    ),
    aten.rsqrt.default: differentiated(jax.lax.rsqrt, lambda t, out, x: t * (-0.5 * out**3)),
    aten.special_entr.default: differentiated(jax.scipy.special.entr, lambda t, out, x: t * -(1 + jnp.log(x))),
    aten.lgamma.default: differentiated(jax.lax.lgamma, lambda t, out, x: t * jax.lax.digamma(x)),
    aten.digamma.default: differentiated(
        jax.lax.digamma, lambda t, out, x: t * jnp.where(x == jnp.inf, 0, polygamma(1, x))
    ),
    aten.hardsigmoid.default: differentiated(
        lambda x: jnp.clip(x + 3, 0, 6) / 6, lambda t, out, x: t * jnp.where((x > -3) & (x < 3), 1 / 6, 0)
    ),
    aten.hardswish.default: differentiated(
        lambda x: x * jnp.clip(x + 3, 0, 6) / 6,
        lambda t, out, x: t * jnp.where(x <= -3, 0, jnp.where(x < 3, x / 3 + 0.5, 1)),
    ),
}
LOWERINGS |= {op: of_widened(function) for op, function in _IN_FLOAT32.items()}


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize(x, scale, zero_point, low, high):
    """Returns the values, and a mask of those not clipped: there the gradient passes unchanged."""
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


_LEAST_SCALE = 6.1e-5


@decomposes(aten._fused_moving_avg_obs_fq_helper.default)
def observed_fake_quantize(
    x, observes, quantizes, low, high, scale, zero_point, rate, qmin, qmax, axis, by_channel=False, symmetric=False
):
    """Follows the extremes of `x`, chooses scale and zero point by them, and quantizes."""
    if not low.numel():
        what = "an observer by channels gets the size of its buffers in its first call"
        raise refusal(what, "call the module once before export")
    if by_channel:
        rows = x.detach().transpose(0, axis).flatten(1)
    else:
        rows = x.detach().reshape(1, -1)
    for running, now in ((low, rows.amin(1)), (high, rows.amax(1))):
        now = now.reshape(running.shape)
        moved = torch.where(running.isinf(), now, running + rate * (now - running))
        running.copy_(torch.where(observes != 0, moved, running).reshape(running.shape))
    least = low.reshape(scale.shape)
    most = high.reshape(scale.shape)
    if symmetric:
        middle = (least < 0) & (most > 0)
    else:
        middle = torch.zeros_like(least, dtype=torch.bool)
    half = (qmax - qmin) // 2
    step = torch.maximum(-least / (half + 1), most / half)
    least = torch.where(middle, -step * (half + 1), least)
    most = torch.where(middle, step * half, most)
    least = least.clamp(max=0)
    most = most.clamp(min=0)
    chosen = (most - least) / (qmax - qmin)
    chosen = torch.where(chosen == 0, 0.1, chosen)
    offset = torch.where(middle, (qmin + qmax) / 2, qmin - least / chosen)
    scale.copy_(torch.where(quantizes != 0, chosen.clamp(min=_LEAST_SCALE), scale))
    zero_point.copy_(torch.where(quantizes != 0, offset.round().clamp(qmin, qmax).to(torch.int32), zero_point))
    if by_channel:
        out, inside = aten.fake_quantize_per_channel_affine_cachemask(x, scale, zero_point, axis, qmin, qmax)
        return torch.where(quantizes != 0, out, x), inside | (quantizes == 0)
    on = quantizes.to(torch.int64)
    return aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, scale, zero_point, on, qmin, qmax)


METAS |= dict.fromkeys(
    (
        aten.fake_quantize_per_tensor_affine_cachemask.default,
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
        aten.fake_quantize_per_channel_affine_cachemask.default,
    ),
    lambda x, *_settings: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)),
)


# ---- Arithmetic, and other functions of several elements


@lowers(aten.add.Tensor, aten.add.Scalar)
@inlined
def add(x, y, alpha=1):
    if is_known(alpha, 1):
        return sum_of(x, y)
    return _scaled_sum(x, y, alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
@inlined
def subtract(x, y, alpha=1):
    if is_known(alpha, 1):
        return x - y
    return _scaled_sum(x, y, -alpha)


def _scaled_sum(x, y, alpha):
    """Returns `x + alpha * y`, with the product in the dtype of the sum, or in float32 if that is narrower."""
    dtype = jnp.result_type(x, y)
    x, y, alpha = (converted(a, dtype) for a in (x, y, alpha))  # PyTorch rounds numbers first, too
    if jnp.issubdtype(dtype, jnp.inexact):
        x = widened(x)
        y = widened(y)
        alpha = widened(jnp.asarray(alpha))
    return x + alpha * y


@lowers(aten.mul.Tensor, aten.mul.Scalar)
@inlined
def multiply(x, y):
    x, y = wide_beside_numbers(x, y)
    return x * y


def wide_beside_numbers(x: Any, y: Any) -> tuple[Any, Any]:
    """Returns an array beside a Python number in float32: PyTorch does not round the number to a narrow dtype first."""
    if is_number(x) or is_number(y):
        return (_wide_if_floating(x), _wide_if_floating(y))
    return (x, y)


def _wide_if_floating(x: Any) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact):
        return widened(x)
    return x


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(x, low=None, high=None):
    """The gradient on a boundary depends on PyTorch's release, see `TIES_ARE_SHARED`; beside numbers nan has none."""
    if low is None or high is None:
        if high is None:
            return clamp_min(x, low)
        return clamp_max(x, high)
    if not TIES_ARE_SHARED:
        return _clamped(x, low, high)
    if not is_number(low) or not is_number(high):
        return _clamped_at_shared_ties(x, low, high)
    return clamp_max(clamp_min(x, low), high)


def _within(x, low, high):
    return jnp.minimum(jnp.maximum(x, low), high)


_clamped = with_derivatives(
    lambda t, out, x, low, high: jnp.where((x >= low) & (x <= high), t, 0),
    lambda t, out, x, low, high: jnp.where((x < low) & (low < high), t, 0),
    lambda t, out, x, low, high: jnp.where((x > high) | (low > high), t, 0),
)(_within)


def _shared(t, x, bound, low, high):
    """Returns half of the gradient where `x` is on the bound, and zero elsewhere."""
    return jnp.where((low < high) & (x == bound), t / 2, 0)


_clamped_at_shared_ties = with_derivatives(
    lambda t, out, x, low, high: jnp.where(
        (x < low) | (x > high), 0, jnp.where((low < high) & ((x == low) | (x == high)), t / 2, t)
    ),
    lambda t, out, x, low, high: jnp.where((low <= high) & (x < low), t, _shared(t, x, low, low, high)),
    lambda t, out, x, low, high: jnp.where(
        (low > high) | ((low <= high) & (x > high)), t, _shared(t, x, high, low, high)
    ),
)(_within)

_at_least = with_derivatives(
    lambda t, out, x, low: jnp.where(x >= low, t, 0), lambda t, out, x, low: jnp.where(x < low, t, 0)
)(jnp.maximum)
_above = with_derivatives(lambda t, out, x, low: jnp.where(x > low, t, 0), lambda t, out, x, low: jnp.zeros_like(t))(
    jnp.maximum
)
_at_most = with_derivatives(
    lambda t, out, x, high: jnp.where(x <= high, t, 0), lambda t, out, x, high: jnp.where(x > high, t, 0)
)(jnp.minimum)
_below = with_derivatives(lambda t, out, x, high: jnp.where(x < high, t, 0), lambda t, out, x, high: jnp.zeros_like(t))(
    jnp.minimum
)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(x, low):
    if not TIES_ARE_SHARED:
        return _at_least(x, low)
    return _above(x, low) if is_number(low) else LOWERINGS[aten.maximum.default](x, low)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(x, high):
    if not TIES_ARE_SHARED:
        return _at_most(x, high)
    return _below(x, high) if is_number(high) else LOWERINGS[aten.minimum.default](x, high)


def _shifted_meta(op):
    """PyTorch's meta device refuses bools, which its kernels shift in the dtype of the result."""
    return lambda *both: op(*(v.to(torch.result_type(*both)) if isinstance(v, torch.Tensor) else v for v in both))


for _packet in (aten.__lshift__, aten.__rshift__, aten.bitwise_left_shift, aten.bitwise_right_shift):
    for _overload in {"Scalar", "Tensor", "Tensor_Scalar", "Scalar_Tensor"} & set(_packet.overloads()):
        METAS[getattr(_packet, _overload)] = _shifted_meta(getattr(_packet, _overload))


def _fmax(x, y):
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


def _fmin(x, y):
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


def _shared_at_ties(chosen: Callable[[Any, Any], jax.Array]) -> tuple[Derivative, Derivative]:
    """Returns the derivatives of a choice between two arrays; `chosen(x, y)` is True where `x` is taken, and no tie."""
    return (
        lambda t, out, x, y: jnp.where(x == y, t / 2, jnp.where(chosen(x, y) | jnp.isnan(y), t, 0)),
        lambda t, out, x, y: jnp.where(x == y, t / 2, jnp.where(chosen(x, y) | jnp.isnan(y), 0, t)),
    )


for _op, _function, _chosen in ((aten.fmax.default, _fmax, jnp.greater), (aten.fmin.default, _fmin, jnp.less)):
    lowers(_op)(with_derivatives(*_shared_at_ties(_chosen))(_function) if TIES_ARE_SHARED else _function)
# Integers stay integers: as floats, those beyond 2**24 would lose their last digits.
lowers(aten.fmod.Tensor, aten.fmod.Scalar)(jnp.fmod)
# A sum would lose the sign of an imaginary zero, which decides the side of a branch cut.
lowers(aten.complex.default)(lambda real, imag: jax.lax.complex(*jnp.broadcast_arrays(real, imag)))

for _ops, (_function, *_derivatives) in {
    (aten.relu.default,): (
        lambda x: jnp.maximum(x, 0),
        lambda t, out, x: jnp.where(out <= 0, 0, t),  # nan is treated as a positive number
    ),
    (aten.maximum.default,): (
        jnp.maximum,
        lambda t, out, x, y: jnp.where(x < y, 0, jnp.where(x == y, t / 2, t)),
        lambda t, out, x, y: jnp.where(x > y, 0, jnp.where(x == y, t / 2, t)),
    ),
    (aten.minimum.default,): (
        jnp.minimum,
        lambda t, out, x, y: jnp.where(x > y, 0, jnp.where(x == y, t / 2, t)),
        lambda t, out, x, y: jnp.where(x < y, 0, jnp.where(x == y, t / 2, t)),
    ),
    (aten.nextafter.default,): (
        jnp.nextafter,
        lambda t, out, x, y: jnp.where(x != y, t, 0),
        lambda t, out, x, y: jnp.zeros_like(t),
    ),
    (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor): (
        jnp.remainder,
        lambda t, out, x, y: t,
        lambda t, out, x, y: -t * jnp.floor_divide(x, y),
    ),
    (aten._prelu_kernel.default,): (
        lambda x, weight: jnp.where(x > 0, x, weight * x),
        lambda t, out, x, weight: t * jnp.where(x > 0, 1, weight),
        lambda t, out, x, weight: t * jnp.where(x > 0, 0, x),
    ),
}.items():
    lowers(*_ops)(with_derivatives(*_derivatives)(_function))


def _bessel(op: Any, x: jax.Array) -> jax.Array:
    lowering = torchax_lowering(op)
    if lowering is None:
        raise NotImplementedError(f"torchax has no {op.name()}")
    return lowering(x)


_j0 = functools.partial(_bessel, aten.special_bessel_j0.default)
_j1 = functools.partial(_bessel, aten.special_bessel_j1.default)
_y0 = functools.partial(_bessel, aten.special_bessel_y0.default)
_y1 = functools.partial(_bessel, aten.special_bessel_y1.default)

# PyTorch has derivatives of these functions since 2.15. Those of torchax's approximations are off by 1e-2 to 1e-3.
for _op, _function, _derivative in (
    (aten.special_bessel_j0.default, _j0, lambda t, out, x: -t * _j1(x)),
    (
        aten.special_bessel_j1.default,
        _j1,
        lambda t, out, x: t * jnp.where(x == 0, 0.5, _j0(x) - out / jnp.where(x == 0, 1, x)),
    ),
    (aten.special_bessel_y0.default, _y0, lambda t, out, x: -t * _y1(x)),
    (aten.special_bessel_y1.default, _y1, lambda t, out, x: t * (_y0(x) - out / x)),
):
    lowers(_op)(with_derivatives(_derivative)(_function))


for _ops, (_function, *_derivatives) in {
    (aten.logaddexp.default,): (
        jnp.logaddexp,
        lambda t, out, x, y: t / (1 + jnp.exp(y - x)),
        lambda t, out, x, y: t / (1 + jnp.exp(x - y)),
    ),
    (aten.logaddexp2.default,): (
        jnp.logaddexp2,
        lambda t, out, x, y: t / (1 + jnp.exp2(y - x)),
        lambda t, out, x, y: t / (1 + jnp.exp2(x - y)),
    ),
    (aten.hypot.default,): (
        jnp.hypot,
        lambda t, out, x, y: t * (x / out),
        lambda t, out, x, y: t * (y / out),
    ),
    (aten.atan2.default,): (
        jnp.arctan2,
        lambda t, out, x, y: t * jnp.where((x == 0) & (y == 0), 0, y * (1 / (x * x + y * y))),
        lambda t, out, x, y: t * jnp.where((x == 0) & (y == 0), 0, -x * (1 / (x * x + y * y))),
    ),
    (aten.copysign.Tensor, aten.copysign.Scalar): (
        jnp.copysign,
        lambda t, out, x, y: t * jnp.where(x == 0, 0, out / x),
        lambda t, out, x, y: jnp.zeros_like(t),
    ),
    (aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other): (
        jax.scipy.special.xlogy,
        lambda t, out, x, y: t * jnp.where((x == 0) & (y <= 0), 0, jnp.log(y)),
        lambda t, out, x, y: t * (x / y),
    ),
    (aten.special_xlog1py.default, aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar): (
        lambda x, y: jnp.where(jnp.isnan(y), y, jnp.where(x == 0, 0, x * jnp.log1p(y))),
        lambda t, out, x, y: t * jnp.where((x == 0) & (y <= -1), 0, jnp.log1p(y)),
        lambda t, out, x, y: t * (x / (y + 1)),
    ),
}.items():
    lowers(*_ops)(of_widened(with_derivatives(*_derivatives)(_function)))


@with_derivatives(lambda t, out, x, y: t / y, lambda t, out, x, y: -(t * out) / y)
def _quotient(x, y):
    return x / y


@lowers(aten.div.Tensor)
@inlined
def divide(x, y):
    """JAX's derivative has the square of a divisor, which overflows long before the quotient does."""
    traced = isinstance(y, jax.Array) and jnp.issubdtype(jnp.result_type(x, y), jnp.floating)
    if traced:
        return _quotient(_wide_if_floating(x) if is_number(y) else x, y)
    return jnp.true_divide(*wide_beside_numbers(x, y))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide_and_round(x, y, *, rounding_mode=None):
    """Quotients of integers are exact: a float32 quotient differs from 2**24 on."""
    if rounding_mode is None:
        return divide(x, y)
    if jnp.issubdtype(jnp.result_type(x, y), jnp.inexact):
        x, y = wide_beside_numbers(x, y)
        if rounding_mode == "trunc":
            return jnp.trunc(x / y)
        return jnp.floor_divide(x, y)
    dtype = jnp.promote_types(jnp.result_type(x, y), jnp.uint8)
    x, y = jnp.broadcast_arrays(converted(x, dtype), converted(y, dtype))
    if rounding_mode == "trunc":
        return jax.lax.div(x, y)
    return jnp.floor_divide(x, y)


lowers(aten.floor_divide.default, aten.floor_divide.Scalar)(functools.partial(divide_and_round, rounding_mode="floor"))


@with_derivatives(
    lambda t, out, x, e: t * jnp.where(e == 0, 0, e * x ** (e - 1)),
    lambda t, out, x, e: t * jnp.where((x == 0) & (e >= 0), 0, out * jnp.log(x)),
)
def _power(x, e):
    return x**e


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(x, exponent):
    dtype = jnp.result_type(x, exponent)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return _integer_power(converted(x, dtype), converted(exponent, dtype))
    if not jnp.issubdtype(dtype, jnp.floating):
        return x**exponent
    return _power(widened(jnp.asarray(x)), widened(jnp.asarray(exponent)))


def _integer_power(x, exponent):
    """A negative exponent gives 0, except for the bases 1 and -1."""
    inverse = jnp.where(jnp.abs(x) == 1, jnp.where(exponent % 2 == 0, 1, x), 0)
    return jnp.where(exponent < 0, inverse, x ** jnp.maximum(exponent, 0))


@lowers(aten.pow.Tensor_Scalar)
@inlined
def power_of_number(x, exponent):
    if isinstance(exponent, jax.Array):
        return power(x, exponent)
    if isinstance(exponent, complex):
        return _power(x.astype(jnp.promote_types(x.dtype, jnp.complex64)), jnp.asarray(exponent))
    floating = jnp.issubdtype(x.dtype, jnp.inexact)
    if floating or isinstance(exponent, float):
        x = widened(x)
    else:
        x = x.astype(jnp.promote_types(x.dtype, jnp.int8))
    if exponent == 0:
        return jnp.ones_like(x)
    if float(exponent).is_integer() and (floating or exponent > 0):
        return jax.lax.integer_pow(x, int(exponent))
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _fractional_power(x, exponent)
    return x**exponent


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _fractional_power(x: jax.Array, exponent: float) -> jax.Array:
    if exponent in (0.5, -0.5):
        if exponent > 0:
            return jnp.sqrt(x)
        return jax.lax.rsqrt(x)
    return x**exponent


@_fractional_power.defjvp
def _fractional_power_jvp(exponent, primals, tangents):
    (x,) = primals
    (dx,) = tangents
    return _fractional_power(x, exponent), dx * (exponent * _fractional_power(x, exponent - 1))
