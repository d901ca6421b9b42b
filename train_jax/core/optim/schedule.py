"""Schedules of learning rates, momentum and weight decay, as functions of the completed optimizer steps."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from train_jax.core.optim.config import OptimConfig


def learning_rate(peak: float, config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Returns a linear warm-up, then the peak, then a decay.

    The first step uses `1 / warmup_steps` of the peak, as in the published TRM, which increments its counter before it
    computes the learning rate.
    """
    floor = config.lr_min_ratio
    # With `warmdown`, the decay may begin during the warm-up, and must not replace its last step.
    first_decayed = config.warmup_steps + (config.decay == "warmdown")
    decayed = decay_progress(config, total_steps)

    def rate(count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count, float) + 1
        ramp = step / max(config.warmup_steps, 1)
        progress = decayed(count)
        shape = 0.5 * (1 + jnp.cos(jnp.pi * progress)) if config.decay == "cosine" else 1 - progress
        decay = floor + (1 - floor) * shape
        return peak * jnp.where(step < first_decayed, ramp, decay)

    return rate


def decay_progress(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Returns the completed share of the decay: 1 at the last step, or with `warmdown` at the step that would follow.

    With `warmdown`, `decay_share` is a share of all steps, otherwise of those after the warm-up.
    """
    warmdown = config.decay == "warmdown"
    begin = total_steps - round(config.decay_share * (total_steps - (0 if warmdown else config.warmup_steps)))

    def progress(count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count, float) + (0 if warmdown else 1)
        return jnp.clip((step - begin) / max(total_steps - begin, 1), 0, 1)

    return progress


def momentum(peak: float, config: OptimConfig, total_steps: int) -> float | optax.Schedule:
    """Returns the momentum if it is constant, otherwise its schedule.

    It changes linearly from `momentum_start` to the peak over `momentum_warmup_steps`, and to `momentum_end` while the
    learning rate decays.
    """
    if config.momentum_start is None and config.momentum_end is None:
        return peak
    start = peak if config.momentum_start is None else config.momentum_start
    end = peak if config.momentum_end is None else config.momentum_end
    decayed = decay_progress(config, total_steps)

    def value(count: ArrayLike) -> jax.Array:
        warm = jnp.asarray(count, float) / max(config.momentum_warmup_steps, 1)
        return jnp.where(warm < 1, start + (peak - start) * warm, peak + (end - peak) * decayed(count))

    return value


def weight_decay(config: OptimConfig, total_steps: int) -> float | optax.Schedule:
    """Returns the weight decay if it is constant, otherwise its schedule: a cosine that would be 0 after the run."""
    if config.weight_decay_schedule == "constant":
        return config.weight_decay
    return optax.cosine_decay_schedule(config.weight_decay, max(total_steps, 1))
