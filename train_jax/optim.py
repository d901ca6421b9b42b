"""How parameters move: Optax for the dense ones, sign SGD for the puzzle rows in the batch, a running average."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from train_jax.config import OptimConfig
from train_jax.state import Arrays


def schedule(peak: float, config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Linear warm-up, then constant or a cosine to `lr_min_ratio`. The first step is already one up the ramp."""
    floor = config.lr_min_ratio

    def rate(count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count, float) + 1
        ramp = step / max(config.warmup_steps, 1)
        progress = jnp.clip((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 0, 1)
        decay = floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return peak * jnp.where(step < config.warmup_steps, ramp, decay)

    return rate


def dense_optimizer(config: OptimConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW as `torch.optim.AdamW` steps it."""
    return optax.adamw(
        schedule(config.lr, config, total_steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=1e-8,
        weight_decay=config.weight_decay,
    )


def sparse_sign_sgd(
    table: jax.Array, ids: jax.Array, gradients: jax.Array, lr: ArrayLike, weight_decay: float
) -> jax.Array:
    """Sign SGD with decoupled weight decay on the rows of `table` named by `ids`; other rows stay bit for bit.

    `table`: (rows, width); `ids`: (examples,); `gradients`: (examples, width), one for each example. A row that occurs
    several times moves once, by the sign of the sum of its gradients.
    """
    count = ids.shape[0]
    order = jnp.argsort(ids)
    ids, gradients = ids[order], gradients[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    group = jnp.cumsum(is_first) - 1
    total = jax.ops.segment_sum(gradients, group, num_segments=count, indices_are_sorted=True)
    # Unused groups get a row past the end: reading one is clamped, writing one is dropped.
    row = jnp.full(count, table.shape[0], ids.dtype).at[group].set(ids)
    moved = table[row] * (1 - lr * weight_decay) - lr * jnp.sign(total)
    return table.at[row].set(moved.astype(table.dtype), mode="drop")


def average(ema: Arrays, params: Arrays, decay: float) -> Arrays:
    """One step of the running average."""
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, ema, params)
