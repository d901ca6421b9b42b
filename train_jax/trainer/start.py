"""Builds the components of a run: task, module, optimizer, train steps and initial state."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train_jax.core.metrics import Groups, parameter_groups
from train_jax.core.objective import Objective
from train_jax.core.optim.chain import Optimizer, matrices_alike, trainable
from train_jax.core.sharding import Replicated, Sharded
from train_jax.core.state import TrainState, new_state
from train_jax.core.step import StepOptions, TrainStep, several_steps, step_of
from train_jax.errors import UserError
from train_jax.plugin import names_object
from train_jax.run.config import RunConfig
from train_jax.run.folder import is_run
from train_jax.run.model import build_objective, build_optimizer
from train_jax.run.restore import initial_weights
from train_jax.runtime.backend import host_device
from train_jax.runtime.batch_size import epochs_to_steps
from train_jax.runtime.clock import Clock
from train_jax.runtime.devices import Devices, devices_of
from train_jax.runtime.feed import Batches
from train_jax.runtime.placement import Placement, ShardedState
from train_jax.runtime.programs import Programs
from train_jax.storage.storage import path_of
from train_jax.task import Periodic, Task, task_class


@dataclasses.dataclass(frozen=True)
class Training:
    """The components of a run, before anything is compiled or written."""

    config: RunConfig
    task: Task
    devices: Devices
    total_steps: int
    objective: Objective
    """The module at the last variant of its schedule."""
    own_optimizer: Optimizer
    placement: Placement
    """Placement of the state between two steps."""

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return self.own_optimizer.transformation

    @property
    def groups(self) -> Groups:
        """Parameter groups whose norms are logged."""
        return parameter_groups(trainable(self.objective.params, self.config.optim))

    @property
    def batches(self) -> Batches:
        dispatch = self.config.compute.steps_per_dispatch
        parts = part_count(self.config, self.devices) if self.task.batches_by_device else 0
        return Batches(self.task, self.devices, total_steps=self.total_steps, steps_per_dispatch=dispatch, parts=parts)

    def initial_state(self, *, continues: bool = False, say: Callable[[str], None] = lambda _: None) -> TrainState:
        """Returns the initial state on the host; a copy, because steps donate their state.

        If `continues`, a checkpoint will replace the values, so `config.init_from` is not read. Otherwise raises
        `UserError` if the weights in `config.init_from` do not fit; `say` is called with what is changed in them.
        """
        with _memory_of_whole_state(self.config):
            params, buffers = jax.tree.map(jnp.copy, (self.objective.params, self.objective.buffers))
            state = new_state(
                params,
                buffers,
                self.optimizer,
                trainable=trainable(params, self.config.optim),
                keeps_ema=self.config.optim.ema_decay > 0,
                scales_loss=scales_loss(self.config),
            )
            source = "" if continues else self.config.init_from
            optimizer = self.config.init_optimizer
            return initial_weights(state, self.objective, source, say, self.config.init_only, optimizer=optimizer)

    def initial_carry(self, state: TrainState, batch: Any) -> Any:
        """Returns the initial carry with a device axis; `batch` is a result of `Devices.split_batch`."""
        initial_carry = self.objective.initial_carry
        one = jax.eval_shape(initial_carry, state.params, state.buffers, jax.tree.map(lambda x: x[0], batch))
        if not jax.tree.leaves(one):
            return one  # `pmap` with several processes refuses a function without results
        return self.devices.parallel_map(initial_carry)(state.params, state.buffers, self.devices.shard(batch))

    def evaluations(self) -> Sequence[Periodic]:
        """Returns the task's evaluations. Raises `UserError` for a cadence that no dispatch ends at."""
        evaluations = self.task.evaluations(self.objective, self.devices)
        dispatch = self.config.compute.steps_per_dispatch
        for each in evaluations:
            if each.every % dispatch:
                raise UserError(
                    f"the evaluation {each.name or 'of the test split'} every {each.every} steps does not end with a "
                    f"dispatch of {dispatch}; use a --compute.steps-per-dispatch that divides {each.every}"
                )
        return evaluations

    def train_step(self, objective: Objective | None = None) -> TrainStep:
        """Returns the step of one device; `objective` is that of another variant."""
        config = self.config
        objective = objective or self.objective
        options = StepOptions(
            total_steps=self.total_steps,
            global_batch_size=config.global_batch_size,
            device_count=self.devices.count,
            scales_loss=scales_loss(config),
            accumulation_steps=part_count(config, self.devices),
            sharding=self.placement.sharding,
            overrides=self.task.overrides(objective.fn.module, self.total_steps),
            rates=self.own_optimizer.rates,
        )
        return step_of(objective, self.own_optimizer, config.optim, options)

    def parallel_step(self, objective: Objective | None = None) -> Any:
        """Returns the step over all devices, with all optimizer steps of a dispatch; not yet compiled."""
        step = self.train_step(objective)
        dispatch = self.config.compute.steps_per_dispatch
        step = step if dispatch == 1 else several_steps(step)
        return self.devices.parallel_train_step(step, self.placement.axes)

    def programs(self, clock: Clock | None = None) -> Programs:
        """Returns the steps of all variants, which are compiled when they are needed."""

        compute = self.config.compute

        def is_last(variant: Any) -> bool:
            return variant is None or self.task.arch_of(variant) == self.config.arch

        def saved_at(variant: Any, steps: int) -> Path | None:
            whole = is_last(variant) and steps == compute.steps_per_dispatch
            return path_of(compute.load) if compute.load and whole else None

        def step_at(variant: Any) -> Any:
            if is_last(variant):
                return self.parallel_step()
            size = part_size(self.config, self.devices)
            platform = self.devices.platform
            return self.parallel_step(build_objective(self.config, self.task, size, variant=variant, platform=platform))

        return Programs(self.devices, step_at, self.task.variants(self.total_steps), clock, saved_at)


def start(config: RunConfig, task: Task | None = None, devices: Devices | None = None) -> Training:
    """Opens the data, builds the module and checks that the run can be trained. Writes nothing.

    Raises `UserError` for invalid configurations and data.
    """
    devices = devices or devices_of(config.compute)
    if config.compute.load and config.compute.runner != "shard_map":
        raise UserError(f"--compute.load {config.compute.load} needs --compute.runner shard_map: pmap loads no program")
    if config.compute.load:
        devices.check_saved(path_of(config.compute.load))
    if config.init_optimizer and not (config.init_from and is_run(config.init_from)):
        raise UserError(f"init_optimizer needs a run in init_from, which is {config.init_from!r}; name a run folder")
    task = task or task_class(config.task)(config)
    for size in (config.global_batch_size, config.eval_batch_size):
        devices.local_batch_size(size)
    task.check(config, devices)
    if task.needs_state and config.compute.steps_per_dispatch > 1:
        raise UserError(
            f"the batches of task {config.task} depend on the model after every step, and compute.steps_per_dispatch "
            f"is {config.compute.steps_per_dispatch}; use 1"
        )
    if task.needs_state and config.compute.shard:
        raise UserError(f"the batches of task {config.task} depend on the model, which --shard divides; omit it")
    training = assemble(config, task, devices)
    if config.keep_best:
        _check_keep_best(config, task.evaluated, training.evaluations(), training.total_steps)
    training.train_step()  # raises the errors of optimizer, schedules and groups
    jax.eval_shape(training.optimizer.init, trainable(training.objective.params, config.optim))  # only for its errors
    return training


def _check_keep_best(
    config: RunConfig, known: Sequence[str], evaluations: Sequence[Periodic], total_steps: int
) -> None:
    """Raises `UserError` unless an evaluation during training has the figure of `keep_best`.

    `known` are the figures of the evaluations, if the task names them; that of another evaluation than the main one
    begins with its name.
    """
    figure = config.keep_best.removeprefix("-")
    if known and figure not in known:
        raise UserError(f"keep_best is {config.keep_best}, which no evaluation has; use one of {', '.join(known)}")
    own = [each for each in evaluations if each.name and figure.startswith(f"{each.name}/")]
    evaluated = next((each.every for each in (*own, *evaluations)), 0)
    saved = config.checkpoint_every_steps
    if not evaluated or (math.lcm(evaluated, saved) >= total_steps and not config.checkpoint_every_minutes):
        raise UserError(
            f"keep_best {config.keep_best} needs checkpoints at steps that are evaluated, before the last of "
            f"{total_steps}: its evaluation is every {evaluated} steps (eval_every_steps), a checkpoint every {saved} "
            "(checkpoint_every_steps); make one a multiple of the other, or omit keep_best"
        )


def assemble(config: RunConfig, task: Task, devices: Devices) -> Training:
    """Builds the module and the optimizer, without reading data. Raises `UserError` if the sizes do not fit."""
    total_steps = config.steps or epochs_to_steps(task.examples_per_epoch, config.epochs, config.global_batch_size)
    with _memory_of_whole_state(config):
        objective = build_objective(config, task, part_size(config, devices), platform=devices.platform)
    placement = _placement(config, objective, devices)
    optimizer = build_optimizer(config, task, objective, total_steps, placement.sharding.norm)
    return Training(config, task, devices, total_steps, objective, optimizer, placement)


def _memory_of_whole_state(config: RunConfig) -> contextlib.AbstractContextManager:
    """Sets the default device for arrays of the whole state: the host if a device may not have the memory."""
    divided = config.compute.shard_optimizer or config.compute.shard
    return jax.default_device(host_device()) if divided else contextlib.nullcontext()


def _placement(config: RunConfig, objective: Objective, devices: Devices) -> Placement:
    named = {name for name, _ in objective.fn.module.named_parameters()}
    frozen = {name: array for name, array in objective.buffers.items() if name in named}
    by_name = devices.placement_by_name(objective.params | frozen)
    if by_name is not None:
        return by_name
    if not config.compute.shard_optimizer:
        return Placement(devices, Replicated(config.compute.reduction))
    for rule in (config.optim.optimizer, *(group.optimizer or "" for group in config.optim.groups)):
        if names_object(rule):
            raise UserError(
                f"compute.shard_optimizer cannot be used with the optimizer {rule}, which may need whole parameters; "
                "use a built-in one such as adamw, or omit compute.shard_optimizer"
            )
    if config.optim.skip_zero_gradients:
        raise UserError("optim.skip_zero_gradients needs whole gradients; omit it, or compute.shard_optimizer")
    params = objective.params
    optim = config.optim
    sharding = Sharded(params, trainable(params, optim), matrices_alike(params, optim), devices.count)
    return ShardedState(devices, sharding)


def part_size(config: RunConfig, devices: Devices) -> int:
    """Returns the number of examples that a device processes at once."""
    return devices.local_batch_size(config.global_batch_size) // part_count(config, devices)


def part_count(config: RunConfig, devices: Devices) -> int:
    """Returns the number of parts in which a device processes its examples one after the other."""
    local_batch = devices.local_batch_size(config.global_batch_size)
    least = config.compute.accumulation_steps
    if local_batch % least:
        raise UserError(
            f"compute.accumulation_steps {least} does not divide the {local_batch} examples on a device; "
            f"use a divisor of {local_batch}"
        )
    at_once = config.compute.cpu_examples
    if devices.platform != "cpu" or not at_once or config.debug_nans:  # debug_nans repeats a step as one part
        return least
    counts = range(least, local_batch + 1, least)
    return next(count for count in counts if local_batch % count == 0 and local_batch // count <= at_once)


def scales_loss(config: RunConfig) -> bool:
    """Returns whether gradients in the run's `forward_dtype` need loss scaling, or the task asks for it."""
    in_float16 = getattr(config.arch, "forward_dtype", None) == "float16"
    return in_float16 or getattr(config.task_config, "loss_scale", "none") == "dynamic"
