"""The interface between the training loop and a task: the protocol `Task`, and the table of tasks.

A task turns data into batches, adds a loss head to a PyTorch module, and evaluates the model. The core, the loop and
the runtime use nothing else of a task; `docs/architecture.md` shows how to add one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from train_jax.errors import UserError
from train_jax.plugins import is_plugin, load_plugin

if TYPE_CHECKING:  # importing the protocol does not import JAX or PyTorch
    import optax
    import torch

    from train_jax.core.objective import Batch, Call, LossSums, Objective
    from train_jax.core.state import TrainState
    from train_jax.run.config import RunConfig
    from train_jax.run.folder import RunFolder
    from train_jax.runtime.devices import Devices

TASKS = {
    "puzzles": "train_jax.tasks.puzzles.task:PuzzleTask",
    "language": "train_jax.tasks.language.task:LanguageTask",
}
"""Maps names to `package.module:Class`. A task of your own is given as `package.module:Class`."""

PRESETS = (
    "train_jax.tasks.puzzles.presets:PRESETS",
    "train_jax.tasks.language.presets:PRESETS",
    "train_jax.tasks.language.published_presets:PRESETS",
)
"""The presets of each task, as `package.module:NAME`: a dict of `RunConfig` by name."""


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The configuration fields of a task; a task with such fields defines a subclass."""


class Evaluation(Protocol):
    """The result of an evaluation, the same on every process."""

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the examples, and `count`."""
        ...

    @property
    def summary(self) -> str:
        """Text for the console, such as `exact accuracy 0.9710 on 1000 held-out puzzles`."""
        ...

    def save(self, folder: RunFolder, split: str) -> None:
        """Writes the metrics, and the answers if there are any, into the run folder."""
        ...


class Evaluator(Protocol):
    """A compiled evaluation."""

    def __call__(self, state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> Evaluation:
        """Evaluates `state.eval_params` on the first `limit` examples; 0 means all. With `metrics_only`, no answers
        are transferred from the devices."""
        ...


class StageSchedule(Protocol):
    """The variant of the module that each step trains, such as an increasing recursion depth."""

    def at(self, step: int) -> Any:
        """Returns the stage of the step that follows `step` completed steps; stages are hashable."""
        ...

    def after(self, step: int) -> Any | None:
        """Returns the next stage that differs from the one at `step`; None if there is none."""
        ...


class Task(Protocol):
    """Data, loss and evaluation of a run. `__init__(config: RunConfig)` opens the data and raises `UserError` if the
    configuration cannot be trained."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the data that the model's configuration needs, by field name: `vocab_size`, …"""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of the data of all splits, equal in processes and runs that use the same data."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """Metadata of the data that the model depends on, as JSON values; stored in the run folder.
        `__init__(config, facts)` opens no data until a batch is requested."""
        ...

    @property
    def examples_per_epoch(self) -> float: ...

    @property
    def description(self) -> str:
        """Text for the console, such as `1,000 puzzles (1,001,000 examples), 1,000 held out`."""
        ...

    @property
    def needs_state(self) -> bool:
        """Whether batches depend on the current model (rollouts); the feed then does not prefetch."""
        ...

    @property
    def console(self) -> Mapping[str, str]:
        """Metrics of the progress line and their formats: {"lm_loss": "loss {:.4f}"}."""
        ...

    @property
    def evaluated(self) -> Sequence[str]:
        """Names of the figures of an evaluation, one of which can choose the best checkpoint; empty if not known."""
        ...

    def wrap(self, module: torch.nn.Module, arch: Any) -> torch.nn.Module:
        """Adds the loss head to a model of configuration `arch`."""
        ...

    def check(self, config: RunConfig, devices: Devices) -> None:
        """Raises `UserError` if the configuration cannot be trained; called before the run folder is created."""
        ...

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        """Returns shard `(index, count)` of the global batch at `step`: a pure function of data, seed, step and shard,
        and of the state if `needs_state`."""
        ...

    def initial_carry(self, call: Call, batch: Batch) -> Any:
        """Returns the state that the module carries from step to step; `()` for none. Traced."""
        ...

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        """Calls the module once in training mode. Traced."""
        ...

    def figures(self, sums: dict[str, Any], examples: int) -> dict[str, float]:
        """Converts the sums of `LossSums.metrics` over several steps, with `examples` examples in total, to means."""
        ...

    def evaluator(self, objective: Objective, devices: Devices) -> Evaluator:
        """Returns an evaluator of the test split."""
        ...

    def stages(self, total_steps: int) -> StageSchedule:
        """Returns the schedule of stages; `ConstantStage()` for a module that does not change."""
        ...

    def arch_at(self, stage: Any) -> Any:
        """Returns the configuration of the architecture at a stage."""
        ...

    def overrides(self, module: torch.nn.Module, total_steps: int) -> Mapping[str, optax.Schedule]:
        """Returns schedules for numeric attributes of the module, by dotted path; empty for none."""
        ...


@dataclasses.dataclass(frozen=True)
class ConstantStage:
    """The schedule of a module that does not change."""

    stage: Any = None

    def at(self, step: int) -> Any:
        return self.stage

    def after(self, step: int) -> None:
        return None


def task_class(name: str) -> Callable[..., Task]:
    """Returns the class of a task: a name in `TASKS` or `package.module:Class`. Raises `UserError` if unknown."""
    if name in TASKS:
        return load_plugin(TASKS[name], "task")
    if not is_plugin(name):
        raise UserError(f"unknown task {name!r}; use one of {', '.join(TASKS)}, or package.module:Class for your own")
    return load_plugin(name, "task")


def task_config_class(name: str) -> type[TaskConfig]:
    """Returns the dataclass of the task's fields: its attribute `config_class`, or the empty `TaskConfig`."""
    return getattr(task_class(name), "config_class", TaskConfig)
