"""The task of a training script: its model, its data, its loss and its optimizer."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from bridge.module.copying import independent
from models_torch.config import ForwardDtype, ModelConfig
from models_torch.ranges import Range
from train_jax.core.objective import Batch, Call, LossSums, Objective
from train_jax.core.optim.chain import Norm, Optimizer
from train_jax.core.reduction import AXIS
from train_jax.core.state import TrainState
from train_jax.errors import UserError, check_fields
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import is_main_process, process_shard
from train_jax.script.data import Source, read_data
from train_jax.script.models import Models, add_method, as_given
from train_jax.script.optim_fields import check_beside_optimizer, check_given_beside_optimizer
from train_jax.script.optimizers import clip_grad_norm, translate
from train_jax.script.preview import initial_preview, trained_preview, write_preview
from train_jax.script.schedules import check_schedule
from train_jax.script.source import Script, script_of
from train_jax.script.structure import Form
from train_jax.script.workers import Steps, Workers
from train_jax.storage.json_files import NUMBER
from train_jax.task import Evaluation, Evaluator, Periodic, Task, TaskConfig

if TYPE_CHECKING:
    from train_jax.run.config import RunConfig
    from train_jax.run.folder import RunFolder

LOSS_METHOD = "script_loss"
"""Name of the method of the module that computes the loss of a batch, given by name."""
LOSS = "loss"
COUNT = ":count"
"""Ends the name of the divisor of a metric."""
_STREAM = "a stream of batches, whose earlier ones a run that continues reads again"
_FINGERPRINTED = 32
"""Number of examples of a split that the fingerprint of the data has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptModelConfig(ModelConfig):
    """The configuration of the model of a script; its sizes are those of the script."""

    forward_dtype: ForwardDtype = "float32"  # under autocast for 16 bits, which changes nothing in a module of 16 bits


@dataclasses.dataclass(frozen=True)
class ScriptConfig(TaskConfig):
    """The fields of a run of a script."""

    workers: Annotated[int, Range(0, 1024)] = 0
    """Processes that make the batches; 0 for a thread of the run. They change nothing in a batch."""

    loss_scale: Literal["none", "dynamic"] = "none"
    """dynamic scales the loss of a script that computes in float16, as torch.amp.GradScaler does."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class ScriptEvaluation(Evaluation):
    """Means over the test examples."""

    preview: Sequence[dict[str, str]] = ()
    """Images and texts of the script's `preview`."""

    def record(self, folder: RunFolder, step: int) -> None:
        if self.preview:
            write_preview(folder, [*self.preview])

    def save(self, folder: RunFolder, split: str) -> None:
        super().save(folder, split)
        if self.preview:
            write_preview(folder, [*self.preview])

    @property
    def summary(self) -> str:
        means = [f"{name} {value:.4f}" for name, value in self.metrics.items() if name != "count"]
        return f"{', '.join(means)} on {self.metrics['count']:,.0f} test examples"


class ScriptTask(Task):
    """Trains the model of a script with its loss; the model is `SCRIPT:model`."""

    config_class = ScriptConfig
    outside_model_config_class = ScriptModelConfig
    fact_kinds: ClassVar = {"examples": NUMBER, "test_examples": NUMBER}
    sizes: Mapping[str, int] = {}
    comparison = "train_jax.script.check:verified"
    batches_by_device = True
    keeps_unreached = True

    def __init__(self, config: RunConfig, facts: dict[str, Any] | None = None):
        super().__init__(config, facts)
        self.script: Script = script_of(config.model.partition(":")[0])
        self._modules: dict[torch.dtype, nn.Module] = {}
        self._facts = facts
        if facts is None and not config.steps and self.train_data.count is None:
            raise UserError(f"{self.script.line_of('train_data')}: train_data() has no length; give --steps")
        if facts is None and self.script.optimizer is not None:
            check_beside_optimizer(config.optim, self.script.line_of("optimizer"))

    @classmethod
    def check_given(cls, config: RunConfig, given: Sequence[str]) -> None:
        script = script_of(config.model.partition(":")[0])
        if script.optimizer is not None:
            names = [name.removeprefix("optim.") for name in given if name.startswith("optim.")]
            check_given_beside_optimizer(config.optim, names, script.line_of("optimizer"))

    # Data

    @cached_property
    def train_data(self) -> Source:
        return read_data(self.script, "train_data", self.config.seed)

    @cached_property
    def test_data(self) -> Source | None:
        if self.script.test_data is None:
            return None
        data = read_data(self.script, "test_data", self.config.seed)
        if data.count is None:
            where = self.script.line_of("test_data")
            raise UserError(f"{where}: test_data() has no length; return a list, arrays or a Dataset with __len__")
        return data

    @cached_property
    def form(self) -> Form:
        """The structure of a batch, that of the first one."""
        form = Form(self.train_data.batch(0, self.config.global_batch_size, (0, 1), self.config.seed))
        if not form.names:
            raise UserError(f"{self._collate} returns a batch without tensors or arrays; return at least one")
        return form

    def check(self, config: RunConfig, devices: Devices) -> None:
        if self.workers is not None and self.train_data.count is None:
            raise UserError(
                f"{self.script.line_of('train_data')}: train_data() is an iterable, which is read in its order by one "
                "process; return a Dataset, or omit --workers"
            )
        if self.test_data is not None:
            self.form.arrays(self.test_data.rows(0, 1), self.script.line_of("test_data"))
        if self.script.preview is not None:
            initial_preview(self, config)

    @property
    def facts(self) -> dict[str, Any]:
        if self._facts is not None:
            return self._facts
        test = self.test_data
        return {
            "examples": self.train_data.count or 0,
            "test_examples": 0 if test is None else test.count or 0,
        }

    @property
    def examples_per_epoch(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.facts["examples"] or self.config.global_batch_size

    @property
    def description(self) -> str:
        facts = self.facts
        known = f"{facts['examples']:,} examples" if facts["examples"] else _STREAM
        return f"{known}, {facts['test_examples']:,} to test on" if facts["test_examples"] else known

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        found = hashlib.sha256()
        for source in filter(None, (self.train_data, self.test_data)):
            found.update(f"{source.count}\n".encode())
            for number in np.unique(np.linspace(0, (source.count or 1) - 1, _FINGERPRINTED).astype(int)):
                example = source.rows(int(number), int(number) + 1) if source.count else ()
                for name, array in Form(example).arrays(example, "collate()").items():
                    found.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
        return found.hexdigest()

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        made = self.train_data.batch(step, self.config.global_batch_size, shard, self.config.seed)
        return self.form.arrays(made, self._collate)

    def shards(
        self, step: int, shards: Sequence[tuple[int, int]], state: TrainState | None = None
    ) -> list[dict[str, np.ndarray]]:
        if not self.workers:
            return super().shards(step, shards, state)
        size = self.config.global_batch_size
        seed = self.config.seed
        steps = Steps(self.train_data, self.form, shards, size, seed, self._collate)
        return self.workers.batch(step, shards, steps)

    @cached_property
    def workers(self) -> Workers | None:
        """The worker processes of the run; None if it has none."""
        count = cast(ScriptConfig, self.config.task_config).workers
        return Workers(count, self.script.line_of("train_data")) if count else None

    @property
    def _collate(self) -> str:
        return self.script.line_of("train_data" if self.script.collate is None else "collate")

    # The model and its loss

    def build(self, arch: Any) -> nn.Module:
        """Returns the module of the script, or a copy of it, because `model` may take long and may return one object.

        It is made once for each default dtype, which tensors of the module that are no parameters have.
        """
        dtype = torch.get_default_dtype()
        if dtype in self._modules:
            module = independent(self._modules[dtype])
        else:
            module = self._modules[dtype] = self._new_module()
        self.torch_optimizer, self.torch_schedule = self._optimizer_of(module)
        add_method(module, LOSS_METHOD, self._loss_of_arrays(arch.torch_dtype))
        return module

    def _new_module(self) -> nn.Module:
        models = self.script.call("model")
        for model in models.values() if isinstance(models, dict) else (models,):
            if not isinstance(model, nn.Module):
                where = self.script.line_of("model")
                kind = type(model).__name__
                raise UserError(f"{where}: model() returns {kind}, expected an nn.Module, or a dict of them")
        module = Models(models) if isinstance(models, dict) else models
        module.train()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError(f"{self.script.line_of('model')}: model() has no parameter that requires grad to train")
        return module

    def class_of(self, model: nn.Module) -> type[nn.Module]:
        """Returns the class that the script gave a model, without the methods that were added to it."""
        added = (each for each in type(model).__mro__ if LOSS_METHOD not in vars(each))
        return next(added)

    def _optimizer_of(self, module: nn.Module) -> tuple[Any, Any]:
        """Returns optimizers and schedules of the script. Parameters that no optimizer has become constant."""
        if self.script.optimizer is None:
            return None, None
        optimizer = self.script.call("optimizer", as_given(module))
        where = self.script.line_of("optimizer")
        if isinstance(optimizer, dict) and not (isinstance(module, Models) and optimizer.keys() <= {*module}):
            raise UserError(f"{where}: optimizer() returns a dict with {', '.join(optimizer)}; use keys of model()")
        for each in optimizer.values() if isinstance(optimizer, dict) else (optimizer,):
            if not isinstance(each, torch.optim.Optimizer):
                kind = type(each).__name__
                raise UserError(f"{where}: optimizer() returns {kind}, expected a torch.optim.Optimizer")
        trained = {id(t) for each in _listed(optimizer) for group in each.param_groups for t in group["params"]}
        for parameter in module.parameters():
            if id(parameter) not in trained:
                parameter.requires_grad_(False)
        return optimizer, self._schedule_of(optimizer)

    def _schedule_of(self, optimizer: Any) -> Any:
        """Returns the schedule of the script, a dict of some for a dict of optimizers, or None."""
        if self.script.schedule is None:
            return None
        schedule = self.script.call("schedule", optimizer)
        where = self.script.line_of("schedule")
        if not isinstance(optimizer, dict):
            check_schedule(optimizer, schedule, where)
            return schedule
        if not isinstance(schedule, dict) or not schedule.keys() <= optimizer.keys():
            raise UserError(f"{where}: schedule() returns no dict with keys of optimizer(): {', '.join(optimizer)}")
        for name, each in schedule.items():
            check_schedule(optimizer[name], each, where)
        return schedule

    @property
    def console(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {name: f"{name} {{:.4f}}" for name in self.parts or (LOSS,)}

    @property
    def parts(self) -> tuple[str, ...]:
        """The models that a step trains one after the other, each by its own loss; none for one loss."""
        return tuple(self.torch_optimizer) if isinstance(self.torch_optimizer, dict) else ()

    def _loss_of_arrays(self, dtype: torch.dtype) -> Any:
        """Returns the method that computes the loss of a batch, whose arrays it gets by name."""
        task = self

        def script_loss(self: nn.Module, arrays: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
            batch = task.form.batch(arrays)
            with torch.autocast("cpu", dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
                result = task.script.loss(as_given(self), batch)
            return sums_of(result, task.script.line_of("loss"), task.parts)

        return script_loss

    def optimizer(self, module: nn.Module, total_steps: int, norm: Norm) -> Optimizer | None:
        if self.torch_optimizer is None:
            return None
        where = self.script.line_of("optimizer")

        def optimizer_of(optimizer: Any, schedule: Any) -> Optimizer:
            translated = translate(optimizer, module, schedule, total_steps, where=where)
            clip_norm = self.config.optim.clip_norm
            if not clip_norm:
                return Optimizer(translated.transformation, translated.rates)
            clipped = optax.chain(clip_grad_norm(clip_norm, norm=norm), translated.transformation)
            return Optimizer(clipped, translated.rates)

        if not self.parts:
            return optimizer_of(self.torch_optimizer, self.torch_schedule)
        schedules = self.torch_schedule or {}
        parts = {name: optimizer_of(each, schedules.get(name)) for name, each in self.torch_optimizer.items()}
        transformations = {name: part.transformation for name, part in parts.items()}
        rates = {name: next(iter(part.rates.values())) for name, part in parts.items()}
        return Optimizer(_all_of(transformations), rates, transformations)

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        return ScriptPart(LOSS, ()).loss(call, carry, batch)

    def part(self, name: str) -> ScriptPart:
        return ScriptPart(name, tuple(other for other in self.parts if other != name))

    def figures(self, sums: dict[str, Any], examples: int) -> dict[str, float]:
        return _means(sums)

    # Evaluation

    def evaluations(self, objective: Objective, devices: Devices) -> Sequence[Periodic]:
        return super().evaluations(objective, devices) if self.script.test_data is not None else ()

    def evaluator(self, objective: Objective, devices: Devices) -> Evaluator:
        """Returns the evaluator of the loss and the metrics of the script, in evaluation mode, on all test examples.

        The examples that are left after the last whole batch are a smaller one, which every device computes.
        """
        data = self.test_data
        if data is None:
            raise UserError(f"{self.script.path} defines no test_data; add `def test_data()`")
        total: int = data.count  # pyright: ignore[reportAssignmentType]
        size = devices.local_batch_size(self.config.eval_batch_size)

        def step(state: TrainState, batch: Any) -> Any:
            first, rows = batch.pop("")
            key = jax.random.fold_in(jax.random.key(self.config.seed), first)  # for a loss that draws
            call = objective.call(state.eval_params, state.buffers, train=False, rng=key)
            outputs, _ = call(batch, method=LOSS_METHOD)
            return jax.lax.psum(_flat(outputs, rows), AXIS), {}

        parallel_step = devices.parallel_eval_step(step)
        first_device = process_shard()[0] * len(devices.local)
        devices_here = range(first_device, first_device + len(devices.local))
        at_once = size * devices.count

        def arrays(first: int, end: int) -> dict[str, np.ndarray]:
            start = first - first % at_once
            made = data.rows(first, end, (start, min(start + at_once, total)))
            return {"": np.array([first, end - first], np.int32), **self.form.arrays(made, self._collate)}

        def evaluate(state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> Evaluation:
            placed = devices.replicate(state)
            sums: dict[str, float] = {}
            examples = min(limit or total, total)
            whole = examples - examples % at_once
            firsts = [[start + d * size for d in devices_here] for start in range(0, whole, at_once)]
            parts = [([(first, first + size) for first in each], 1) for each in firsts]
            if whole < examples:  # the same part on all devices, whose sum has it as often as there are devices
                parts.append(([(whole, examples)] * len(devices.local), devices.count))
            for ranges, times in parts:
                made = [arrays(*each) for each in ranges]
                batch = {name: np.stack([each[name] for each in made]) for name in made[0]}
                computed, _ = parallel_step(placed, devices.shard(batch))
                for name, value in devices.to_host(computed).items():
                    sums[name] = sums.get(name, 0.0) + float(value) / times
            preview = ()
            if self.script.preview is not None and is_main_process():
                preview = trained_preview(self, self.config, objective, devices.to_host(state))
            return ScriptEvaluation(_means(sums) | {"count": float(examples)}, tuple(preview))

        return evaluate


@dataclasses.dataclass(frozen=True)
class ScriptPart:
    """The loss of one model of a script."""

    name: str
    others: tuple[str, ...]
    """The models that have their own losses."""
    keeps_unreached: bool = True

    def initial_carry(self, call: Call, batch: Batch) -> Any:
        return ()

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        outputs, buffers = call(batch, method=LOSS_METHOD)
        sums = _flat({name: pair for name, pair in outputs.items() if name not in self.others}, 1)
        return LossSums(sums[self.name], sums[f"{self.name}{COUNT}"], sums, carry, buffers)


def _all_of(parts: Mapping[str, optax.GradientTransformation]) -> optax.GradientTransformation:
    """Returns an optimizer whose state has those of the parts in a dict; they are updated one by one."""

    def init(params: Any) -> Any:
        return {
            name: part.init({n: array for n, array in params.items() if n.startswith(f"{name}.")})
            for name, part in parts.items()
        }

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        raise NotImplementedError("the parts of a step are updated one by one")

    return optax.GradientTransformation(init, update)


def _listed(optimizer: Any) -> list[Any]:
    return list(optimizer.values()) if isinstance(optimizer, dict) else [optimizer]


def sums_of(result: Any, where: str, parts: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Returns sum and count of the loss and of each metric, for the result of `loss` of a script; None for the count of
    a mean.

    `where`: the line of the function, for messages. `parts`: the models that have a loss each. Raises `UserError` for a
    result that is no loss.
    """
    if not parts:
        return _sums_of_loss(result, LOSS, where)
    if not isinstance(result, Mapping) or tuple(result) != tuple(parts):
        names = ", ".join(parts)
        raise UserError(f"{where}: loss() returns no dict of {names}, the keys of optimizer() in their order")
    found: dict[str, tuple[Any, Any]] = {}
    for name, loss in result.items():
        found |= _sums_of_loss(loss, name, where)
    return found


def _sums_of_loss(result: Any, name: str, where: str) -> dict[str, tuple[Any, Any]]:
    values: list[Any] = [*result] if isinstance(result, tuple) else [result]
    metrics = values.pop() if len(values) > 1 and isinstance(values[-1], Mapping) else {}
    if len(values) == 1 and isinstance(values[0], tuple):  # (sum, count), {…}
        values = [*values[0]]
    if len(values) not in (1, 2):
        raise UserError(f"{where}: loss() returns {len(values)} values, expected a scalar or (sum, count), then a dict")
    found = {name: _pair(tuple(values), name, where)}
    for metric, value in metrics.items():
        if metric == name:
            raise UserError(f"{where}: loss() returns a metric called {name}, which is the loss; use a different name")
        total, count = _pair(value, f"the metric {metric}", where)
        found[str(metric)] = _detached(total), _detached(count)
    return found


def mean_loss(sums: Mapping[str, tuple[Any, Any]], name: str) -> Any:
    """Returns the loss or the metric called `name`."""
    total, count = sums[name]
    return total if count is None else total / count


def _pair(value: Any, what: str, where: str) -> tuple[Any, Any]:
    values = value if isinstance(value, tuple) else (value,)
    if len(values) not in (1, 2):
        raise UserError(f"{where}: {what} has {len(values)} values, expected a scalar or (sum, count)")
    scalars = [_scalar(each, what, where) for each in values]
    return scalars[0], scalars[1] if len(scalars) == 2 else None


def _scalar(value: Any, what: str, where: str) -> Any:
    if not isinstance(value, (torch.Tensor, int, float)):
        raise UserError(f"{where}: {what} is of type {type(value).__name__}, expected a scalar or (sum, count)")
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        shape = tuple(value.shape)
        raise UserError(f"{where}: {what} has shape {shape}, expected a scalar; return its mean, or (sum, count)")
    return value.reshape(())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _flat(outputs: Mapping[str, tuple[Any, Any]], rows: Any) -> dict[str, Any]:
    """Returns sums and counts by name, at least in float32; `rows` is the count of a mean."""
    sums: dict[str, Any] = {}
    for name, (value, count) in outputs.items():
        total = jnp.asarray(value, jnp.promote_types(jnp.result_type(value), jnp.float32))
        divisor = jnp.asarray(rows if count is None else count, total.dtype)
        sums[name] = total * divisor if count is None else total
        sums[f"{name}{COUNT}"] = divisor
    return sums


def _means(sums: Mapping[str, Any]) -> dict[str, float]:
    names = [name for name in sums if not name.endswith(COUNT)]
    return {name: float(sums[name]) / max(float(sums[f"{name}{COUNT}"]), 1e-30) for name in names}
