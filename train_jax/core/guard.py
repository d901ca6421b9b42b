"""Steps that must not count: what a loss or gradient that is not finite leaves behind, and float16's loss scale."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

FIRST_SCALE = 2.0**15
"""The largest power of two that float16 holds."""
LARGEST_SCALE = 2.0**24


class Guard(NamedTuple):
    """What training remembers about the steps that it left out."""

    skipped_steps: Int[Array, ""]
    """In the whole run, int32."""
    consecutive_skipped: Int[Array, ""]
    """Since the last good step, int32."""
    loss_scale: Float[Array, ""]
    """What the loss is multiplied by before the gradients and they are divided by after; 1 unless in float16."""
    steps_at_scale: Int[Array, ""]
    """Good steps since the scale last changed, int32."""


def new_guard(scales_loss: bool) -> Guard:
    def zero() -> Int[Array, ""]:
        return jnp.zeros((), jnp.int32)  # an array for each: they are donated

    return Guard(zero(), zero(), jnp.full((), FIRST_SCALE if scales_loss else 1.0, jnp.float32), zero())


class Verdict(NamedTuple):
    """What is to become of a step."""

    good: Bool[Array, ""]
    """The learner moves; otherwise it stays as it is, all but its guard."""
    carry_good: Bool[Array, ""]
    """The carry goes on; otherwise it starts afresh, so that the next step takes up new examples everywhere."""
    guard: Guard
    metrics: dict[str, Array]


def judged(guard: Guard, loss: Float[Array, ""], norms: list[Array], growth_steps: int | None) -> Verdict:
    """Whether a step counts, by its summed loss and the norms of its gradients, all the same on every device.

    `growth_steps`: good steps after which the loss scale doubles; None without one. After a bad step latents may be no
    numbers, and the example that made them so would come back until it halts: hence the fresh carry. Where gradients
    past float16 may be the fault of a scale that can still fall, latents are as they should be, and stay.
    """
    loss_good = jnp.isfinite(loss)
    good = jnp.all(jnp.array([loss_good, *(jnp.isfinite(norm).all() for norm in norms)]))
    carry_good = good if growth_steps is None else good | loss_good & (guard.loss_scale > 1)
    after = guard._replace(
        skipped_steps=guard.skipped_steps + ~good, consecutive_skipped=jnp.where(good, 0, guard.consecutive_skipped + 1)
    )
    metrics = {"skipped_steps": ~good, "consecutive_skipped": after.consecutive_skipped}
    if growth_steps is not None:
        after = _rescaled(after, good, growth_steps)
        metrics["loss_scale"] = guard.loss_scale
    return Verdict(good, carry_good, after, metrics)


def _rescaled(guard: Guard, good: Bool[Array, ""], growth_steps: int) -> Guard:
    """The loss scale for the next step, as PyTorch's `GradScaler`: half after an overflow, twice after `growth_steps`.

    Unlike there it stays between 1 and `LARGEST_SCALE`: at 1 the scale is not what overflows.

    References:
      Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740, section 3.2
    """
    steps = jnp.where(good, guard.steps_at_scale + 1, 0)
    grows = steps >= growth_steps
    scale = guard.loss_scale * jnp.where(grows, 2.0, jnp.where(good, 1.0, 0.5))
    return guard._replace(loss_scale=jnp.clip(scale, 1.0, LARGEST_SCALE), steps_at_scale=jnp.where(grows, 0, steps))


def kept_if(good: Bool[Array, ""], after: Any, before: Any) -> Any:
    """`after`, or bit for bit `before`."""
    # What did not change is left out: a large array that merely passes through costs nothing.
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(good, a, b.astype(a.dtype)), after, before)
