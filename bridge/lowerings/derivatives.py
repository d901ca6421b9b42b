"""PyTorch's backward operations, which differentiation inside `forward` calls, as JAX's pullbacks of the operations.

Those that are not here have a decomposition of PyTorch's.
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

from bridge._compat.torchax import pytorch_decomposition
from bridge.lowerings.registry import DECOMPOSITIONS, decomposes, inlined
from bridge.tensor.arrays import array_of
from bridge.tensor.tensor import BridgeTensor, fresh, stop_gradient

aten = torch.ops.aten

Derivative = Callable[..., jax.Array]
"""(tangent, result, *arguments) -> what the tangent of one argument adds to that of the result; linear in it."""


def converted(argument: Any, dtype: np.dtype) -> jax.Array:
    """A Python integer beside integers of few bits wraps, as in PyTorch."""
    wraps = isinstance(argument, int) and jnp.issubdtype(dtype, jnp.integer)
    return jnp.asarray(np.asarray(argument).astype(dtype) if wraps else argument, dtype)


def with_derivatives(*derivatives: Derivative) -> Callable[[Callable], Callable[..., jax.Array]]:
    """Give the decorated function of elements these derivatives, one for each argument.

    Arguments are brought to one shape and dtype. Derivatives of constants are not computed. The derivatives are
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
            return rule(*arrays) if jnp.issubdtype(dtype, jnp.floating) else function(*arrays)

        return lowering

    return decorate


# ---- bridge.lowerings.derivatives


def _pullback(call: Callable, gradient: torch.Tensor, *primals: torch.Tensor) -> list[BridgeTensor]:
    """The gradients of `primals`, given that of `call(*primals)`."""
    gradient, *tensors = (t if isinstance(t, BridgeTensor) else fresh(array_of(t)) for t in (gradient, *primals))

    def forward(*arrays: jax.Array) -> jax.Array:
        with torch.enable_grad():
            return call(*(fresh(a, t._meta, tracked=True) for a, t in zip(arrays, tensors, strict=True))).value

    out, pull = jax.vjp(forward, *(t.value for t in tensors))
    gradients = pull(gradient.value.astype(out.dtype))
    if not torch.is_grad_enabled():
        gradients = [stop_gradient(g) for g in gradients]
    return [
        fresh(g, t._meta, tracked=torch.is_grad_enabled(), live=torch.is_grad_enabled())
        for g, t in zip(gradients, tensors, strict=True)
    ]


def _masked(gradients: list, mask: list[bool]) -> tuple:
    return tuple(g if wanted else None for g, wanted in zip(gradients, mask, strict=True))


@decomposes(aten.convolution_backward.default)
def convolution_backward(gradient, x, weight, bias_sizes, *settings):
    *settings, mask = settings
    gradients = _pullback(lambda x, w: aten.convolution.default(x, w, None, *settings), gradient, x, weight)
    to_bias = gradient.sum((0, *range(2, gradient.dim()))) if mask[2] else None
    return _masked([*gradients, to_bias], mask)


def _of_grid_sampler(forward: Any) -> Callable:
    """`backward(gradient, input, grid, *settings, mask)` of `forward(input, grid, *settings)`."""

    def backward(gradient, x, grid, *settings):
        *settings, mask = settings
        return _masked(_pullback(lambda x, grid: forward(x, grid, *settings), gradient, x, grid), mask)

    return backward


def _without_gradient_at_borders(grid: torch.Tensor, size: int, reflects: bool, align_corners: bool) -> torch.Tensor:
    """Coordinates along one dimension: PyTorch's kernels give those none that lie on the border or are moved there."""
    with torch.no_grad():
        place = ((grid + 1) * size - 1) / 2 if not align_corners else (grid + 1) / 2 * (size - 1)
        if reflects:
            low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
            if not span:
                return grid.detach()
            away = (place - low).abs()
            rest, flips = torch.fmod(away, span), (away / span).floor()
            place = torch.where(torch.fmod(flips, 2) == 0, rest + low, span + low - rest)
        inside = (place > 0) & (place < size - 1)
    return torch.where(inside, grid, grid.detach())


def _bilinear_grid_sampler(op: Any) -> Callable:
    of_pytorch = pytorch_decomposition(op)

    def grid_sampler(x, grid, interpolation, padding, align_corners):
        if interpolation == 0 and padding:
            places = zip(grid.unbind(-1), reversed(x.shape[2:]), strict=True)
            settings = padding == 2, align_corners
            grid = torch.stack([_without_gradient_at_borders(*each, *settings) for each in places], -1)
        return of_pytorch(x, grid, interpolation, padding, align_corners)

    return grid_sampler


for _op in (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default):
    DECOMPOSITIONS[_op] = _bilinear_grid_sampler(_op)


def _of_one_input(forward: Any) -> Callable:
    """`backward(gradient, input, *settings)` of `forward(input, *settings)`."""

    def backward(gradient, x, *settings, **named):
        return _pullback(lambda x: forward(x, *settings, **named), gradient, x)[0]

    return backward


def _of_output_size(forward: Any) -> Callable:
    """`backward(gradient, input)` of `forward(input, output size)`."""
    space = -2 if "2d" in forward.name() else -3

    def backward(gradient, x):
        return _pullback(lambda x: forward(x, gradient.shape[space:]), gradient, x)[0]

    return backward


def _of_resizing(forward: Any) -> Callable:
    """`backward(gradient, output size, input size, *settings)` of `forward(input, output size, *settings)`."""

    def backward(gradient, output_size, input_size, *settings, **named):
        zeros = gradient.new_zeros(input_size)
        return _pullback(lambda x: forward(x, output_size, *settings, **named), gradient, zeros)[0]

    return backward


for _kind, _names in {
    _of_one_input: (
        "avg_pool2d", "avg_pool3d", "hardshrink", "softshrink", "replication_pad1d", "replication_pad2d",
        "replication_pad3d", "multi_margin_loss",
    ),
    _of_grid_sampler: ("grid_sampler_2d", "grid_sampler_3d"),
    _of_output_size: ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    _of_resizing: (
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
        "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    ),
}.items():  # fmt: skip
    for _name in _names:
        DECOMPOSITIONS[getattr(aten, f"{_name}_backward").default] = _kind(getattr(aten, _name).default)


@decomposes(aten._cdist_backward.default)
def cdist_backward(gradient, x, y, p, _distances):
    return _pullback(lambda x: aten._cdist_forward.default(x, y, p, None), gradient, x)[0]


@decomposes(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def ctc_loss_backward(gradient, log_probs, targets, input_lengths, target_lengths, _losses, _table, *settings):
    op = aten._ctc_loss.default if isinstance(input_lengths, list) else aten._ctc_loss.Tensor
    lengths = input_lengths, target_lengths
    return _pullback(lambda x: op(x, targets, *lengths, *settings)[0], gradient, log_probs)[0]


@decomposes(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(gradient, query, key, value, _out, _logsumexp, *settings, **named):
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    return tuple(_pullback(lambda *heads: op(*heads, *settings, **named)[0], gradient, query, key, value))


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


@decomposes(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(gradient, x, labels, reduction, _is_target):
    op = aten.multilabel_margin_loss_forward.default
    return _pullback(lambda x: op(x, labels, reduction)[0], gradient, x)[0]


@decomposes(aten._pdist_backward.default)
def pdist_backward(gradient, x, p, _distances):
    return _pullback(lambda x: aten._pdist_forward.default(x, p), gradient, x)[0]


# torchax has functions under the names of the next three that take fewer arguments.

DECOMPOSITIONS[aten.native_group_norm_backward.default] = pytorch_decomposition(aten.native_group_norm_backward.default)


def _statistics(x: torch.Tensor, dims: list[int], mean: torch.Tensor, rstd: torch.Tensor) -> tuple:
    """The saved mean and inverse deviation as functions of `x` again, which the second derivative goes through."""
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
