"""The negative log-likelihood of classes."""

import jax
import jax.numpy as jnp
import torch

from bridge.inlining import inlined
from bridge.lowerings.registry import lowers, widened

aten = torch.ops.aten

_MEAN, _SUM = 1, 2


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

    losses, weights = -of_class(x), counted.astype(widened(x).dtype)
    if weight is not None:
        weights = of_class(jnp.reshape(weight, (-1, *[1] * (x.ndim - axis - 1))))
        losses = jnp.where(counted, losses * weights, 0)
    if reduction not in (_MEAN, _SUM):
        return losses.astype(x.dtype), jnp.zeros((), x.dtype)
    total = jnp.sum(weights)
    loss = jnp.sum(losses) / (total if reduction == _MEAN else 1)
    return loss.astype(x.dtype), total.astype(x.dtype)
