"""Decoupled weight decay, also scheduled and cautious."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from train_jax.optim.config import OptimConfig
from train_jax.optim.schedule import weight_decay


def decayed_weights(config: OptimConfig, total_steps: int) -> optax.GradientTransformation:
    """Adds `weight_decay * p` to the update of p, with `cautious_decay` only where both have the same sign."""
    rate = weight_decay(config, total_steps)
    if not config.cautious_decay:
        return optax.add_decayed_weights(rate)
    return _cautious(rate if callable(rate) else lambda count: rate)


def _cautious(rate: optax.Schedule) -> optax.GradientTransformation:
    """Decays no element that the update already moves away from 0.

    References:
      Chen et al., "Cautious Weight Decay", 2025, https://arxiv.org/abs/2510.12402
    """

    def init(params: optax.Params) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, Any]:
        now = rate(state.count)
        decayed = jax.tree.map(lambda u, p: u + jnp.where(u * p >= 0, now * p, 0).astype(u.dtype), updates, params)
        return decayed, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)
