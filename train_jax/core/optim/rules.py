"""Update rules by name, and what Optax lacks: AdamATan2, cautious weight decay, sign SGD on rows, moving averages."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from train_jax.core.optim.config import OptimConfig
from train_jax.core.optim.muon import scale_by_muon, scale_by_muon_2025, scale_by_muon_2026
from train_jax.core.optim.schedule import weight_decay
from train_jax.core.state import Arrays


class ScaleByAdamATan2State(NamedTuple):
    """State of AdamATan2."""

    count: Int[Array, ""]
    """Steps taken."""
    mu: optax.Updates
    """Running mean of the gradients."""
    nu: optax.Updates
    """Running mean of their squares."""


def scale_by_adam_atan2(
    b1: ArrayLike, b2: float, a: float = 1.0, b: float = 1.0, *, published: bool = False
) -> optax.GradientTransformation:
    """Returns Adam with `a * atan2(mean, b * sqrt(square))` for its quotient: no epsilon, no step above `a * pi / 2`.

    Both means are corrected for their start at zero, as in the paper. `a` and `b` are those of the `adam-atan2` 0.0.3
    that the published HRM and TRM train with (`adam-atan2-pytorch` has a = 1.27, so that a gradient that never changes
    moves a parameter by the learning rate). With `published`, the division by `1 - b1^t` is outside the arctangent, as
    in that package and in HRM-Text: with b1 0.9 the first step is up to 27 % longer, the 30th 2 %, which a warm-up
    makes small.

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
        mean = optax.tree.bias_correction(mu, b1, count)
        square = optax.tree.bias_correction(nu, b2, count)
        angle = jax.tree.map(lambda m, v: a * jnp.arctan2(m, b * jnp.sqrt(v)), mu if published else mean, square)
        angle = optax.tree.bias_correction(angle, b1, count) if published else angle
        return angle, ScaleByAdamATan2State(count, mu, nu)

    return optax.GradientTransformation(init, update)


Rule = Callable[[ArrayLike, OptimConfig], optax.GradientTransformation]
"""Returns an update rule, without weight decay and learning rate, from its momentum and the configuration."""

ELEMENTWISE_RULES: dict[str, Rule] = {
    "adamw": lambda momentum, config: optax.scale_by_adam(momentum, config.beta2, eps=config.eps),
    "adam_atan2": lambda momentum, config: scale_by_adam_atan2(momentum, config.beta2),
    "adam_atan2_published": lambda momentum, config: scale_by_adam_atan2(momentum, config.beta2, published=True),
    "lion": lambda momentum, config: optax.scale_by_lion(momentum, config.beta2),
}
"""Rules of all parameters; their momentum is `beta1`."""

MATRIX_RULES: dict[str, Rule] = {
    "muon": lambda momentum, config: scale_by_muon(momentum, config.newton_schulz_dtype),
    "muon_2025": lambda momentum, config: scale_by_muon_2025(momentum, config.newton_schulz_dtype),
    "muon_2026": lambda momentum, config: scale_by_muon_2026(momentum, config.muon_beta2, config.newton_schulz_dtype),
}
"""Rules of hidden matrices; their momentum is `muon_momentum`. Other parameters use AdamW."""


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


class RowGradients(NamedTuple):
    """Gradients of some rows of a table."""

    ids: Int[Array, "examples"]
    """Every row of the batch once; unused entries are past the end of any table."""
    sums: Float[Array, "examples width"]

    def only_if(self, condition: Bool[Array, ""]) -> "RowGradients":
        """Returns the same gradients if `condition` holds, otherwise none."""
        return self._replace(ids=jnp.where(condition, self.ids, _past_the_end(self.ids)))


def sum_by_row(ids: Int[Array, "examples"], gradients: Float[Array, "examples width"]) -> RowGradients:
    """Sums the gradients of the examples of each row."""
    order = jnp.argsort(ids)
    ids = ids[order]
    gradients = gradients[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    group = jnp.cumsum(is_first) - 1
    sums = jax.ops.segment_sum(gradients, group, num_segments=ids.size, indices_are_sorted=True)
    return RowGradients(jnp.full_like(ids, _past_the_end(ids)).at[group].set(ids), sums)


def _past_the_end(ids: Int[Array, "examples"]) -> int:
    return int(jnp.iinfo(ids.dtype).max)


def sparse_sign_sgd(
    table: Float[Array, "rows width"], gradients: RowGradients, lr: ArrayLike, weight_decay: float
) -> Float[Array, "rows width"]:
    """Applies sign SGD with decoupled weight decay to the rows that have a gradient; other rows do not change."""
    # Indices past the end are clamped in the gather and dropped in the scatter.
    rows = table[gradients.ids] * (1 - lr * weight_decay) - lr * jnp.sign(gradients.sums)
    return table.at[gradients.ids].set(rows.astype(table.dtype), mode="drop")


def update_ema(ema: Arrays, params: Arrays, decay: float) -> Arrays:
    """Updates the moving average of `params`; averages of other parameters do not change."""
    return ema | {name: decay * ema[name] + (1 - decay) * array for name, array in params.items()}
