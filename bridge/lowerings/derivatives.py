"""PyTorch's backward operations, which differentiation inside `forward` calls, as JAX's pullbacks of the operations.

The other backward operations are decomposed by PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.custom_derivatives import SymbolicZero

from bridge._compat.torch import arguments, returns
from bridge._compat.torchax import pytorch_decomposition
from bridge.lowerings.registry import DECOMPOSITIONS, METAS, decomposes, inlined, lowers
from bridge.tensor.arrays import array_of
from bridge.tensor.tensor import BridgeTensor, stop_gradient, wrap

aten = torch.ops.aten

Derivative = Callable[..., jax.Array]
"""(tangent, result, *arguments) -> the term of one argument in the result's tangent; linear in `tangent`."""


def converted(argument: Any, dtype: np.dtype) -> jax.Array:
    """Converts an argument; a Python integer beside integers of few bits wraps, as in PyTorch."""
    wraps = isinstance(argument, int) and jnp.issubdtype(dtype, jnp.integer)
    return jnp.asarray(np.asarray(argument).astype(dtype) if wraps else argument, dtype)


def with_derivatives(*derivatives: Derivative) -> Callable[[Callable], Callable[..., jax.Array]]:
    """Returns a decorator that gives a function of elements these derivatives, one for each argument.

    Arguments are converted to one shape and dtype. Derivatives of constants are not computed. The derivatives are
    differentiated in turn, so a second derivative is that of PyTorch's formula, too.
    """

    def decorate(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        rule = jax.custom_jvp(function)

        def jvp(primals, tangents):
            out = rule(*primals)
            parts = [
                derivative(tangent, out, *primals)
                for derivative, tangent in zip(derivatives, tangents, strict=True)
                if not isinstance(tangent, SymbolicZero)
            ]
            return out, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(out)

        rule.defjvp(jvp, symbolic_zeros=True)

        @inlined
        @functools.wraps(function)
        def lowering(*arguments: Any) -> jax.Array:
            dtype = jnp.result_type(*arguments)
            arrays = jnp.broadcast_arrays(*(converted(a, dtype) for a in arguments))
            if jnp.issubdtype(dtype, jnp.floating):
                return rule(*arrays)
            return function(*arrays)

        return lowering

    return decorate


# ---- PyTorch's backward operations


def _pullback(call: Callable, gradient: torch.Tensor, *primals: torch.Tensor) -> list[BridgeTensor]:
    """Returns the gradients of `primals`, given that of `call(*primals)`."""
    gradient, *tensors = (t if isinstance(t, BridgeTensor) else wrap(array_of(t)) for t in (gradient, *primals))

    def forward(*arrays: jax.Array) -> jax.Array:
        with torch.enable_grad():
            return call(*(wrap(a, t._meta, tracked=True) for a, t in zip(arrays, tensors, strict=True))).value

    out, pull = jax.vjp(forward, *(t.value for t in tensors))
    gradients = pull(gradient.value.astype(out.dtype))
    recorded = torch.is_grad_enabled()
    if not recorded:
        gradients = map(stop_gradient, gradients)
    return [wrap(g, t._meta, tracked=recorded, live=recorded) for g, t in zip(gradients, tensors, strict=True)]


def _masked(gradients: list, mask: list[bool]) -> tuple:
    return tuple(g if wanted else None for g, wanted in zip(gradients, mask, strict=True))


def _pulled_back(backward: Any, forward: Any, gradient: torch.Tensor, *args: Any, **named: Any) -> Any:
    """Returns `backward(gradient, *args, **named)` as the pullback of `forward`, whose arguments have the same names.

    The results are the gradients of the first arguments of `forward`.
    """
    names = [argument.name for argument in arguments(backward)[1:]]
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | named
    if "input_size" in given:  # an interpolation, which is linear in its input
        given["self"] = gradient.new_zeros(given["input_size"])
    elif "adaptive" in forward.name():
        given["output_size"] = gradient.shape[-2 if "2d" in forward.name() else -3 :]
    settings = {
        argument.name: given.get(argument.name)
        for argument in arguments(forward)
        if argument.name in given or not argument.has_default_value()
    }
    primals: list[Any] = [settings.pop(name) for name in [*settings][: len(returns(backward))]]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        out = forward(*tensors, **settings)
        if isinstance(out, torch.Tensor):
            return out
        return out[0]

    gradients = _pullback(call, gradient, *primals)
    if len(gradients) == 1:
        return gradients[0]
    return _masked(gradients, given.get("output_mask", [True] * len(gradients)))


def _enter(backward: Any, forward: Any) -> None:
    DECOMPOSITIONS[backward] = functools.partial(_pulled_back, backward, forward)


for _name in (
    "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "hardshrink", "softshrink", "multi_margin_loss", "grid_sampler_2d", "grid_sampler_3d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_scaled_dot_product_flash_attention_for_cpu", "_ctc_loss", "softplus",
):  # fmt: skip
    _enter(getattr(aten, f"{_name}_backward").default, getattr(aten, _name).default)
for _name in ("_cdist", "_pdist", "multilabel_margin_loss"):
    _enter(getattr(aten, f"{_name}_backward").default, getattr(aten, f"{_name}_forward").default)
_enter(aten._ctc_loss_backward.Tensor, aten._ctc_loss.Tensor)


@decomposes(aten.elu_backward.default)
def elu_backward(gradient, alpha, scale, input_scale, is_result, x):
    """The derivative of PyTorch's form, which has the exponential of large numbers in the other branch, is nan."""
    if is_result:
        return pytorch_decomposition(aten.elu_backward.default)(gradient, alpha, scale, input_scale, is_result, x)
    return _pullback(lambda x: aten.elu.default(x, alpha, scale, input_scale), gradient, x)[0]


@decomposes(aten.convolution_backward.default)
def convolution_backward(gradient, x, weight, bias_sizes, *settings):
    *settings, mask = settings
    gradients = _pullback(lambda x, w: aten.convolution.default(x, w, None, *settings), gradient, x, weight)
    to_bias = gradient.sum((0, *range(2, gradient.dim()))) if mask[2] else None
    return _masked([*gradients, to_bias], mask)


def _grid_sampler(op: Any, x: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    """Runs PyTorch's decomposition; its kernel gives no gradient to coordinates on the border or moved there."""
    if mode == 0 and padding == 1:
        limit = 1 if align_corners else 1 - 1 / torch.tensor(x.shape[:1:-1])
        grid = torch.where(grid.abs() < limit, grid, grid.detach())
    return pytorch_decomposition(op)(x, grid, mode, padding, align_corners)


for _op in (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default):
    DECOMPOSITIONS[_op] = functools.partial(_grid_sampler, _op)


@decomposes(aten.mkldnn_rnn_layer_backward.default)
def lstm_layer_backward(
    x, w_input, w_hidden, b_input, b_hidden, h, c, _output, _h, _c, to_output, to_h, to_c,
    reverse, mode, size, layers, has_biases, train, bidirectional, batch_sizes, batch_first, _workspace,
):  # fmt: skip
    settings = reverse, batch_sizes, mode, size, layers, has_biases, bidirectional, batch_first, train
    gradients = [to_output, to_h, to_c]

    def weighed(*tensors: torch.Tensor) -> torch.Tensor:
        results = aten.mkldnn_rnn_layer.default(*tensors, *settings)[:3]
        weighed_each = (out * g for out, g in zip(results, gradients, strict=True) if g is not None)
        return sum((each.sum() for each in weighed_each), torch.zeros(()))

    return tuple(_pullback(weighed, torch.ones(()), x, w_input, w_hidden, b_input, b_hidden, h, c))


# torchax has functions with the names of the next three that take fewer arguments.

DECOMPOSITIONS[aten.native_group_norm_backward.default] = pytorch_decomposition(aten.native_group_norm_backward.default)


def _statistics(x: torch.Tensor, dims: list[int], mean: torch.Tensor, rstd: torch.Tensor) -> tuple:
    """Returns the saved mean and inverse deviation as functions of `x`, for the second derivative."""
    x = x.to(rstd.dtype)
    own = x.mean(dims).view_as(mean)
    var = x.var(dims, correction=0).view_as(rstd)
    eps = rstd.detach() ** -2 - var.detach()
    return mean.detach() + (own - own.detach()), (var + eps).rsqrt()


@decomposes(aten.native_layer_norm_backward.default)
def layer_norm_backward(gradient, x, shape, mean, rstd, *rest):
    mean, rstd = _statistics(x, list(range(-len(shape), 0)), mean, rstd)
    op = aten.native_layer_norm_backward.default
    return pytorch_decomposition(op)(gradient, x, shape, mean, rstd, *rest)


@decomposes(aten.native_batch_norm_backward.default)
def batch_norm_backward(gradient, x, weight, running_mean, running_var, mean, rstd, train, *rest):
    if train:
        mean, rstd = _statistics(x, [0, *range(2, x.dim())], mean, rstd)
    op = aten.native_batch_norm_backward.default
    return pytorch_decomposition(op)(gradient, x, weight, running_mean, running_var, mean, rstd, train, *rest)


# ---- implicit gradients of random numbers: the change that keeps the probability of less than the number


@lowers(aten._standard_gamma_grad.default)
def standard_gamma_grad(concentration, draws):
    return jax.lax.random_gamma_grad(concentration, draws)  # pyright: ignore[reportCallIssue]


_TERMS = 200
"""The number of terms of a continued fraction, enough for float32 and concentrations up to 10 000."""


def _fraction(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the continued fraction of the incomplete beta function, which converges below the mean of Beta(a, b)."""

    def term(i: jax.Array, rest: jax.Array) -> jax.Array:
        m = jnp.floor((_TERMS - i) / 2)
        odd = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        even = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        return 1 + jnp.where((_TERMS - i) % 2 == 1, odd, even) * x / rest

    return 1 / jax.lax.fori_loop(0, _TERMS, term, jnp.ones_like(x))


@lowers(aten._dirichlet_grad.default)
def dirichlet_grad(x, concentration, total):
    """Returns the derivative of a draw of Beta(concentration, total - concentration) by the first, over `1 - x`.

    The cumulative probability is `x**a (1-x)**b / (a B(a, b))` times the fraction, and one minus its mirror image.
    """
    a = concentration
    b = total - concentration
    x = jnp.clip(x, jnp.finfo(x.dtype).tiny, 1 - jnp.finfo(x.dtype).epsneg)
    below = x < (a + 1) / (total + 2)
    one = jnp.ones_like(a)
    left, slope = jax.jvp(lambda a: _fraction(a, b, jnp.where(below, x, 0)), (a,), (one,))
    right, mirrored = jax.jvp(lambda a: _fraction(b, a, jnp.where(below, 0, 1 - x)), (a,), (one,))
    common = jnp.log(x) - jax.scipy.special.digamma(a) + jax.scipy.special.digamma(total)
    return jnp.where(below, -x / a * (left * (common - 1 / a) + slope), x / b * (right * common + mirrored))


METAS[aten._dirichlet_grad.default] = lambda x, concentration, total: torch.empty_like(x)
METAS[aten._standard_gamma_grad.default] = lambda concentration, draws: torch.empty_like(draws)
METAS[aten._sample_dirichlet.default] = METAS[aten.binomial.default] = lambda x, *_, **__: torch.empty_like(x)
