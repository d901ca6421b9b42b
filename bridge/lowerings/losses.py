"""Losses."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.lowerings.elementwise import absolute
from bridge.lowerings.registry import METAS, inlined, lowers, widened
from bridge.tensor.tensor import regraft

aten = torch.ops.aten


_MEAN = 1
_SUM = 2


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
@inlined
def nll_loss(x, target, weight, reduction, ignore_index):
    """`x` is `(batch, classes, …)` or `(classes,)`.

    A class is picked by a mask and a sum, not by its position: XLA joins these with the softmax before it and with the
    softmax's gradient, so that neither log-probabilities nor their gradient, which is zero but for one class, are
    arrays in memory.
    """
    axis = min(x.ndim - 1, 1)
    counted = target != ignore_index
    classes = jax.lax.broadcasted_iota(target.dtype, x.shape, axis)
    is_class = classes == jnp.expand_dims(jnp.where(counted, target, -1), axis)

    def of_class(values):
        return jnp.sum(jnp.where(is_class, widened(values), 0), axis)

    losses = -of_class(x)
    weights = counted.astype(widened(x).dtype)
    if weight is not None:
        weights = of_class(jnp.reshape(weight, (-1, *[1] * (x.ndim - axis - 1))))
        losses = jnp.where(counted, losses * weights, 0)
    if reduction not in (_MEAN, _SUM):
        return losses.astype(x.dtype), jnp.zeros((), x.dtype)
    total = jnp.sum(weights)
    loss = jnp.sum(losses) / (total if reduction == _MEAN else 1)
    return loss.astype(x.dtype), total.astype(x.dtype)


_NEVER = -1e30
"""The logarithm used for a probability of zero; infinities have no gradient."""


@lowers(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """Returns losses, and zeros in the shape of PyTorch's table of forward variables.

    Traced lengths are arrays. The table of a batch of padded targets then has their width.

    The gradient is PyTorch's, which assumes that `log_probs` is a result of log_softmax: it adds the probabilities to
    the derivative, and log_softmax cancels them.
    """
    log_probs = widened(log_probs)
    steps, batch, _ = log_probs.shape
    labels = _rows(targets, target_lengths)
    states = jnp.full((batch, 2 * labels.shape[1] + 1), blank).at[:, 1::2].set(labels)
    skips = jnp.pad((states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2]), ((0, 0), (2, 0)))
    scores = jnp.take_along_axis(log_probs, jnp.broadcast_to(states, (steps, *states.shape)), 2)
    scores = jnp.maximum(scores, _NEVER)
    lengths = _array(input_lengths)
    ends = 2 * _array(target_lengths)

    def step(alpha, given):
        score, running = given
        from_last, from_last_but_one = (
            jnp.pad(alpha, ((0, 0), (k, 0)), constant_values=_NEVER)[:, : alpha.shape[1]] for k in (1, 2)
        )
        reached = jnp.logaddexp(alpha, from_last)
        reached = jnp.logaddexp(reached, jnp.where(skips, from_last_but_one, _NEVER))
        moved = jnp.maximum(reached + score, _NEVER)
        return jnp.where(running[:, None], moved, alpha), None

    start = jnp.where(np.arange(states.shape[1]) < 2, scores[0], _NEVER)
    running = np.arange(steps)[:, None] < lengths
    alpha, _ = jax.lax.scan(step, start, (scores[1:], running[1:]))
    last = jnp.take_along_axis(alpha, ends[:, None], 1)[:, 0]
    label = jnp.take_along_axis(alpha, jnp.maximum(ends - 1, 0)[:, None], 1)[:, 0]
    total = jnp.logaddexp(last, jnp.where(ends > 0, label, _NEVER))
    mass = jnp.sum(jnp.where(running[..., None], jnp.exp(log_probs), 0), (0, 2))
    possible = total > _NEVER / 2
    loss = jnp.where(possible, -total, 0 if zero_infinity else jnp.inf)
    # An infinite loss has a gradient of NaN, as in PyTorch.
    loss = regraft(loss, (mass - total) * jnp.where(possible, 1, 0 if zero_infinity else jnp.nan))
    return loss, jnp.zeros((batch, steps, states.shape[1]), log_probs.dtype)


def _array(lengths: Sequence[int] | jax.Array) -> np.ndarray | jax.Array:
    if isinstance(lengths, jax.Array):
        return lengths.reshape(-1)
    return np.asarray(lengths)


def _rows(targets: jax.Array, lengths: Sequence[int] | jax.Array) -> jax.Array:
    """Returns the labels of each sequence in a row of its own, padded with whatever follows them."""
    widest = _widest(targets, lengths)
    if targets.ndim == 2:
        return targets[:, :widest]
    counts = _array(lengths)
    if isinstance(counts, np.ndarray):
        first = np.cumsum(counts) - counts
    else:
        first = jnp.cumsum(counts) - counts
    return targets[jnp.minimum(first[:, None] + np.arange(widest), max(targets.shape[0] - 1, 0))]


def _widest(targets: jax.Array | torch.Tensor, lengths: Sequence[int] | jax.Array | torch.Tensor) -> int:
    """Returns the largest number of labels of a sequence, or its upper bound if the lengths are traced."""
    if isinstance(lengths, Sequence):
        return max(lengths, default=0)
    return targets.shape[-1]


def _meta(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * _widest(targets, target_lengths) + 1)


METAS[aten._ctc_loss.default] = METAS[aten._ctc_loss.Tensor] = _meta


def _huber(x, y, beta):
    away = widened(x) - widened(y)
    far = jnp.abs(away) >= beta
    near = jnp.where(far, 0, away)
    return jnp.where(far, absolute(away) - beta / 2, near * near / (2 * beta))


def _reduced(loss, reduction):
    if reduction == 0:
        return loss
    if reduction == _MEAN:
        return jnp.mean(loss)
    return jnp.sum(loss)


@lowers(aten.smooth_l1_loss.default)
def smooth_l1_loss(x, y, reduction=_MEAN, beta=1.0):
    return _reduced(_huber(x, y, beta), reduction)


@lowers(aten.huber_loss.default)
def huber_loss(x, y, reduction=_MEAN, delta=1.0):
    return _reduced(_huber(x, y, delta) * delta, reduction)


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(x, target, weight=None, reduction=_MEAN):
    """Bounds logarithms at -100 and the gradient's denominator at 1e-12, as PyTorch does for 0 and 1."""
    p = jax.lax.stop_gradient(widened(x))
    t = jax.lax.stop_gradient(widened(target))
    log_p = jnp.log(p)
    log_q = jnp.log1p(-p)
    value = -(t * jnp.maximum(log_p, -100) + (1 - t) * jnp.maximum(log_q, -100))
    path = widened(x) * ((p - t) / jnp.maximum(p * (1 - p), 1e-12))
    loss = regraft(value, path + widened(target) * (log_q - log_p))
    return _reduced(loss if weight is None else loss * weight, reduction)


@lowers(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(x, target, reduction):
    """The labels of a row end at the first negative one."""
    rows = jnp.atleast_2d(x)
    labels = jnp.atleast_2d(target)
    valid = jnp.cumprod(labels >= 0, axis=1).astype(bool)[:, :, None]
    is_target = jnp.any(valid & (labels[:, :, None] == jnp.arange(rows.shape[1])), 1)
    margins = 1 - jnp.take_along_axis(rows, jnp.maximum(labels, 0), 1)[:, :, None] + rows[:, None, :]
    counted = valid & ~is_target[:, None, :] & (margins > 0)
    losses = jnp.where(counted, margins, 0).sum((1, 2)) / rows.shape[1]
    return _reduced(losses.reshape(target.shape[:-1]), reduction), is_target.reshape(x.shape).astype(x.dtype)


# For one row and no reduction PyTorch's meta device returns (1,), its CPU ().
METAS[aten.multilabel_margin_loss_forward.default] = lambda x, target, reduction: (
    x.new_empty(target.shape[:-1] if reduction == 0 else ()),
    x.new_empty(x.shape),
)
