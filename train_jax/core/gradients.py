"""One replica's gradients: of its share of the batch at once, or of several parts of it one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import bridge
from train_jax.core.objective import Batch, Objective
from train_jax.core.state import Arrays, Learner
from train_jax.errors import UserError


class Found(NamedTuple):
    """What a pass over the replica's examples gives."""

    dense: Arrays
    """Gradients of the dense parameters that move."""
    local: Arrays
    """Gradients of the puzzle rows, one for each example."""
    ids: Arrays
    """Whose rows those are."""
    loss: jax.Array
    """Summed over the examples."""
    metrics: dict[str, jax.Array]
    carry: Any
    buffers: Arrays
    """The learner's buffers as the module left them."""


Draws = Callable[[Any, int], bridge.ShardedKey]
"""(part, parts) -> the random numbers of that part's rows."""


def gradients_of(
    objective: Objective,
    learner: Learner,
    moving: Arrays,
    carry: Any,
    batch: Batch,
    draws: Draws,
    *,
    scale: Any,
    parts: int = 1,
    overrides: Mapping[str, Any] | None = None,
) -> Found:
    """The gradient of `scale` times the summed loss, by the parameters in `moving` and the puzzle rows.

    With `parts` the examples are taken in so many equal parts, one after the other, which takes less memory: gradients
    are summed, every example draws the numbers it would have drawn, and buffers that the module writes go from part to
    part.
    """

    def one(buffers: Arrays, carry: Any, batch: Batch, rng: bridge.ShardedKey) -> Found:
        def loss(moving: Arrays, local_rows: Arrays) -> tuple[jax.Array, Any]:
            out = objective(learner.params | moving, local_rows, buffers, carry, batch, rng, overrides)
            return out.loss * scale, out

        (dense, local), out = jax.grad(loss, argnums=(0, 1), has_aux=True)(moving, objective.local_rows)
        ids = {table.local_ids: out.buffers[table.local_ids] for table in objective.tables}
        after = {name: out.buffers[name] for name in buffers}
        return Found(dense, local, ids, out.loss, out.metrics, out.carry, after)

    if parts == 1:
        return one(learner.buffers, carry, batch, draws(0, 1))

    tables = {table.weights for table in objective.tables}  # read only: no copy for each part
    state = {name: array for name, array in learner.buffers.items() if name not in tables}
    written: set[str] = set()

    def part(carried: tuple[Arrays, Arrays], given: tuple[Any, Any, Batch]) -> tuple[Any, Found]:
        total, before = carried
        number, carry, batch = given
        found = one(learner.buffers | before, carry, batch, draws(number, parts))
        after = {name: found.buffers[name] for name in before}
        written.update(name for name in before if after[name] is not before[name])
        total = jax.tree.map(jnp.add, total, found.dense)
        return (total, after), found._replace(dense={}, buffers={})

    given = jnp.arange(parts), _in_parts(carry, parts), _in_parts(batch, parts)
    (dense, after), found = jax.lax.scan(part, (jax.tree.map(jnp.zeros_like, moving), state), given)
    return Found(
        dense=dense,
        local=_whole(found.local),
        ids=_whole(found.ids),
        loss=found.loss.sum(),
        metrics=jax.tree.map(lambda x: x.sum(0), found.metrics),
        carry=_whole(found.carry),
        buffers=learner.buffers | {name: after[name] for name in written},
    )


def _whole(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _in_parts(tree: Any, parts: int) -> Any:
    def split(x: jax.Array) -> jax.Array:
        if x.ndim == 0 or x.shape[0] % parts:
            raise UserError(
                f"accumulation_steps {parts} does not divide a batch or carry of shape {x.shape} on one device; "
                "use a divisor of the examples on a device"
            )
        return x.reshape(parts, -1, *x.shape[1:])

    return jax.tree.map(split, tree)
