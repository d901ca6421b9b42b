"""The gradients of one replica, computed at once or accumulated over several parts of its examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from train_jax.core.objective import Batch, LossSums, Objective
from train_jax.core.state import Arrays, TrainState
from train_jax.errors import UserError


class Gradients(NamedTuple):
    """Gradients for the examples of one replica, with the other results of the forward pass."""

    dense: Arrays
    """Gradients of the trainable dense parameters."""
    rows: Arrays
    """Gradients of the sparse tables' rows, one for each example."""
    row_ids: Arrays
    """The row indices of `rows`."""
    loss: jax.Array
    """The loss, summed over the examples."""
    weight: jax.Array | None
    counted: jax.Array | None
    metrics: dict[str, jax.Array]
    carry: Any
    buffers: Arrays
    """The state's buffers after the forward pass."""
    unreached: Mapping[str, None] = {}
    """The trainable parameters that the loss does not depend on, as the trace shows, if the task keeps them. Keys of a
    dict, because a function that is traced can return them."""


Keys = Callable[[Any, int], Any]
"""Returns the random key of a part, or its draws: (part, number of parts) -> `rng` of `bridge.Functional`."""


def compute_gradients(
    objective: Objective,
    state: TrainState,
    trainable: Arrays,
    carry: Any,
    batch: Batch,
    keys: Keys,
    *,
    scale: Any,
    global_batch_size: int,
    parts: int = 1,
    overrides: Mapping[str, Any] | None = None,
) -> Gradients:
    """Computes the gradient of `scale` times the loss with respect to `trainable` and the rows of the sparse tables.

    The loss is the sum over the examples, divided by `global_batch_size` unless the task returns a weight. A weight is
    known only after the sum over all replicas, so the step divides by it. With `parts`, the examples are processed in
    this number of equal parts, one after the other, which needs less memory. Gradients are summed, the random numbers
    of an example do not depend on `parts`, and buffers that the module writes are passed from part to part.
    """
    keeps_unreached = objective.task.keeps_unreached
    reached: set[str] = set()

    def of_part(buffers: Arrays, carry: Any, batch: Batch, rng: Any) -> Gradients:
        def loss(trainable: Arrays, rows: Arrays) -> tuple[jax.Array, LossSums]:
            if keeps_unreached:
                trainable = {name: _noting_gradient(array, name, reached) for name, array in trainable.items()}
            out = objective(state.params | trainable, rows, buffers, carry, batch, rng, overrides)
            return out.loss * (scale / global_batch_size if out.weight is None else scale), out

        (dense, rows), out = jax.grad(loss, argnums=(0, 1), has_aux=True)(trainable, objective.local_rows)
        ids = {table.local_ids: out.buffers[table.local_ids] for table in objective.tables}
        after = {name: out.buffers[name] for name in buffers}
        return Gradients(dense, rows, ids, out.loss, out.weight, out.counted, out.metrics, out.carry, after)

    if parts == 1:
        gradients = of_part(state.buffers, carry, batch, keys(0, 1))
    else:
        gradients = _accumulated(
            of_part,
            state.buffers,
            _writable(objective, state.buffers),
            trainable,
            _split((carry, batch), parts),
            keys,
            parts,
        )
    # In the order of the parameters: all processes have to trace the same program.
    unreached = [name for name in trainable if keeps_unreached and name not in reached]
    return gradients._replace(unreached=dict.fromkeys(unreached))


def _writable(objective: Objective, buffers: Arrays) -> Arrays:
    """Returns the buffers that a module may write; the tables are read-only, so not part of the scan's carry."""
    tables = {table.weights for table in objective.tables}
    return {name: array for name, array in buffers.items() if name not in tables}


def _accumulated(
    of_part: Callable[[Arrays, Any, Batch, Any], Gradients],
    buffers: Arrays,
    writable: Arrays,
    trainable: Arrays,
    inputs: tuple[Any, Batch],
    keys: Keys,
    parts: int,
) -> Gradients:
    """Returns the gradients of all parts; `inputs`, carry and batch, have an axis of parts in front."""
    written: set[str] = set()

    def scan_body(accumulated: tuple[Arrays, Arrays], part: tuple[Any, tuple[Any, Batch]]) -> tuple[Any, Gradients]:
        total, before = accumulated
        number, (carry, batch) = part
        gradients = of_part(buffers | before, carry, batch, keys(number, parts))
        after = {name: gradients.buffers[name] for name in before}
        written.update(name for name in before if after[name] is not before[name])
        total = jax.tree.map(jnp.add, total, gradients.dense)
        return (total, after), gradients._replace(dense={}, buffers={})

    start = jax.tree.map(jnp.zeros_like, trainable), writable
    (dense, after), stacked = jax.lax.scan(scan_body, start, (jnp.arange(parts), inputs))
    return Gradients(
        dense=dense,
        rows=_merge(stacked.rows),
        row_ids=_merge(stacked.row_ids),
        loss=stacked.loss.sum(),
        weight=None if stacked.weight is None else stacked.weight.sum(),
        counted=None if stacked.counted is None else stacked.counted.sum(),
        metrics=jax.tree.map(lambda x: x.sum(0), stacked.metrics),
        carry=_merge(stacked.carry),
        buffers=buffers | {name: after[name] for name in written},
    )


def _noting_gradient(array: jax.Array, name: str, reached: set[str]) -> jax.Array:
    """Returns the array itself; its name is added to `reached` while a gradient is traced that arrives at it."""

    @jax.custom_vjp
    def same(array: jax.Array) -> jax.Array:
        return array

    def forward(array: Any) -> tuple[jax.Array, None]:
        return array.value, None

    def backward(_: None, gradient: Any) -> tuple[jax.Array]:
        if isinstance(gradient, SymbolicZero):
            return (jnp.zeros(gradient.shape, cast(Any, gradient.dtype)),)
        reached.add(name)
        return (gradient,)

    same.defvjp(forward, backward, symbolic_zeros=True)
    return same(array)


def _merge(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _split(tree: Any, parts: int) -> Any:
    def split(x: jax.Array) -> jax.Array:
        if x.ndim == 0 or x.shape[0] % parts:
            raise UserError(
                f"accumulation_steps {parts} does not divide a batch or carry of shape {x.shape} on one device; "
                "use a divisor of the examples on a device"
            )
        return x.reshape(parts, -1, *x.shape[1:])

    return jax.tree.map(split, tree)
