"""Learning-rate schedules: linear warm-up, then constant, a cosine or linear decay."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from train_jax.optim.config import OptimConfig


def learning_rate(peak: float, config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of completed optimizer steps.

    The first step uses `1 / warmup_steps` of the peak, as in the published TRM, which increments its counter before it
    computes the learning rate.
    """
    floor = config.lr_min_ratio
    begin = total_steps - round(config.decay_share * (total_steps - config.warmup_steps))

    def rate(count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count, float) + 1
        ramp = step / max(config.warmup_steps, 1)
        progress = jnp.clip((step - begin) / max(total_steps - begin, 1), 0, 1)
        shape = 0.5 * (1 + jnp.cos(jnp.pi * progress)) if config.decay == "cosine" else 1 - progress
        decay = floor + (1 - floor) * shape
        return peak * jnp.where(step < config.warmup_steps, ramp, decay)

    return rate
