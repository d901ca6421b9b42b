"""The state that training carries from step to step, as a pytree."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from train_jax.core.guard import Guard, new_guard

Arrays = dict[str, jax.Array]
"""Arrays by qualified PyTorch name."""


class TrainState(NamedTuple):
    """Everything that training changes except the carry; replicated on every device."""

    step: jax.Array
    """Optimizer steps taken, int32. Steps that the guard skipped are not counted."""
    params: Arrays
    """Dense parameters in float32."""
    ema: Arrays
    """The exponential moving average of `params` by the same names; empty if the run has none."""
    opt_state: optax.OptState
    buffers: Arrays
    """All other state tensors of the module, sparse tables included. They are not averaged."""
    guard: Guard

    @property
    def eval_params(self) -> Arrays:
        """The parameters to evaluate and export: the moving average or, without one, the parameters."""
        return self.ema or self.params


def new_state(
    params: Arrays,
    buffers: Arrays,
    optimizer: optax.GradientTransformation,
    *,
    trainable: Arrays | None = None,
    keeps_ema: bool = True,
    scales_loss: bool = False,
) -> TrainState:
    """Returns the initial state; `trainable` are the parameters that `optimizer` updates, all by default."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        ema=jax.tree.map(jnp.copy, params) if keeps_ema else {},
        opt_state=optimizer.init(params if trainable is None else trainable),
        buffers=buffers,
        guard=new_guard(scales_loss),
    )
