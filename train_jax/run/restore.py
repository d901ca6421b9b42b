"""Reads trained weights: one checkpoint of a run or the mean of several, or the initial weights of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import bridge
from train_jax.core.guard import new_guard
from train_jax.core.objective import Objective
from train_jax.core.optim.chain import trainable
from train_jax.core.state import Arrays, TrainState, new_state
from train_jax.errors import UserError
from train_jax.run.checkpoint import Best, Checkpoints
from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder, complete_steps, is_run, read_run
from train_jax.run.model import build_objective, build_optimizer
from train_jax.storage.files import local_copy
from train_jax.storage.json_files import read_object
from train_jax.storage.storage import path_of
from train_jax.task import Task, task_class

NEWEST = "newest"


def choose(checkpoints: Checkpoints, wanted: str) -> int:
    """Returns the step of a checkpoint: `newest`, `best` (by the figure that the run keeps the best by), or a number.

    Raises `UserError` if there is no such checkpoint.
    """
    steps = checkpoints.steps()
    folder = checkpoints.folder
    if wanted == NEWEST and steps:
        return steps[-1]
    if wanted == "best":
        best = _best(checkpoints)
        if best is None:
            raise UserError(
                f"{folder} has no best checkpoint; train with --keep-best exact_accuracy, or use one of "
                f"{', '.join(map(str, steps))}"
            )
        wanted = str(best.step)
    if not wanted.isdecimal() or int(wanted) not in steps:
        shown = ", ".join(map(str, [*steps, NEWEST, "best"]))
        raise UserError(f"{folder} has no checkpoint of step {wanted}; use one of {shown}")
    return int(wanted)


def chosen_steps(checkpoints: Checkpoints, step: str, average: Sequence[int], average_last: int) -> list[int]:
    """Returns the steps of the chosen checkpoints, newest last: one by `choose`, or those that `restore` averages.

    Raises `UserError` if there are no such checkpoints, and for several ways of choosing at once.
    """
    if not (average or average_last):
        return [choose(checkpoints, step)]
    if step != NEWEST or (average and average_last):
        raise UserError("several options choose checkpoints; give only one of --step, --average and --average-last")
    steps = checkpoints.steps()
    if average_last > len(steps):
        raise UserError(
            f"average_last is {average_last}, and {checkpoints.folder} has {len(steps)} checkpoints; use at most "
            f"{len(steps)}, or train with a larger --keep-checkpoints"
        )
    return steps[-average_last:] if average_last else sorted({choose(checkpoints, str(step)) for step in average})


def results_of(steps: Sequence[int]) -> str:
    """Returns the name of the folder with the results of these checkpoints."""
    if len(steps) == 1:
        return f"at-step-{steps[0]}"
    return f"average-of-{'-'.join(map(str, steps))}" if len(steps) <= 8 else f"average-of-{len(steps)}-to-{steps[-1]}"


def _best(checkpoints: Checkpoints) -> Best | None:
    """Returns the best checkpoint according to the newest checkpoint with intact notes."""
    for step in reversed(checkpoints.steps()):
        with contextlib.suppress(Exception):  # whatever Orbax and JSON raise for damaged files
            notes = checkpoints.notes(step)
            return Best(**notes["best"]) if "best" in notes else None
    return None


@dataclasses.dataclass(frozen=True)
class Restored:
    """A run with the state of a checkpoint, on the host."""

    folder: RunFolder
    config: RunConfig
    task: Task
    objective: Objective
    state: TrainState
    step: int
    """The step of the checkpoint, the newest one of several."""
    data: str = ""
    """The fingerprint of the data that the run was trained on; empty if the checkpoint does not have it."""
    weights_file: str = ""
    """The file that `with_weights` got; empty for the weights of the checkpoint."""

    @property
    def weights(self) -> str:
        """The name of the weights, for messages."""
        if self.weights_file:
            return f"weights of {self.weights_file}"
        return "averaged weights" if self.config.optim.ema_decay else "raw weights"

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with the averaged weights, in evaluation mode; returns its outputs."""
        params, buffers = jax.tree.map(jnp.asarray, (self.state.eval_params, self.state.buffers))
        call = self.objective.call(params, buffers, train=False)
        return call(*args, **kwargs)[0]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the averaged weights with PyTorch names, for `load_state_dict(strict=True)`."""
        fn = self.objective.fn
        return bridge.state_dict(fn, fn.params | self.state.eval_params, fn.buffers | self.state.buffers)

    def with_weights(self, weights: Mapping[str, torch.Tensor], source: str) -> Restored:
        """Returns the same run with the weights of a file, by PyTorch names. Raises `UserError` if they do not fit."""
        params, buffers = _into(self.objective, self.state, weights, source)
        return dataclasses.replace(
            self, state=self.state._replace(params=params, ema=params, buffers=buffers), weights_file=source
        )

    def in_float32(self) -> Restored:
        """Returns the same run with `forward_dtype` float32."""
        return self.with_arch(dataclasses.replace(self.config.arch, forward_dtype="float32"))

    def with_arch(self, arch: Any) -> Restored:
        """Returns the run with another configuration of the model, which has the same weights."""
        config = dataclasses.replace(self.config, arch=arch)
        task = task_class(config.task)(config, self.task.facts)
        objective = build_objective(config, task, 1)
        buffers = {name: array.astype(objective.buffers[name].dtype) for name, array in self.state.buffers.items()}
        state = self.state._replace(buffers=buffers)
        return dataclasses.replace(self, config=config, task=task, objective=objective, state=state)


def restore(
    run_dir: str,
    *,
    step: str | int = NEWEST,
    average: Sequence[int] = (),
    average_last: int = 0,
    batch_size: int = 1,
    whole_state: bool = False,
) -> Restored:
    """Returns a run at a checkpoint: only the weights to evaluate and the buffers, or with `whole_state` everything.

    `step`: `newest`, `best`, or the step of a checkpoint. `average`: the steps of checkpoints whose mean is taken, or
    `average_last`: the number of newest ones; see `mean_weights`. `batch_size`: examples on one device in a training
    batch; has no effect on evaluation. The results of chosen checkpoints have a folder of their own.

    Raises `UserError` if there is no run, no such checkpoint, or a checkpoint of another model.
    """
    folder, config = read_run(run_dir)
    if not folder.data.is_file():
        raise UserError(f"{folder.data} is missing; start the run again with `trm train` to write it")
    make_task = task_class(config.task)
    remedy = "use a run folder that `trm train` wrote"
    task = make_task(config, read_object(folder.data, getattr(make_task, "fact_kinds", {}), remedy=remedy))
    objective = build_objective(config, task, batch_size)
    params = objective.params
    if not complete_steps(folder.checkpoints):
        raise UserError(f"{run_dir} has no checkpoint yet; train it with `trm train`")
    averaged = config.optim.ema_decay > 0
    with contextlib.closing(Checkpoints(folder, writes=False)) as checkpoints:
        steps = chosen_steps(checkpoints, str(step), average, average_last)
        if whole_state:
            optimizer = build_optimizer(config, task, objective, 1).transformation
            like = new_state(
                params, objective.buffers, optimizer, trainable=trainable(params, config.optim), keeps_ema=averaged
            )
            state = checkpoints.restore_state(steps[-1], like)
        else:
            read = partial(checkpoints.restore_model, params=params, buffers=objective.buffers, averaged=averaged)
            weights, buffers = mean_weights(map(read, steps), {table.weights for table in objective.tables})
            state = TrainState(jnp.int32(steps[-1]), weights, weights, (), buffers, new_guard(scales_loss=False))
        data = str(checkpoints.notes(steps[-1]).get("data", ""))
    _refuse_non_finite(f"{run_dir} at step {steps[-1]}", state.eval_params, state.buffers)
    if str(step) != NEWEST or average or average_last:
        folder = dataclasses.replace(folder, weights_of=results_of(steps))
    return Restored(folder, config, task, objective, state, steps[-1], data)


def results_folder(run_dir: str, step: str) -> RunFolder:
    """Returns the run's folder with the results of one of its checkpoints, as `restore` gives it. Reads no weights.

    Raises `UserError` if there is no run or no such checkpoint.
    """
    folder, _ = read_run(run_dir)
    if step == NEWEST:
        return folder
    with contextlib.closing(Checkpoints(folder, writes=False)) as checkpoints:
        return dataclasses.replace(folder, weights_of=results_of(chosen_steps(checkpoints, step, (), 0)))


def mean_weights(read: Iterable[tuple[Arrays, Arrays]], tables: Collection[str]) -> tuple[Arrays, Arrays]:
    """Returns the mean of the parameters and of the sparse `tables` of several checkpoints, given oldest first.

    The sums have 64 bits. All other buffers are those of the newest one.
    """
    sums: dict[str, np.ndarray] = {}
    count = 0
    params = {}
    buffers = {}
    for params, buffers in read:
        count += 1
        for name, array in (params | {name: buffers[name] for name in tables}).items():
            sums[name] = sums[name] + np.asarray(array, np.float64) if name in sums else np.asarray(array, np.float64)
    if count == 1:
        return params, buffers
    means: dict[str, Any] = {
        name: (sums[name] / count).astype(array.dtype) for name, array in (params | buffers).items() if name in sums
    }
    return {name: means[name] for name in params}, buffers | {name: means[name] for name in tables}


def initial_weights(
    state: TrainState,
    objective: Objective,
    source: str,
    say: Callable[[str], None] = lambda _: None,
    only: str = "",
    *,
    optimizer: bool = False,
) -> TrainState:
    """Returns the new state with the weights of a run folder or a weights file; unchanged for an empty `source`.

    `only`: regular expression for the whole names of the tensors that are taken; empty for all, which must then fit.
    `optimizer`: also take the optimizer's state of the run; its schedules begin anew.
    Every row of a sparse table with another number of rows is the mean of those rows, as in the published code;
    `say` is called with one line about it. Raises `UserError` for weights of another model.
    """
    if not source:
        return state
    if is_run(source):
        run = restore(source, whole_state=optimizer)
        weights = run.state_dict()
        if optimizer:
            state = _with_optimizer(state, run.state.opt_state, source)
    else:
        try:
            with local_copy(path_of(source)) as local:
                weights = bridge.load_weights(local)
        except bridge.BridgeError as error:
            raise UserError(f"init_from {source}: {error}; give a run folder, a .safetensors or a .pt file") from error
    fn = objective.fn
    own = bridge.state_dict(fn, fn.params, fn.buffers)
    if only:
        taken = {name: tensor for name, tensor in weights.items() if re.fullmatch(only, name)}
        if not taken:
            raise UserError(f"init_only {only} matches no name in {source}, such as {next(iter(weights))}; correct it")
        say(f"init_from {source}: {len(taken)} of {len(weights)} tensors, by init_only {only}")
        weights = {**own, **taken}
    tables = {table.weights for table in objective.tables}
    resized = {}
    for name in sorted(tables & weights.keys() & own.keys()):
        theirs = weights[name]
        ours = own[name]
        if len(theirs) not in (0, len(ours)) and theirs.shape[1:] == ours.shape[1:]:
            resized[name] = theirs.double().mean(0, keepdim=True).to(ours.dtype).expand(ours.shape).contiguous()
            say(
                f"init_from {source}: {name} has {len(theirs):,} rows, here {len(ours):,}; every row starts as the "
                "mean of those"
            )
    params, buffers = _into(objective, state, {**weights, **resized}, f"init_from {source}")
    ema = jax.tree.map(jnp.copy, params) if state.ema else {}  # copies, because a step donates the buffers of both
    return state._replace(params=params, ema=ema, buffers=buffers)


def _with_optimizer(state: TrainState, theirs: Any, source: str) -> TrainState:
    """Returns the state with the optimizer's state of `source`. Raises `UserError` if that has another optimizer."""
    shapes = [jax.tree.map(jnp.shape, each) for each in (state.opt_state, theirs)]
    if jax.tree.structure(state.opt_state) != jax.tree.structure(theirs) or shapes[0] != shapes[1]:
        raise UserError(f"the optimizer of {source} has another state; use its --optim fields, or --no-init-optimizer")

    def kept(new: Any, old: Any) -> Any:
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        if isinstance(new, optax.schedules.InjectStatefulHyperparamsState):
            return new._replace(inner_state=warm(new.inner_state, old.inner_state))
        return jnp.asarray(old)

    def warm(new: Any, old: Any) -> Any:
        return jax.tree.map(kept, new, old, is_leaf=lambda x: isinstance(x, scheduled))

    scheduled = optax.ScaleByScheduleState, optax.schedules.InjectStatefulHyperparamsState
    return state._replace(opt_state=warm(state.opt_state, theirs))


def _into(
    objective: Objective, state: TrainState, weights: Mapping[str, torch.Tensor], source: str
) -> tuple[dict, dict]:
    try:
        params, buffers = bridge.into(objective.fn, weights)
    except bridge.BridgeError as error:
        count, *differences = str(error).splitlines()
        shown = "; ".join(differences[:3]) + "; …" * (len(differences) > 3)
        raise UserError(f"{source}: {count} {shown}. Give weights of the same --model and --arch fields") from error
    params = {name: params[name] for name in state.params}
    buffers = {name: buffers[name] for name in state.buffers}
    _refuse_non_finite(source, params, buffers)
    return params, buffers


def _refuse_non_finite(source: str, params: Arrays, buffers: Arrays) -> None:
    """Raises `UserError` for weights that give NaN. A buffer may have infinities, as those of an attention mask."""
    bad = [name for name, array in params.items() if not np.isfinite(array).all()]
    bad += [name for name, array in buffers.items() if np.isnan(array).any()]
    if bad:
        shown = ", ".join(bad[:3]) + ", …" * (len(bad) > 3)
        tensors = "a tensor" if len(bad) == 1 else f"{len(bad)} tensors"
        raise UserError(
            f"{source} has NaN or infinity in {tensors}: {shown}; use an earlier checkpoint or other weights"
        )
