"""Connectionist temporal classification (Graves et al. 2006)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.cells import regraft
from bridge.lowerings.registry import METAS, lowers, widened

aten = torch.ops.aten

_NEVER = -1e30
"""The logarithm of a probability of zero; infinities have no gradient."""


@lowers(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """Losses, and in place of PyTorch's table of forward variables zeros of its shape.

    Lengths that are traced are arrays. The table of a batch of padded targets then has their width.

    The gradient is PyTorch's, which takes `log_probs` for a result of log_softmax: besides the derivative it has the
    probabilities, and log_softmax cancels them.
    """
    log_probs = widened(log_probs)
    steps, batch, _ = log_probs.shape
    labels = _rows(targets, target_lengths)
    states = jnp.full((batch, 2 * labels.shape[1] + 1), blank).at[:, 1::2].set(labels)
    skips = jnp.pad((states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2]), ((0, 0), (2, 0)))
    scores = jnp.take_along_axis(log_probs, jnp.broadcast_to(states, (steps, *states.shape)), 2)
    scores = jnp.maximum(scores, _NEVER)
    lengths, ends = _array(input_lengths), 2 * _array(target_lengths)

    def step(alpha, given):
        score, running = given
        before = [jnp.pad(alpha, ((0, 0), (k, 0)), constant_values=_NEVER)[:, : alpha.shape[1]] for k in (1, 2)]
        reached = jnp.logaddexp(jnp.logaddexp(alpha, before[0]), jnp.where(skips, before[1], _NEVER))
        return jnp.where(running[:, None], jnp.maximum(reached + score, _NEVER), alpha), None

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
    return lengths.reshape(-1) if isinstance(lengths, jax.Array) else np.asarray(lengths)


def _rows(targets: jax.Array, lengths: Sequence[int] | jax.Array) -> jax.Array:
    """The labels of each sequence in a row of its own, padded with whatever follows them."""
    widest = _widest(targets, lengths)
    if targets.ndim == 2:
        return targets[:, :widest]
    counts = _array(lengths)
    first = np.cumsum(counts) - counts if isinstance(counts, np.ndarray) else jnp.cumsum(counts) - counts
    return targets[jnp.minimum(first[:, None] + np.arange(widest), max(targets.shape[0] - 1, 0))]


def _widest(targets: jax.Array | torch.Tensor, lengths: Sequence[int] | jax.Array | torch.Tensor) -> int:
    """The most labels of a sequence, or as many as there may be where the lengths are traced."""
    return max(lengths, default=0) if isinstance(lengths, Sequence) else targets.shape[-1]


def _meta(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * _widest(targets, target_lengths) + 1)


METAS[aten._ctc_loss.default] = METAS[aten._ctc_loss.Tensor] = _meta
