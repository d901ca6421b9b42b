"""The contract of a task: base classes with defaults. Core, loop, runtime and run know only these classes.

A task turns data into batches, adds a loss head to a PyTorch module, and evaluates the model. What the commands after
training do with its runs is in `train_jax/report/commands.py`. `docs/dev/architecture.md` shows how to add a task. This
module imports neither JAX, PyTorch nor NumPy, so that `trm status` stays fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from train_jax.errors import UserError
from train_jax.plugin import entries, find, load_object, names_object

if TYPE_CHECKING:
    import numpy as np
    import optax
    import torch

    from train_jax.core.objective import Batch, Call, LossSums, Objective
    from train_jax.core.optim.chain import Norm, Optimizer
    from train_jax.core.state import TrainState
    from train_jax.run.config import RunConfig
    from train_jax.run.folder import RunFolder
    from train_jax.runtime.devices import Devices
    from train_jax.storage.json_files import Kind


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The configuration fields of a task; a task with such fields defines a subclass."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, the same on every process."""

    metrics: dict[str, float]
    """Means over the examples, and `count`."""

    @property
    def summary(self) -> str:
        """Text for the console, such as `exact accuracy 0.9710 on 1000 held-out puzzles`."""
        return ", ".join(f"{name} {value:g}" for name, value in self.metrics.items())

    @property
    def details(self) -> Sequence[str]:
        """Further lines for the console during training."""
        return ()

    def record(self, folder: RunFolder, step: int) -> None:
        """Writes what is kept of every evaluation, besides its metrics, into the run folder; nothing by default."""

    def save(self, folder: RunFolder, split: str) -> None:
        """Writes the metrics, and the answers if there are any, into the run folder."""
        folder.write_metrics(split, self.metrics)


class Evaluator(Protocol):
    """A compiled evaluation."""

    def __call__(self, state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> Evaluation:
        """Evaluates `state.eval_params` on the first `limit` examples; 0 means all. With `metrics_only`, no answers
        are transferred from the devices."""
        ...


@dataclasses.dataclass(frozen=True)
class Periodic:
    """An evaluation during training, which is repeated on all examples at the end of the run."""

    evaluator: Evaluator
    every: int
    """Steps between two evaluations; 0 evaluates only at the end."""
    name: str = ""
    """Metrics are logged as `eval/NAME/metric`; those of the main evaluation, without a name, as `eval/metric`."""
    limit: int = 0
    """Number of examples during training, the first ones; 0 for all."""


class VariantSchedule(Protocol):
    """The variant of the module that each step trains, such as an increasing recursion depth."""

    def at(self, step: int) -> Any:
        """Returns the variant of the step that follows `step` completed steps; variants are hashable."""
        ...

    def after(self, step: int) -> Any | None:
        """Returns the next variant that differs from the one at `step`; None if there is none."""
        ...


class OneVariant:
    """The schedule of a module that does not change."""

    def at(self, step: int) -> None:
        return None

    def after(self, step: int) -> None:
        return None


class Task:
    """Data, loss and evaluations of a run.

    A task defines `sizes`, `fingerprint`, `examples_per_epoch`, `batch`, `loss`, `figures` and `evaluator`, as methods,
    properties or attributes; the rest has defaults.
    """

    config_class: ClassVar[type[TaskConfig]] = TaskConfig
    """The dataclass of the task's fields."""
    console: ClassVar[Mapping[str, str]] = {"loss": "loss {:.4f}"}
    """Metrics of the progress line and their formats."""
    evaluated: ClassVar[Sequence[str]] = ()
    """Names of the metrics of the evaluations, one of which can choose the best checkpoint; empty if not known."""
    unit: tuple[str, int] = ("examples", 1)
    """Unit of the speed, and its number in an example, such as the tokens of a row."""
    models: ClassVar[Sequence[str]] = ()
    """Architectures of this package that the task can train; empty for all."""
    fact_kinds: ClassVar[Mapping[str, Kind]] = {}
    """Fields of `facts` that a task reads; dataset.json of a run is refused without them."""
    comparison: ClassVar[str] = ""
    """A function `(config, task) -> line of the log` that compares the first steps of a run with PyTorch, as
    `package.module:function`; empty for a comparison of the module's first call."""
    batches_by_device: ClassVar[bool] = False
    """True if `batch` is asked for the shard of each device, and of each part of its examples, rather than of each
    process; the arrays of a shard may then have any first axis."""
    keeps_unreached: bool = False
    """See `TrainingTask`."""
    needs_state: ClassVar[bool] = False
    """True if batches depend on the current model (rollouts); the feed then does not prefetch."""

    sizes: Mapping[str, int]
    """Sizes of the data that the model's configuration needs, by field name: `vocab_size`, …"""
    fingerprint: str
    """Hash of the data of all splits, equal in processes and runs that use the same data."""
    examples_per_epoch: float

    def __init__(self, config: RunConfig, facts: dict[str, Any] | None = None):
        """Opens the data. If `facts` are given (from a run folder), no data is opened until a batch is requested.

        Raises `UserError` if the configuration cannot be trained.
        """
        self.config = config

    @classmethod
    def check_given(cls, config: RunConfig, given: Sequence[str]) -> None:
        """Raises `UserError` for a field that the run would not read; `given` are those of the command line."""

    @property
    def facts(self) -> dict[str, Any]:
        """Metadata of the data that the model depends on, as JSON values; stored in the run folder."""
        return dict(self.sizes)

    @property
    def description(self) -> str:
        """Text for the console, such as `1,000 puzzles (1,001,000 examples), 1,000 held out`."""
        return f"{self.examples_per_epoch:,.0f} examples"

    def check(self, config: RunConfig, devices: Devices) -> None:
        """Raises `UserError` if the configuration cannot be trained; called before the run folder is created."""

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        """Returns shard `(index, count)` of the global batch at `step`: a pure function of data, seed, step and shard,
        and of the state if `needs_state`."""
        raise NotImplementedError

    def shards(
        self, step: int, shards: Sequence[tuple[int, int]], state: TrainState | None = None
    ) -> list[dict[str, np.ndarray]]:
        """Returns the shards of the batch of a step that a process needs, in their order."""
        return [self.batch(step, shard, state) for shard in shards]

    # The model and its loss

    def part(self, name: str) -> Any:
        """Returns the `TrainingTask` of a part of the step, for an optimizer with parts."""
        raise NotImplementedError

    def build(self, arch: Any) -> torch.nn.Module | None:
        """Returns the module with its loss head, for a task that has its own model; None for that of the run."""
        return None

    def optimizer(self, module: torch.nn.Module, total_steps: int, norm: Norm) -> Optimizer | None:
        """Returns the optimizer of the module's parameters; None for that of `config.optim`.

        `norm` returns the global norm of gradients, which may be sharded.
        """
        return None

    def wrap(self, module: torch.nn.Module, arch: Any) -> torch.nn.Module:
        """Adds the loss head to a model of configuration `arch`."""
        return module

    def initial_carry(self, call: Call, batch: Batch) -> Any:
        """Returns the state that the module carries from step to step; `()` for none. Traced."""
        return ()

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        """Calls the module once in training mode. Traced."""
        raise NotImplementedError

    def figures(self, sums: dict[str, Any], examples: int) -> dict[str, float]:
        """Converts the sums of `LossSums.metrics` over several steps, with `examples` examples in total, to means."""
        raise NotImplementedError

    @classmethod
    def unbuilt(cls, config: RunConfig, kind: str = "", puzzle_identifiers: int = 1) -> Task | None:
        """Returns the task without its data set, to compile its steps; None if its sizes are in the data alone.

        `kind` and `puzzle_identifiers` are of puzzles: the key of the kind, and the rows of the puzzle table.
        """
        return None

    # Evaluation

    def evaluator(self, objective: Objective, devices: Devices) -> Evaluator:
        """Returns the main evaluator, of the test split."""
        raise NotImplementedError

    def evaluations(self, objective: Objective, devices: Devices) -> Sequence[Periodic]:
        """Returns the evaluations during training, the main one first."""
        evaluator = self.evaluator(objective, devices)
        return [Periodic(evaluator, self.config.eval_every_steps, limit=self.config.eval_examples)]

    # Schedules

    def variants(self, total_steps: int) -> VariantSchedule:
        """Returns the schedule of the module's variants."""
        return OneVariant()

    def arch_of(self, variant: Any) -> Any:
        """Returns the configuration of the architecture of a variant."""
        return self.config.arch

    def overrides(self, module: torch.nn.Module, total_steps: int) -> Mapping[str, optax.Schedule]:
        """Returns schedules for numeric attributes of the module, by dotted path; empty for none."""
        return {}


def task_class(name: str) -> Callable[..., Task]:
    """Returns the class of a task: of a plugin, or `package.module:Class`. Raises `UserError` for an unknown name."""
    target = find("tasks", name) or name
    if not names_object(target):
        raise UserError(
            f"unknown task {name!r}; use one of {', '.join(entries('tasks'))}, package.module:Class for your own, or "
            "--plugin FILE"
        )
    return load_object(target, "task")


def task_config_class(name: str) -> type[TaskConfig]:
    """Returns the dataclass of the fields of a task."""
    return getattr(task_class(name), "config_class", TaskConfig)
