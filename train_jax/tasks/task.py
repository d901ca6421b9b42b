"""What the training loop knows of a task: one protocol, and the table of tasks.

A task turns data into batches, puts a loss head on a PyTorch module, and evaluates. The core, the loop and the runtime
know nothing else of it; `docs/architecture.md` shows how to add one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from train_jax.errors import UserError
from train_jax.plugins import is_plugin, load_plugin

if TYPE_CHECKING:  # a protocol names types; only its implementations load JAX and PyTorch
    import optax
    import torch

    from train_jax.core.objective import Batch, Call, LossSums, Objective
    from train_jax.core.state import TrainState
    from train_jax.run.config import RunConfig
    from train_jax.run.folder import RunFolder
    from train_jax.runtime.devices import Devices

TASKS = {
    "puzzles": "train_jax.tasks.puzzles.task:PuzzleTask",
}
"""Name -> `package.module:class`. A task of your own is named like that directly."""

PRESETS = ("train_jax.tasks.puzzles.presets:PRESETS",)
"""Where each task keeps its presets, a dict of `RunConfig` by name."""


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The fields of a run that only its task knows. A task has a subclass of its own, or no fields."""


class Evaluation(Protocol):
    """The result of an evaluation, the same on every process."""

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the examples, and `count`."""
        ...

    @property
    def summary(self) -> str:
        """Part of a sentence for the console: `exact accuracy 0.9710 on 1000 held-out puzzles`."""
        ...

    def save(self, folder: RunFolder, split: str) -> None:
        """Writes figures, and answers if there are any, into the run's folder."""
        ...


class Evaluator(Protocol):
    """A compiled evaluation."""

    def __call__(self, state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> Evaluation:
        """Evaluates `state.eval_params`; `limit`: on the first examples only, 0 for all. With
        `metrics_only` no answers are fetched from the devices."""
        ...


class StageSchedule(Protocol):
    """Which variant of the module each step trains, such as a recursion depth that grows."""

    def at(self, step: int) -> Any:
        """The stage, hashable, of the step that follows `step` steps."""
        ...

    def after(self, step: int) -> Any | None:
        """The next stage that differs from the one at `step`; None if there is none."""
        ...


class Task(Protocol):
    """What is learned from which data. `__init__(config: RunConfig)` opens the data and raises `UserError` where the
    configuration cannot be trained."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """What the model's configuration needs to know of the data, by field name: `vocab_size`, …"""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of the data of every split: two processes or two runs on the same data have the same one."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What the model was sized for, as JSON; written into the run's folder. `__init__(config, facts)` opens no data
        until a batch is requested."""
        ...

    @property
    def examples_per_epoch(self) -> float: ...

    @property
    def description(self) -> str:
        """Part of a sentence for the console: `1,000 puzzles (1,001,000 examples), 1,000 held out`."""
        ...

    @property
    def needs_state(self) -> bool:
        """Whether batches depend on the current model (rollouts); the feed then prepares none ahead."""
        ...

    @property
    def console(self) -> Mapping[str, str]:
        """Figures of the progress line and their formats: {"lm_loss": "loss {:.4f}"}."""
        ...

    def wrap(self, module: torch.nn.Module, arch: Any) -> torch.nn.Module:
        """The bare model of configuration `arch` with its loss head."""
        ...

    def check(self, config: RunConfig, devices: Devices) -> None:
        """Raises `UserError` for what cannot be trained, before a run folder is made."""
        ...

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        """The examples of shard `(index, count)` of the global batch at `step`: a pure function of data, seed, step and
        shard, and of the state only where `needs_state`."""
        ...

    def initial_carry(self, call: Call, batch: Batch) -> Any:
        """Traced. What the module carries from step to step for the examples in work; `()` for nothing."""
        ...

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        """Traced. One call of the module in training mode."""
        ...

    def figures(self, sums: dict[str, Any], examples: int) -> dict[str, float]:
        """The sums of `LossSums.metrics` over some steps of `examples` examples in all as named means."""
        ...

    def evaluator(self, objective: Objective, devices: Devices) -> Evaluator:
        """Evaluates on the test split."""
        ...

    def stages(self, total_steps: int) -> StageSchedule:
        """`ConstantStage()` for a module that stays the same."""
        ...

    def arch_at(self, stage: Any) -> Any:
        """The architecture's configuration at a stage."""
        ...

    def overrides(self, module: torch.nn.Module, total_steps: int) -> Mapping[str, optax.Schedule]:
        """Schedules for numbers in the module's attributes, by dotted path; empty for none."""
        ...


@dataclasses.dataclass(frozen=True)
class ConstantStage:
    """The schedule of a module that stays the same."""

    stage: Any = None

    def at(self, step: int) -> Any:
        return self.stage

    def after(self, step: int) -> None:
        return None


def task_class(name: str) -> Callable[..., Task]:
    """The class of a task, by its name in `TASKS` or as `package.module:class`. Raises `UserError` if there is none."""
    if name in TASKS:
        return load_plugin(TASKS[name], "task")
    if not is_plugin(name):
        raise UserError(f"unknown task {name!r}; use one of {', '.join(TASKS)}, or package.module:Class for your own")
    return load_plugin(name, "task")


def task_config_class(name: str) -> type[TaskConfig]:
    """The dataclass of the task's own fields: its attribute `config_class`, or the empty `TaskConfig`."""
    return getattr(task_class(name), "config_class", TaskConfig)
