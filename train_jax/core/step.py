"""The training step: a pure function of state, carry, batch and key, for any task, with one mesh axis."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

import bridge
from train_jax.core.gradients import Gradients, Keys, compute_gradients
from train_jax.core.guard import check_finite, where_tree
from train_jax.core.metrics import Metrics, norms_by_group, parameter_groups
from train_jax.core.objective import Batch, Objective
from train_jax.core.optim.chain import Optimizer, logged_learning_rates, trainable
from train_jax.core.optim.config import OptimConfig
from train_jax.core.optim.rules import RowGradients, sparse_sign_sgd, sum_by_row, update_ema
from train_jax.core.optim.schedule import learning_rate
from train_jax.core.reduction import AXIS
from train_jax.core.sharding import Replicated, Sharding
from train_jax.core.state import Arrays, TrainState
from train_jax.errors import UserError

TrainStep = Callable[[TrainState, Any, Batch, jax.Array], tuple[TrainState, Any, Metrics]]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The options of a training step in addition to its objective and optimizer."""

    total_steps: int
    global_batch_size: int
    device_count: int
    scales_loss: bool = False
    """True if the loss is scaled, which gradients in float16 need."""
    accumulation_steps: int = 1
    """Number of parts in which a replica processes its examples."""
    sharding: Sharding = dataclasses.field(default_factory=Replicated)
    """Placement of parameters, averages and optimizer state."""
    overrides: Mapping[str, optax.Schedule] = dataclasses.field(default_factory=dict)
    """Schedules of numeric module attributes, by dotted path."""
    replays_draws: bool = False
    """True if the key of a step is the list of its random draws, as `bridge.Functional` takes them."""
    rates: Mapping[str, optax.Schedule] = dataclasses.field(default_factory=dict)
    """Learning rates to log of an optimizer that `config` does not describe; empty for those of `config`."""
    part: str = ""
    """The step trains only the parameters below this name; empty for all."""


def make_train_step(
    objective: Objective, optimizer: optax.GradientTransformation, config: OptimConfig, options: StepOptions
) -> TrainStep:
    """Returns the step `(state, carry, batch, key) -> (state, carry, metrics)` of one replica.

    A step with a non-finite loss or gradient changes only the guard of the state; one without targets changes nothing.
    """
    of_part = functools.partial(_trained_part, config=config, part=options.part)
    trained = of_part(objective.params)
    _require_trained(objective, trained, config)
    update = _make_update(optimizer, config, options.total_steps, of_part)
    rates = options.rates or logged_learning_rates(trained, config, options.total_steps)
    groups = {options.part: tuple(trained)} if options.part else parameter_groups(trained)
    sharding = options.sharding
    growth_steps = config.loss_scale_growth_steps if options.scales_loss else None

    def train_step(state: TrainState, carry: Any, batch: Batch, key: jax.Array) -> tuple[TrainState, Any, Metrics]:
        # Skipped steps count, because their random numbers may have caused the failure.
        key = key if options.replays_draws else jax.random.fold_in(key, state.step + state.guard.skipped_steps)
        scale = state.guard.loss_scale if options.scales_loss else 1.0
        whole = state._replace(params=sharding.whole(state.params))
        out = compute_gradients(
            objective,
            whole,
            of_part(whole.params),
            carry,
            batch,
            _keys_of_parts(key, options),
            scale=scale,
            global_batch_size=options.global_batch_size,
            parts=options.accumulation_steps,
            overrides={name: schedule(state.step) for name, schedule in options.overrides.items()},
        )
        dense, rows, sums, loss, counted = _summed(out, scale, sharding)
        sparse = _sum_sparse_gradients(objective, out.row_ids, rows)
        grad_norm = norms_by_group(sharding.squares(dense), groups)
        sparse_grad_norm = jnp.asarray(optax.tree.norm([rows.sums for rows in sparse.values()]))
        check = check_finite(state.guard, loss, [grad_norm, sparse_grad_norm], growth_steps, counted)
        after, updates = update(state, check.good, dense, sparse, out.buffers, out.unreached)
        metrics = {name: jnp.where(check.finite, value, 0) for name, value in sums.items()}
        metrics |= check.metrics | {
            "lr": jnp.array([rate(state.step) for rate in rates.values()], float),
            "grad_norm": grad_norm,
            "sparse_grad_norm": sparse_grad_norm,
            "update_norm": norms_by_group(sharding.squares(updates), groups),
            "param_norm": sharding.norm(after.params),
        }
        reset = objective.initial_carry(whole.params, state.buffers, batch)
        return after._replace(guard=check.guard), where_tree(check.carry_good, out.carry, reset), metrics

    return train_step


def _trained_part(params: Arrays, config: OptimConfig, part: str) -> Arrays:
    """Returns the trainable parameters, of the part alone if there is one."""
    trained = trainable(params, config)
    below = f"{part}."
    return {n: a for n, a in trained.items() if n.startswith(below)} if part else trained


def _require_trained(objective: Objective, trained: Arrays, config: OptimConfig) -> None:
    if not trained and not objective.tables:
        raise UserError(
            f"optim.freeze {config.freeze!r} leaves nothing to train: the model has no sparse table; freeze less"
        )


def _keys_of_parts(key: jax.Array, options: StepOptions) -> Keys:
    """Returns the function of the random key of a part of this replica, and the number of parts."""

    def keys(part: Any, parts: int) -> Any:
        if options.replays_draws:
            return key
        replicas = options.device_count * parts
        replica = jax.lax.axis_index(AXIS) * parts + part
        return bridge.ShardedKey(key, replica, replicas, options.global_batch_size // replicas)

    return keys


def _summed(out: Gradients, scale: Any, sharding: Sharding) -> tuple[Arrays, Arrays, Metrics, jax.Array, Any]:
    """Returns the gradients of the whole batch, dense and of the rows of sparse tables, with metrics and loss summed
    over the replicas, and the weight by which targets are counted."""
    dense, rows = jax.tree.map(lambda g: g / scale, (out.dense, out.rows))
    rest = (out.metrics, out.loss, out.weight, out.counted)
    dense, (sums, loss, weight, counted) = sharding.sum_gradients(dense, rest)
    if weight is not None:
        divisor = jnp.where(weight > 0, weight, 1)
        dense, rows = jax.tree.map(lambda g: (g / divisor).astype(g.dtype), (dense, rows))
    return dense, rows, sums, loss, weight if counted is None else counted


def step_of(objective: Objective, optimizer: Optimizer, config: OptimConfig, options: StepOptions) -> TrainStep:
    """Returns the step of an optimizer, which may have several parts."""
    if not optimizer.parts:
        return make_train_step(objective, optimizer.transformation, config, options)
    steps = {}
    for name, transformation in optimizer.parts.items():
        own = dataclasses.replace(options, part=name, rates={name: optimizer.rates[name]})
        steps[name] = make_train_step(objective.of_part(name), transformation, config, own)
    return in_order(steps, parameter_groups(trainable(objective.params, config)))


def in_order(steps: Mapping[str, TrainStep], groups: Iterable[str]) -> TrainStep:
    """Returns a step of several parts, such as the models of a GAN, which train their parameters one after the other.

    `steps`: the step of each part, by its name. Their optimizer states are in a dict. `groups`: the names in the order
    in which norms and learning rates are logged. A random key is split; a list of draws is given by part.
    """

    def train_step(state: TrainState, carry: Any, batch: Batch, key: Any) -> tuple[TrainState, Any, Metrics]:
        before = state.step
        found = {}
        for number, (name, step) in enumerate(steps.items()):
            own_key = key[name] if isinstance(key, dict) else jax.random.fold_in(key, number)
            states: Any = state.opt_state
            part = state._replace(step=before, opt_state=states[name])
            after, carry, found[name] = step(part, carry, batch, own_key)
            state = after._replace(opt_state={**states, name: after.opt_state})
        metrics: Metrics = {}
        for own in found.values():
            counts = {name: metrics[name] + own[name] for name in ("skipped_steps", "empty_steps") if name in metrics}
            metrics |= own | counts
        for name in ("lr", "grad_norm", "update_norm"):
            metrics[name] = jnp.concatenate([found[group][name] for group in groups])
        return state, carry, metrics

    return train_step


def several_steps(train_step: TrainStep) -> TrainStep:
    """Scans the step over batches stacked along a new leading axis, in one dispatch; metrics are stacked too."""

    def train_steps(state: TrainState, carry: Any, batches: Batch, key: jax.Array) -> tuple[TrainState, Any, Metrics]:
        def scan_body(before: tuple[TrainState, Any], batch: Batch) -> tuple[tuple[TrainState, Any], Metrics]:
            state, carry, metrics = train_step(*before, batch, key)
            return (state, carry), metrics

        (state, carry), metrics = jax.lax.scan(scan_body, (state, carry), batches)
        return state, carry, metrics

    return train_steps


def _make_update(
    optimizer: optax.GradientTransformation, config: OptimConfig, total_steps: int, of_part: Callable[[Arrays], Arrays]
) -> Callable[..., Any]:
    """Returns `(state, good, dense, sparse, buffers, kept) -> (state, updates)`; the state is unchanged unless `good`,
    and the parameters whose names are in `kept` do not change."""
    sparse_rate = learning_rate(config.sparse_lr, config, total_steps)

    def update(
        state: TrainState,
        good: jax.Array,
        dense: Arrays,
        sparse: dict[str, RowGradients],
        buffers: Arrays,
        kept: Iterable[str],
    ) -> tuple[TrainState, Arrays]:
        trained = of_part(state.params)
        updates, opt_state = optimizer.update(dense, state.opt_state, trained)
        updates = cast(Arrays, updates) | {name: jnp.zeros_like(trained[name]) for name in kept}
        trained = cast(Arrays, optax.apply_updates(trained, updates))
        after = TrainState(
            step=state.step + 1,
            params=state.params | trained,
            ema=update_ema(state.ema, trained, config.ema_decay) if state.ema else {},
            opt_state=opt_state,
            # Sparse tables are large and few rows change, so rows of a bad step are dropped instead of a select.
            buffers={n: b if n in sparse else _agree(buffers[n], b) for n, b in state.buffers.items()},
            guard=state.guard,
        )
        rate = sparse_rate(state.step)
        tables = {
            name: sparse_sign_sgd(state.buffers[name], rows.only_if(good), rate, config.sparse_weight_decay)
            for name, rows in sparse.items()
        }
        state = where_tree(good, after, state)
        return state._replace(buffers=state.buffers | tables), cast(Arrays, updates)

    return update


def _sum_sparse_gradients(objective: Objective, ids: Arrays, rows: Arrays) -> dict[str, RowGradients]:
    """Returns the gradients of the rows in the global batch, for each sparse table by name."""
    return {
        table.weights: sum_by_row(
            *jax.lax.all_gather((ids[table.local_ids], rows[table.local_weights]), AXIS, tiled=True)
        )
        for table in objective.tables
    }


def _agree(after: jax.Array, before: jax.Array) -> jax.Array:
    """Returns a buffer after the step: if it was written, the mean (statistics) or maximum (counters) over replicas."""
    if after is before:
        return before
    return jax.lax.pmean(after, AXIS) if jnp.issubdtype(after.dtype, jnp.floating) else jax.lax.pmax(after, AXIS)
