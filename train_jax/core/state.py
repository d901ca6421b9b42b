"""What training carries from step to step, as pytrees."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from train_jax.core.guard import Guard, new_guard

Arrays = dict[str, jax.Array]
"""Arrays by qualified PyTorch name."""


class Learner(NamedTuple):
    """Everything that learns; the same on every device."""

    step: jax.Array
    """Optimizer steps taken, int32; those left out by the guard are not among them."""
    params: Arrays
    """Dense parameters, float32 masters."""
    ema: Arrays
    """Their running average; the same arrays' names."""
    opt_state: optax.OptState
    buffers: Arrays
    """Everything else the module holds, puzzle tables included. Not averaged."""
    guard: Guard


class Trainee(NamedTuple):
    """The learner together with what belongs to the examples in work."""

    learner: Learner
    carry: Any
    """The module's ACT carry, a leading axis for the devices."""


def new_learner(
    params: Arrays, buffers: Arrays, optimizer: optax.GradientTransformation, *, scales_loss: bool = False
) -> Learner:
    return Learner(
        step=jnp.zeros((), jnp.int32),
        params=params,
        ema=jax.tree.map(jnp.copy, params),
        opt_state=optimizer.init(params),
        buffers=buffers,
        guard=new_guard(scales_loss),
    )
