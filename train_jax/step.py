"""One training step and one evaluation: pure functions of state, batch and key that name a mesh axis, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

import bridge
from train_jax.config import OptimConfig
from train_jax.errors import UserError
from train_jax.guard import judged, kept_if
from train_jax.objective import Batch, Objective
from train_jax.optim import RowGradients, average, schedule, sparse_sign_sgd, summed_by_row, trained
from train_jax.state import Arrays, Learner
from train_jax.step_metrics import Metrics, halting_histogram, norms_by_group, parameter_groups

AXIS = "devices"
"""The axis the batch is split over."""

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
    halt_max_steps: int = 1,
    scales_loss: bool = False,
) -> TrainStep:
    """`(learner, carry, batch, key) -> (learner, carry, metrics)`; carry and batch are one replica's share.

    `halt_max_steps`: how far the metrics count when sequences halted. `scales_loss`: as gradients in float16 want it.
    A step whose loss or gradients are not finite leaves the learner as it was, all but its guard.
    """
    if config.freeze_weights and not objective.tables:
        raise UserError("optim.freeze_weights leaves nothing to learn: the model has no puzzle table; leave it out")
    move = _mover(optimizer, config, total_steps)
    dense_rate = schedule(config.lr, config, total_steps)
    groups = parameter_groups(trained(objective.params, config))
    growth_steps = config.loss_scale_growth_steps if scales_loss else None

    def train_step(learner: Learner, carry: Any, batch: Batch, key: jax.Array) -> tuple[Learner, Any, Metrics]:
        # What a skipped step drew may be what made it fail.
        key = jax.random.fold_in(key, learner.step + learner.guard.skipped_steps)
        rng = bridge.ShardedKey(key, jax.lax.axis_index(AXIS), device_count, global_batch_size // device_count)
        scale = learner.guard.loss_scale if scales_loss else 1.0

        def loss(moving, local_rows):
            out = objective(learner.params | moving, local_rows, learner.buffers, carry, batch, rng)
            return out.loss / global_batch_size * scale, out

        wanted = trained(learner.params, config), objective.local_rows
        gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(*wanted)
        dense, local = jax.tree.map(lambda g: g / scale, gradients)
        sums = out.metrics | halting_histogram(out.carry, halt_max_steps)
        dense, sums, total_loss = jax.lax.psum((dense, sums, out.loss), AXIS)
        puzzle = _puzzle_gradients(objective, out.buffers, local)
        grad_norm = norms_by_group(dense, groups)
        puzzle_grad_norm = jnp.asarray(optax.tree.norm([rows.sums for rows in puzzle.values()]))
        verdict = judged(learner.guard, total_loss, [grad_norm, puzzle_grad_norm], growth_steps)

        moved, updates = move(learner, verdict.good, dense, puzzle, out.buffers)
        metrics = {name: jnp.where(verdict.good, value, 0) for name, value in sums.items()}
        metrics |= verdict.metrics | {
            "lr": dense_rate(learner.step),
            "grad_norm": grad_norm,
            "puzzle_grad_norm": puzzle_grad_norm,
            "update_norm": norms_by_group(updates, groups),
            "param_norm": jnp.asarray(optax.tree.norm(moved.params)),
        }
        fresh = objective.initial_carry(learner.params, learner.buffers, batch)
        return moved._replace(guard=verdict.guard), kept_if(verdict.carry_good, out.carry, fresh), metrics

    return train_step


def _mover(optimizer: optax.GradientTransformation, config: OptimConfig, total_steps: int) -> Callable[..., Any]:
    """`(learner, good, dense, puzzle, buffers) -> (learner, updates)`: the learner after the step, or as it was."""
    puzzle_rate = schedule(config.puzzle_lr, config, total_steps)

    def move(
        learner: Learner, good: jax.Array, dense: Arrays, puzzle: dict[str, RowGradients], buffers: Arrays
    ) -> tuple[Learner, Arrays]:
        moving = trained(learner.params, config)
        updates, opt_state = optimizer.update(dense, learner.opt_state, moving)
        moving = cast(Arrays, optax.apply_updates(moving, updates))
        after = Learner(
            step=learner.step + 1,
            params=learner.params | moving,
            ema=average(learner.ema, moving, config.ema_decay),
            opt_state=opt_state,
            # Puzzle tables are large and change in few places: those are left out instead of the whole kept.
            buffers={n: b if n in puzzle else _agreed(buffers[n], b) for n, b in learner.buffers.items()},
            guard=learner.guard,
        )
        rate = puzzle_rate(learner.step)
        tables = {
            name: sparse_sign_sgd(learner.buffers[name], rows.only_if(good), rate, config.puzzle_weight_decay)
            for name, rows in puzzle.items()
        }
        learner = kept_if(good, after, learner)
        return learner._replace(buffers=learner.buffers | tables), cast(Arrays, updates)

    return move


def _puzzle_gradients(objective: Objective, buffers: Arrays, local: Arrays) -> dict[str, RowGradients]:
    """For each puzzle table the rows in the whole batch, by the table's name."""
    return {
        table.weights: summed_by_row(
            *jax.lax.all_gather((buffers[table.local_ids], local[table.local_weights]), AXIS, tiled=True)
        )
        for table in objective.tables
    }


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
