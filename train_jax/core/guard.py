"""Skips steps whose loss or gradients are not finite, or that have no targets; updates the loss scale of float16."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

FIRST_SCALE = 2.0**15
"""The largest power of two in float16."""
LARGEST_SCALE = 2.0**24


class Guard(NamedTuple):
    """Counters of skipped steps, and the loss scale."""

    skipped_steps: Int[Array, ""]
    """Skipped steps in the whole run, int32."""
    consecutive_skipped: Int[Array, ""]
    """Skipped steps since the last good step, int32."""
    loss_scale: Float[Array, ""]
    """The factor of the loss before differentiation; the gradients are divided by it. 1 unless in float16."""
    steps_at_scale: Int[Array, ""]
    """Good steps since the scale last changed, int32."""


def new_guard(scales_loss: bool) -> Guard:
    def zero() -> Int[Array, ""]:
        return jnp.zeros((), jnp.int32)  # one array per field, because they are donated

    return Guard(zero(), zero(), jnp.full((), FIRST_SCALE if scales_loss else 1.0, jnp.float32), zero())


class FiniteCheck(NamedTuple):
    """The result of the check for values that are not finite."""

    good: Bool[Array, ""]
    """True if the state is updated; otherwise only its guard changes."""
    finite: Bool[Array, ""]
    """True if the loss and the gradients are finite."""
    carry_good: Bool[Array, ""]
    """True if the carry is kept; otherwise it is reset, so that the next step starts new examples."""
    guard: Guard
    metrics: dict[str, Array]


def check_finite(
    guard: Guard, loss: Float[Array, ""], norms: list[Array], growth_steps: int | None, counted: Array | None = None
) -> FiniteCheck:
    """Decides whether a step is applied, from its summed loss and gradient norms, which are equal on every device.

    `growth_steps` is the number of good steps after which the loss scale doubles; None without loss scaling. After a
    bad step the carry is reset, because its latents may be NaN and the example that caused them would stay until it
    halts. If only the gradients overflow float16 and the loss scale can be halved, the latents are valid and are kept.
    A step whose loss has no terms (`counted` is 0) is not applied either, and is counted separately: it leaves the
    guard as it is, because it says nothing about the run.
    """
    loss_good = jnp.isfinite(loss)
    good = finite = jnp.all(jnp.array([loss_good, *(jnp.isfinite(norm).all() for norm in norms)]))
    carry_good = good if growth_steps is None else good | loss_good & (guard.loss_scale > 1)
    after = guard._replace(
        skipped_steps=guard.skipped_steps + ~good, consecutive_skipped=jnp.where(good, 0, guard.consecutive_skipped + 1)
    )
    metrics = {"skipped_steps": ~good, "consecutive_skipped": after.consecutive_skipped}
    if growth_steps is not None:
        after = _rescaled(after, good, growth_steps)
        metrics["loss_scale"] = guard.loss_scale
    if counted is not None:
        empty = counted == 0
        good = good & ~empty
        after = where_tree(empty, guard, after)
        metrics |= {"skipped_steps": metrics["skipped_steps"] & ~empty, "empty_steps": empty}
        metrics["consecutive_skipped"] = after.consecutive_skipped
    return FiniteCheck(good, finite, carry_good, after, metrics)


def _rescaled(guard: Guard, good: Bool[Array, ""], growth_steps: int) -> Guard:
    """Updates the loss scale like PyTorch's `GradScaler`: halved after an overflow, doubled after `growth_steps`.

    Unlike there, it stays between 1 and `LARGEST_SCALE`; at 1 an overflow is not caused by the scale.

    References:
      Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740, section 3.2
    """
    steps = jnp.where(good, guard.steps_at_scale + 1, 0)
    grows = steps >= growth_steps
    scale = guard.loss_scale * jnp.where(grows, 2.0, jnp.where(good, 1.0, 0.5))
    return guard._replace(loss_scale=jnp.clip(scale, 1.0, LARGEST_SCALE), steps_at_scale=jnp.where(grows, 0, steps))


def where_tree(condition: Bool[Array, ""], after: Any, before: Any) -> Any:
    """Returns `after` if `condition` holds, otherwise `before`, bit for bit."""
    # Leaves that are the same object need no select, which saves a copy of large unchanged arrays.
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b.astype(a.dtype)), after, before)
