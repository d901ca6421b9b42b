"""AdamATan2 as an Optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int


class ScaleByAdamATan2State(NamedTuple):
    """State of AdamATan2."""

    count: Int[Array, ""]
    """Steps taken."""
    mu: optax.Updates
    """Running mean of the gradients."""
    nu: optax.Updates
    """Running mean of their squares."""


def scale_by_adam_atan2(b1: ArrayLike, b2: float, a: float = 1.0, b: float = 1.0) -> optax.GradientTransformation:
    """Adam with `a * atan2(mean, b * sqrt(square))` for its quotient: no epsilon, and no step longer than `a * pi / 2`.

    Both means are corrected for their start at zero, as in the paper. `a` and `b` are those of the `adam-atan2` 0.0.3
    that the published HRM and TRM train with (`adam-atan2-pytorch` has a = 1.27, so that a gradient that never changes
    moves a parameter by the learning rate). That package divides by `1 - b1^t` outside the arctangent instead: with b1
    0.9 its first step is up to 27 % longer than this one, the 30th 2 %, which a warm-up makes small.

    References:
      Everett et al., "Scaling Exponents Across Parameterizations and Optimizers", 2024, https://arxiv.org/abs/2407.05872
    """

    def init(params: optax.Params) -> ScaleByAdamATan2State:
        zeros_like = optax.tree.zeros_like
        return ScaleByAdamATan2State(jnp.zeros((), jnp.int32), zeros_like(params), zeros_like(params))

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, ScaleByAdamATan2State]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, b2, 2)
        mean, square = optax.tree.bias_correction(mu, b1, count), optax.tree.bias_correction(nu, b2, count)
        angle = jax.tree.map(lambda m, v: a * jnp.arctan2(m, b * jnp.sqrt(v)), mean, square)
        return angle, ScaleByAdamATan2State(count, mu, nu)

    return optax.GradientTransformation(init, update)
