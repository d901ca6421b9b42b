"""One training step and one evaluation: pure functions of state, batch and key that name a mesh axis, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

import bridge
from train_jax.config import OptimConfig
from train_jax.objective import Batch, Objective
from train_jax.optim import average, schedule, sparse_sign_sgd
from train_jax.state import Arrays, Learner

AXIS = "devices"
"""The axis the batch is split over."""

Metrics = dict[str, jax.Array]
TrainStep = Callable[[Learner, Any, Batch, jax.Array], tuple[Learner, Any, Metrics]]
EvalStep = Callable[[Learner, Batch], tuple[Metrics, dict[str, jax.Array]]]


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    config: OptimConfig,
    *,
    total_steps: int,
    global_batch_size: int,
    device_count: int,
) -> TrainStep:
    """`(learner, carry, batch, key) -> (learner, carry, metrics)`; carry and batch are one replica's share."""
    puzzle_rate = schedule(config.puzzle_lr, config, total_steps)
    dense_rate = schedule(config.lr, config, total_steps)

    def train_step(learner: Learner, carry: Any, batch: Batch, key: jax.Array) -> tuple[Learner, Any, Metrics]:
        rows = global_batch_size // device_count
        rng = bridge.ShardedKey(jax.random.fold_in(key, learner.step), jax.lax.axis_index(AXIS), device_count, rows)

        def loss(params, local_rows):
            out = objective(params, local_rows, learner.buffers, carry, batch, rng)
            return out.loss / global_batch_size, out

        gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(learner.params, objective.local_rows)
        dense, local = gradients
        dense, metrics = jax.lax.psum((dense, out.metrics), AXIS)

        updates, opt_state = optimizer.update(dense, learner.opt_state, learner.params)
        params = cast(Arrays, optax.apply_updates(learner.params, updates))

        buffers = {name: _agreed(out.buffers[name], before) for name, before in learner.buffers.items()}
        for table in objective.tables:
            ids, row_gradients = jax.lax.all_gather(
                (out.buffers[table.local_ids], local[table.local_weights]), AXIS, tiled=True
            )
            buffers[table.weights] = sparse_sign_sgd(
                buffers[table.weights], ids, row_gradients, puzzle_rate(learner.step), config.puzzle_weight_decay
            )

        ema = average(learner.ema, params, config.ema_decay)
        metrics |= {
            "lr": dense_rate(learner.step),
            "grad_norm": optax.tree.norm(dense),
            "update_norm": optax.tree.norm(updates),
            "param_norm": optax.tree.norm(params),
        }
        return Learner(learner.step + 1, params, ema, opt_state, buffers), out.carry, metrics

    return train_step


def _agreed(after: jax.Array, before: jax.Array) -> jax.Array:
    """A buffer after the step; one that the replicas wrote (running statistics, counters) is their mean or largest."""
    if after is before:
        return before
    return jax.lax.pmean(after, AXIS) if jnp.issubdtype(after.dtype, jnp.floating) else jax.lax.pmax(after, AXIS)


def make_eval_step(objective: Objective, max_steps: int) -> EvalStep:
    """`(learner, batch) -> (metrics, outputs)` after `max_steps` ACT steps with the averaged weights.

    Metrics are sums over all replicas; outputs are this replica's, a leading axis for the ACT steps.
    """

    def eval_step(learner: Learner, batch: Batch) -> tuple[Metrics, dict[str, jax.Array]]:
        def act_step(carry, _):
            carry, metrics, outputs = objective.evaluate(learner.ema, learner.buffers, carry, batch)
            return carry, (metrics, outputs)

        carry = objective.initial_carry(learner.ema, learner.buffers, batch)
        _, (metrics, outputs) = jax.lax.scan(act_step, carry, length=max_steps)
        # Nothing halts in evaluation before the limit, so only the last step's metrics count anybody.
        last = jax.tree.map(lambda m: m[-1], metrics)
        return jax.lax.psum(last, AXIS), outputs

    return eval_step
