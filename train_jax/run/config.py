"""The fields that define a run: one frozen dataclass, with the range and the unit of each field."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, ClassVar, Literal

import tyro

from models_torch import outside, registry
from models_torch.config import ModelConfig
from models_torch.ranges import Range, check_ranges
from train_jax.core.reduction import Reduction
from train_jax.errors import UserError
from train_jax.help_pages import HelpPage
from train_jax.optim import config as optim_config
from train_jax.optim.config import OptimConfig
from train_jax.tasks.task import TaskConfig, task_config_class

Steps = Annotated[int, Range(0, 10**12)]
EverySteps = Annotated[int, Range(1, 10**12)]
BatchSize = Annotated[int, Range(1, 2**24)]

ACT_FIELDS = (
    "batch_size", "seq_len", "vocab_size", "num_puzzle_identifiers", "forward_dtype", "loss_type", "halt_max_steps",
    "halt_exploration_prob", "no_ACT_continue", "cycle_penalty",
)  # fmt: skip
SCHEDULE_FIELDS = ("lr", "sparse_lr", "warmup_steps", "decay", "decay_share", "lr_min_ratio")
LOGGING_FIELDS = (
    "eval_every_steps", "eval_batch_size", "eval_examples", "checkpoint_every_steps", "keep_checkpoints",
    "keep_every_steps", "keep_best", "log_every_steps", "debug_nans", "deterministic", "wandb", "wandb_project",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How the work is distributed over the devices. None of these fields changes what is learned."""

    runner: Literal["pmap", "shard_map"] = "pmap"
    """What runs a step on all devices."""
    accumulation_steps: Annotated[int, Range(1, 2**16)] = 1
    """Parts in which a device processes its share of a batch, one after the other: less memory, the same gradients."""
    steps_per_dispatch: Annotated[int, Range(1, 2**16)] = 1
    """Optimizer steps that the devices run before control returns to the host."""
    reduction: Reduction = "flat"
    """How gradients are summed over devices: one collective for all, or one for each parameter (large models)."""
    remat: str = ""
    """Submodules whose activations are recomputed in the backward pass instead of kept: `blocks` for the layers of the
    models here, or a regular expression over qualified names."""
    batches_ahead: Annotated[int, Range(1, 1024)] = 2
    """Batches that are prepared ahead on the devices."""

    def __post_init__(self):
        _check(self, "compute.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run. `trm train PRESET` starts from a preset; every field can be set after it."""

    data_dir: str
    """Data set made by `trm build-data`, or several separated by commas to train on jointly."""
    run_dir: str
    """Folder of the run; started again with the same fields, the run continues where it stopped."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Whether to continue the run in --run-dir: if it has a checkpoint, never (an error if there is a run), or must (an
    error if there is no checkpoint)."""
    task: str = "puzzles"
    """What is learned: puzzles, or package.module:Class for a task of your own."""
    task_config: tyro.conf.OmitArgPrefixes[TaskConfig]
    """The task's own fields."""
    model: str = "trm"
    """Architecture: trm, trm_singlez, trm_hier6, hrm, transformer, or package.module:Class for a module of your own."""
    arch: ModelConfig
    """The architecture's fields."""
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    """The optimizer's fields."""
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    """How the work is distributed."""
    init_from: str = ""
    """Run folder or weights file (.safetensors, .pt) whose weights the run starts with; empty for random weights."""
    epochs: Annotated[float, Range(0, 1e12, low_excluded=True)] = 50_000
    """Passes over the data."""
    steps: Steps = 0
    """Optimizer steps; 0 takes the number that `epochs` gives."""
    global_batch_size: BatchSize = 6144
    """Examples in a step, on all devices together."""
    eval_every_steps: Steps = 1000
    """Optimizer steps between evaluations on the test set; 0 evaluates only at the end."""
    eval_batch_size: BatchSize = 6144
    """Examples in an evaluation batch, on all devices together."""
    eval_examples: Annotated[int, Range(0, 10**12)] = 0
    """Test examples that evaluations during training use, the first ones; 0 takes all. The last one takes all."""
    checkpoint_every_steps: EverySteps = 1000
    """Optimizer steps between checkpoints."""
    keep_checkpoints: Annotated[int, Range(1, 10**6)] = 2
    """Newest checkpoints that are kept."""
    keep_every_steps: Steps = 0
    """Checkpoints at multiples of this are kept for good; 0 for none."""
    keep_best: str = ""
    """Keep also the checkpoint where this figure of the evaluation during training is highest, such as exact_accuracy,
    or lowest with a minus in front, such as -lm_loss; empty for none."""
    log_every_steps: EverySteps = 50
    """Optimizer steps that a line of metrics averages over."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Seed of weights, batches and the task's random numbers."""
    debug_nans: bool = False
    """Stop at the first NaN or infinity and name the PyTorch submodule that produced it. Slow."""
    deterministic: bool = False
    """Ask XLA for deterministic reductions on GPUs. CPU and TPU programs are deterministic already."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online if a key is available, otherwise into the run's folder for `wandb sync`. A missing wandb is no
    error."""
    wandb_project: str = "trm"
    """Project that the run is logged to."""

    HELP_PAGES: ClassVar[dict[str, HelpPage]] = {
        "data": HelpPage("fields of the task: mixtures, augmentation, curriculum, exploration", ("task_config",)),
        "arch": HelpPage("the architecture: layers, recursion, positions", ("arch",)),
        "act": HelpPage(
            "the architecture: halting, loss, dtype, and sizes that the data set and the devices decide",
            tuple(f"arch.{name}" for name in ACT_FIELDS),
        ),
        "optim": HelpPage("optimizer, moments, weight decay, parameter groups, averaged weights", ("optim",)),
        "schedule": HelpPage("learning rates: warm-up and decay", tuple(f"optim.{name}" for name in SCHEDULE_FIELDS)),
        "compute": HelpPage("how the work is distributed over devices", ("compute",)),
        "logging": HelpPage("evaluation during training, checkpoints, metrics, debugging", LOGGING_FIELDS),
    }
    """Pages of `trm train --help`; the fields that they do not name are on the first one."""

    def __post_init__(self):
        _check(self, "")
        for name, expected, value in (
            ("model", config_class(self.model), self.arch),
            ("task", task_config_class(self.task), self.task_config),
        ):
            if type(value) is not expected:
                raise UserError(
                    f"{name} {getattr(self, name)} is configured by {expected.__name__}, not by "
                    f"{type(value).__name__}; change both together"
                )
        dispatch = self.compute.steps_per_dispatch
        for name in ("eval_every_steps", "checkpoint_every_steps", "log_every_steps"):
            if getattr(self, name) % dispatch:
                raise UserError(
                    f"{name} {getattr(self, name)} is not a multiple of compute.steps_per_dispatch {dispatch}; "
                    "make it one"
                )


def _check(config: Any, prefix: str) -> None:
    try:
        check_ranges(config)
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None


def config_class(model: str) -> type[ModelConfig]:
    """The class of the architecture's configuration. Raises `UserError` for an unknown architecture."""
    try:
        return registry.config_class(model)
    except ValueError as error:
        raise UserError(str(error)) from error


def with_model(config: RunConfig, model: str) -> RunConfig:
    """The same run with another architecture.

    Fields of `config.arch` that differ from the defaults of their class are carried over if the new class has them; the
    rest are the new class's own defaults. Raises `UserError` for an unknown architecture or a class that cannot be
    imported.
    """
    if model == config.model:
        return config
    new_class = config_class(model)
    names = {field.name for field in dataclasses.fields(new_class)}
    changed = {
        field.name: getattr(config.arch, field.name)
        for field in dataclasses.fields(config.arch)
        if field.name in names and getattr(config.arch, field.name) != field.default
    }
    try:
        if outside.is_outside(model) and outside.is_plain(outside.find(model)):
            changed["halt_max_steps"] = 1
        arch = new_class(**changed)
    except ValueError as error:
        raise UserError(str(error)) from error
    return dataclasses.replace(config, model=model, arch=arch)


def with_task(config: RunConfig, task: str) -> RunConfig:
    """The same run with another task and the defaults of its fields."""
    if task == config.task:
        return config
    return dataclasses.replace(config, task=task, task_config=task_config_class(task)())


def to_json(config: RunConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=1)


def from_json(text: str) -> RunConfig:
    """Raises `UserError` for a file that no version of this class wrote."""
    try:
        fields = json.loads(text)
        fields["arch"] = config_class(fields["model"])(**fields["arch"])
        fields["task_config"] = _from_fields(task_config_class(fields["task"]), fields["task_config"])
        fields["optim"] = optim_config.from_fields(fields["optim"])
        fields["compute"] = ComputeConfig(**fields["compute"])
        return RunConfig(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the run's config.json cannot be read ({error}); it must be one that `trm train` wrote"
        ) from error


def _from_fields(cls: type, values: dict[str, Any]) -> Any:
    """JSON has no tuples."""
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
