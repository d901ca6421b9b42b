"""One training step and one evaluation: pure functions of state, batch and key that name a mesh axis, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bridge
from train_jax.core.gradients import gradients_of
from train_jax.core.guard import judged, kept_if
from train_jax.core.metrics import Metrics, halting_histogram, norms_by_group, parameter_groups
from train_jax.core.objective import Batch, Objective
from train_jax.core.state import Arrays, Learner
from train_jax.errors import UserError
from train_jax.optim.optimizer import RowGradients, average, schedule, sparse_sign_sgd, summed_by_row, trained
from train_jax.run.config import OptimConfig
from train_jax.tasks.puzzles.halting import curve_sums, halting_logits, scores

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
    accumulation_steps: int = 1,
    overrides: Mapping[str, optax.Schedule] | None = None,
) -> TrainStep:
    """`(learner, carry, batch, key) -> (learner, carry, metrics)`; carry and batch are one replica's share.

    `halt_max_steps`: how far the metrics count when sequences halted. `scales_loss`: as gradients in float16 want it.
    `accumulation_steps`: in how many parts a replica takes its share. `overrides`: numbers in the module's attributes
    that change with the step. A step whose loss or gradients are not finite leaves the learner as it was, all but its
    guard.
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

        def draws(part: Any, parts: int) -> bridge.ShardedKey:
            replicas = device_count * parts
            replica = jax.lax.axis_index(AXIS) * parts + part
            return bridge.ShardedKey(key, replica, replicas, global_batch_size // replicas)

        scale = learner.guard.loss_scale if scales_loss else 1.0
        out = gradients_of(
            objective,
            learner,
            trained(learner.params, config),
            carry,
            batch,
            draws,
            scale=scale / global_batch_size,
            parts=accumulation_steps,
            overrides={name: number(learner.step) for name, number in (overrides or {}).items()},
        )
        dense, local = jax.tree.map(lambda g: g / scale, (out.dense, out.local))
        sums = out.metrics | halting_histogram(out.carry, halt_max_steps)
        dense, sums, total_loss = summed_over_devices((dense, sums, out.loss))
        puzzle = _puzzle_gradients(objective, out.ids, local)
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


def several_steps(train_step: TrainStep) -> TrainStep:
    """The same over batches stacked along a new leading axis, in one dispatch; metrics come back stacked."""

    def train_steps(learner: Learner, carry: Any, batches: Batch, key: jax.Array) -> tuple[Learner, Any, Metrics]:
        def one(state: tuple[Learner, Any], batch: Batch) -> tuple[tuple[Learner, Any], Metrics]:
            learner, carry, metrics = train_step(*state, batch, key)
            return (learner, carry), metrics

        (learner, carry), metrics = jax.lax.scan(one, (learner, carry), batches)
        return learner, carry, metrics

    return train_steps


def summed_over_devices(tree: Any) -> Any:
    """The sum of every leaf over all replicas, by one collective: as many as there are leaves wait for each other.

    Counts travel as floats, which hold them exactly up to 2^24.
    """
    leaves, structure = jax.tree.flatten(tree)
    dtype = jnp.result_type(float, *(leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)))
    flat = jax.lax.psum(jnp.concatenate([leaf.astype(dtype).ravel() for leaf in leaves]), AXIS)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = [
        flat[end - leaf.size : end].reshape(leaf.shape).astype(jnp.int32 if leaf.dtype == bool else leaf.dtype)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


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


def _puzzle_gradients(objective: Objective, ids: Arrays, local: Arrays) -> dict[str, RowGradients]:
    """For each puzzle table the rows in the whole batch, by the table's name."""
    return {
        table.weights: summed_by_row(
            *jax.lax.all_gather((ids[table.local_ids], local[table.local_weights]), AXIS, tiled=True)
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

    Metrics are sums over all replicas, with `halting_curve` what halting earlier would give; outputs are this
    replica's, a leading axis for the ACT steps. `batch` may tell in `is_example` which rows are no padding.
    """

    def eval_step(learner: Learner, batch: Batch) -> tuple[Metrics, dict[str, jax.Array]]:
        batch, _ = _without_mask(batch)

        def act_step(carry, _):
            carry, metrics, outputs = objective.evaluate(learner.ema, learner.buffers, carry, batch)
            return carry, (metrics, outputs)

        carry = objective.initial_carry(learner.ema, learner.buffers, batch)
        _, (metrics, outputs) = jax.lax.scan(act_step, carry, length=max_steps)
        # Nothing halts in evaluation before the limit, so only the last step's metrics count anybody.
        last = jax.tree.map(lambda m: m[-1], metrics)
        curve = curve_sums(outputs["preds"], batch["labels"], halting_logits(outputs))
        return jax.lax.psum(last | {"halting_curve": curve}, AXIS), outputs

    return eval_step


class _Halting(NamedTuple):
    """A batch in which sequences halt one after the other."""

    carry: Any
    act_steps: jax.Array
    """Taken by the batch."""
    halted: jax.Array
    steps: jax.Array
    """Taken by each sequence until it halted."""
    outputs: dict[str, jax.Array]
    """What each sequence said when it halted, or last."""


def make_halting_eval_step(objective: Objective, max_steps: int, threshold_logit: float) -> EvalStep:
    """The same, where a sequence's answer is the one of the first ACT step with a halting logit above the threshold.

    A replica stops when all of its sequences have halted. Among the metrics `steps` are those that sequences took,
    `computed_steps` those that their replica did. Outputs have a leading axis of 1, and `steps`.
    """

    def eval_step(learner: Learner, batch: Batch) -> tuple[Metrics, dict[str, jax.Array]]:
        batch, is_example = _without_mask(batch)

        def act_step(carry: Any) -> tuple[Any, dict[str, jax.Array]]:
            carry, _, outputs = objective.evaluate(learner.ema, learner.buffers, carry, batch)
            return carry, outputs

        def goes_on(state: _Halting) -> jax.Array:
            return (state.act_steps < max_steps) & ~state.halted.all()

        # No collective in here: replicas leave after different numbers of rounds, and one would wait for the others.
        def one_more(state: _Halting) -> _Halting:
            carry, outputs = act_step(state.carry)
            act_steps = state.act_steps + 1
            kept = {
                name: jnp.where(state.halted.reshape(-1, *[1] * (new.ndim - 1)), state.outputs[name], new)
                for name, new in outputs.items()
            }
            steps = jnp.where(state.halted, state.steps, act_steps)
            halts = halting_logits(outputs) > threshold_logit
            return _Halting(carry, act_steps, state.halted | halts, steps, kept)

        carry = objective.initial_carry(learner.ema, learner.buffers, batch)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(act_step, carry)[1])
        none = jnp.zeros(len(is_example), jnp.int32)
        state = jax.lax.while_loop(
            goes_on, one_more, _Halting(carry, jnp.zeros((), jnp.int32), ~is_example, none, nothing)
        )
        found = scores(state.outputs["preds"], batch["labels"])
        believed = state.outputs["q_halt_logits"] >= 0
        metrics = {
            "count": found.labelled.sum(),
            "accuracy": found.accuracy.sum(),
            "exact_accuracy": found.exact.sum(),
            "q_halt_accuracy": (found.labelled & (believed == found.exact)).sum(),
            "steps": jnp.where(found.labelled, state.steps, 0).sum(),
            "computed_steps": found.labelled.sum() * state.act_steps,
        }
        outputs = state.outputs | {"steps": state.steps}
        return jax.lax.psum(metrics, AXIS), {name: value[None] for name, value in outputs.items()}

    return eval_step


def _without_mask(batch: Batch) -> tuple[Batch, jax.Array]:
    """What a module knows of a batch, and which of its rows are examples: all, if it does not say."""
    mask = batch.get("is_example", jnp.ones(len(batch["inputs"]), bool))
    return {name: value for name, value in batch.items() if name != "is_example"}, mask
