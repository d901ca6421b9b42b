"""The configuration of a run: a frozen dataclass, with the range and the unit of each field."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from models_torch import outside, registry
from models_torch.config import ModelConfig
from models_torch.ranges import Range
from train_jax import plugin
from train_jax.command_line import HelpPage
from train_jax.core.optim import config as optim_config
from train_jax.core.optim.config import OptimConfig
from train_jax.core.reduction import Reduction
from train_jax.errors import UserError, check_fields
from train_jax.run.folder import RUN_ID
from train_jax.runtime.backend import Platform, cores
from train_jax.storage.json_files import OBJECT, TEXT, read_object
from train_jax.task import TaskConfig, task_class, task_config_class

Steps = Annotated[int, Range(0, 10**12)]
EverySteps = Annotated[int, Range(1, 10**12)]
BatchSize = Annotated[int, Range(1, 2**24)]

ACT_FIELDS = (
    "batch_size", "seq_len", "vocab_size", "num_puzzle_identifiers", "forward_dtype", "loss_type", "halt_max_steps",
    "halt_exploration_prob", "no_ACT_continue", "halt_loss_weight", "cycle_penalty",
)  # fmt: skip
SCHEDULE_FIELDS = (
    "lr", "sparse_lr", "warmup_steps", "decay", "decay_share", "lr_min_ratio", "momentum_start",
    "momentum_warmup_steps", "momentum_end", "weight_decay_schedule",
)  # fmt: skip
MUON_FIELDS = ("muon_momentum", "muon_beta2", "newton_schulz_dtype", "cautious_decay")
LOGGING_FIELDS = (
    "eval_every_steps", "eval_batch_size", "eval_examples", "checkpoint_every_steps", "checkpoint_every_minutes",
    "keep_checkpoints", "keep_every_steps", "keep_best", "log_every_steps", "profile", "profile_skip",
    "profile_server", "debug_nans", "deterministic", "wandb", "wandb_project", "wandb_group", "wandb_name",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """Distribution of the work over the devices. These fields change only the rounding of what is trained."""

    runner: Literal["pmap", "shard_map"] = "pmap"
    """JAX transformation that runs a step."""
    cpu_devices: Annotated[int, Range(0, 1024)] = 0
    """Virtual devices of a CPU; 0 for the number by XLA_FLAGS or cpu_examples."""
    cpu_examples: Annotated[int, Range(0, 2**24)] = 0
    """Most examples at a time on a CPU with a device for each core; 0 for all."""
    accumulation_steps: Annotated[int, Range(1, 2**16)] = 1
    """Parts of a batch that a device processes in turn: less memory, same gradients."""
    steps_per_dispatch: Annotated[int, Range(1, 2**16)] = 1
    """Optimizer steps in one dispatch."""
    reduction: Reduction = "flat"
    """Sum of gradients: in one collective, or one for each."""
    shard_optimizer: bool = False
    """Each device keeps a share of parameters and optimizer state."""
    shard: tuple[str, ...] = ()
    """Parameters divided over devices by name, NAMES=AXES of data and model; or --shard."""
    model_devices: Annotated[int, Range(1, 2**16)] = 1
    """Devices along the axis `model` of --shard; the others are along `data`."""
    remat: str = ""
    """Submodules recomputed in the backward pass: `blocks`, or a pattern for names."""
    attention: Literal["plain", "fused"] = "plain"
    """Attention on a TPU: as written, or kernels (bfloat16; TRM and HRM up to 128 positions, causal, windowed)."""
    mlp: Literal["plain", "fused"] = "plain"
    """MLPs of TRM and HRM: as written, or by kernels; on a CPU fewer products."""
    choices: str = ""
    """File of `trm prove --choose`: the fastest right implementations."""
    batches_ahead: Annotated[int, Range(1, 1024)] = 2
    """Number of batches that are prefetched to the devices."""
    compile_cache: bool = True
    """Keep compiled programs, in JAX_COMPILATION_CACHE_DIR or a user's cache."""
    load: str = ""
    """Train step in a file of `trm compile-pod --save`; needs shard_map."""

    def __post_init__(self):
        check_fields(self, "compute.")
        if self.shard:
            from train_jax.runtime.shard_patterns import read_patterns  # here: most runs have none

            read_patterns(self.shard)
        if self.model_devices > 1 and not self.shard:
            raise UserError(
                f"compute.model_devices is {self.model_devices} without --shard; name the parameters to divide"
            )
        others = {
            "runner shard_map": self.runner == "shard_map",
            "shard_optimizer": self.shard_optimizer,
            "load": bool(self.load),
            "choices": bool(self.choices),
            "attention fused": self.attention == "fused",
            "mlp fused": self.mlp == "fused",
        }
        refused = [name for name, given in others.items() if given]
        if self.shard and refused:
            raise UserError(f"--shard cannot be used with compute.{refused[0]}; omit one of them")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run. `trm train PRESET` starts from a preset; every field can be set after it."""

    data_dir: str
    """Data set built by `trm build-data`, a folder or gs://bucket/folder; or several, separated by commas."""
    run_dir: str
    """Folder of the run, or gs://bucket/folder; started again with the same fields, the run continues where it
    stopped."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Continue the run in --run-dir: auto if it has a checkpoint, never (an error if there is a run), or must (an error
    if there is no checkpoint)."""
    task: str = "puzzles"
    """Task: puzzles, language, or package.module:Class for a task of your own."""
    task_config: tyro.conf.OmitArgPrefixes[TaskConfig]
    """Fields of the task."""
    model: str = "trm"
    """Architecture: trm, trm_singlez, trm_hier6, hrm, transformer, gpt (language), or package.module:Class for a module
    of your own."""
    arch: ModelConfig
    """Fields of the architecture."""
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    """Fields of the optimizer."""
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    """Distribution of the work."""
    platform: Platform = "auto"
    """Platform to compute on: auto takes a TPU or a GPU if the machine has one."""
    init_from: str = ""
    """Run folder or weights file (.safetensors, .pt) with the initial weights; empty for random weights."""
    init_only: str = ""
    """Regular expression that matches the whole names of the parameters to take from `init_from`; the others are
    random. Empty takes all."""
    init_optimizer: bool = False
    """Also take the optimizer's state of the run `init_from`."""
    epochs: Annotated[float, Range(0, 1e12, low_excluded=True)] = 50_000
    """Epochs: passes over the data."""
    steps: Steps = 0
    """Optimizer steps; 0 computes the number from `epochs`."""
    global_batch_size: BatchSize = 6144
    """Examples per step, on all devices together."""
    eval_every_steps: Steps = 1000
    """Optimizer steps between evaluations on the test set; 0 evaluates only at the end."""
    eval_batch_size: BatchSize = 6144
    """Examples in an evaluation batch, on all devices together."""
    eval_examples: Annotated[int, Range(0, 10**12)] = 0
    """Number of test examples in evaluations during training; 0 uses all. The final evaluation uses all."""
    checkpoint_every_steps: EverySteps = 1000
    """Optimizer steps between checkpoints."""
    checkpoint_every_minutes: Annotated[float, Range(0, 1e6)] = 0.0
    """Minutes between checkpoints, besides those by steps; after a multiple of log_every_steps. 0 for none."""
    keep_checkpoints: Annotated[int, Range(1, 10**6)] = 2
    """Number of newest checkpoints that are kept."""
    keep_every_steps: Steps = 0
    """Checkpoints at multiples of this are kept for good; 0 for none."""
    keep_best: str = ""
    """Keep also the checkpoint where this figure of the evaluation during training is highest, such as exact_accuracy,
    or lowest with a minus in front, such as -lm_loss; empty for none."""
    log_every_steps: EverySteps = 50
    """Optimizer steps between log lines, which are averages over these steps."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Seed of weights, batches and random numbers of the task."""
    profile: Annotated[int, Range(0, 1000)] = 0
    """Optimizer steps to trace for XProf and Perfetto, with snapshots of the device memory; 0 for none."""
    profile_skip: Annotated[int, Range(0, 10**9)] = 10
    """Optimizer steps of the session before the trace; the first ones are slower."""
    profile_server: Annotated[int, Range(0, 65535)] = 0
    """Port of every host that XProf connects to during the run; 0 for none. Open to everyone who can reach it."""
    debug_nans: bool = False
    """Stop at the first NaN or infinity and name the PyTorch submodule that produced it. Slow."""
    deterministic: bool = False
    """Require deterministic reductions on GPUs. CPU and TPU programs are always deterministic."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online if an API key is available, otherwise offline in the run folder for `wandb sync`. wandb is
    optional."""
    wandb_project: str = "trm"
    """wandb project of the run."""
    wandb_group: str = ""
    """wandb group of the run; empty for none."""
    wandb_name: str = ""
    """Name of the run in wandb; empty for that of its folder."""

    HELP_PAGES: ClassVar[dict[str, HelpPage]] = {
        "data": HelpPage("fields of the task: mixtures, augmentation, curriculum, exploration", ("task_config",)),
        "arch": HelpPage("the architecture: layers, recursion, positions", ("arch",)),
        "act": HelpPage(
            "the architecture: halting, loss, dtype, and sizes that the data set and the devices determine",
            tuple(f"arch.{name}" for name in ACT_FIELDS),
        ),
        "optim": HelpPage("optimizer, moments, weight decay, parameter groups, averaged weights", ("optim",)),
        "schedule": HelpPage(
            "schedules of learning rates, momentum and weight decay", tuple(f"optim.{name}" for name in SCHEDULE_FIELDS)
        ),
        "muon": HelpPage("Muon, and cautious weight decay", tuple(f"optim.{name}" for name in MUON_FIELDS)),
        "compute": HelpPage("distribution of the work over devices", ("compute", "platform")),
        "logging": HelpPage("evaluation during training, checkpoints, metrics, debugging", LOGGING_FIELDS),
    }
    """Pages of `trm train --help`; fields that are on none of them are on the first page."""

    def virtual_devices(self, processes: int) -> int:
        """Returns into how many devices each process divides its CPU; 0 for those of XLA_FLAGS, or one.

        With `cpu_examples`, the CPU of a single process is at most one device for each core, as its batches divide.
        """
        compute = self.compute
        if compute.cpu_devices or not compute.cpu_examples or processes > 1:
            return compute.cpu_devices
        most = min(cores(), max(1, self.global_batch_size // compute.cpu_examples))
        divided = math.gcd(self.global_batch_size, self.eval_batch_size)
        return max(count for count in range(1, most + 1) if divided % count == 0)

    def __post_init__(self):
        check_fields(self)
        for name, expected, value in (
            ("model", config_class(self.model, self.task), self.arch),
            ("task", task_config_class(self.task), self.task_config),
        ):
            if type(value) is not expected:
                raise UserError(
                    f"{name} {getattr(self, name)} needs {expected.__name__}, found "
                    f"{type(value).__name__}; change both together"
                )
        optim_config.check_pattern("init_only", self.init_only)
        dispatch = self.compute.steps_per_dispatch
        for name in ("eval_every_steps", "checkpoint_every_steps", "log_every_steps"):
            if getattr(self, name) % dispatch:
                raise UserError(
                    f"{name} {getattr(self, name)} is not a multiple of compute.steps_per_dispatch {dispatch}; "
                    "change one of them"
                )


def config_class(model: str, task: str) -> type[ModelConfig]:
    """Returns the configuration class of an architecture.

    Raises `UserError` for an architecture that is unknown, or that the task cannot train.
    """
    if outside.is_outside(model):
        return getattr(task_class(task), "outside_model_config_class", outside.OutsideConfig)
    try:
        found = registry.config_class(model)
    except ValueError as error:
        raise UserError(str(error)) from error
    models = getattr(task_class(task), "models", ())
    if models and model not in models:
        raise UserError(
            f"--model {model} is not for task {task}; use one of {', '.join(models)}, or package.module:Class"
        )
    return found


def with_model(config: RunConfig, model: str, task: str = "") -> RunConfig:
    """Returns the same run with another architecture, and perhaps another task with the defaults of its fields.

    Fields of `config.arch` that differ from the defaults of their class are kept if the new class has them; other
    fields get the defaults of the new class. Raises `UserError` for an unknown architecture or a class that cannot be
    imported.
    """
    task = task or config.task
    task_config = config.task_config if task == config.task else task_config_class(task)()
    new_class = config_class(model, task)
    if model == config.model and type(config.arch) is new_class:
        return dataclasses.replace(config, task=task, task_config=task_config)
    names = {field.name for field in dataclasses.fields(new_class)}
    changed = {
        field.name: getattr(config.arch, field.name)
        for field in dataclasses.fields(config.arch)
        if field.name in names and getattr(config.arch, field.name) != field.default
    }
    try:
        if outside.is_outside(model) and outside.is_plain(outside.find(model)) and "halt_max_steps" in names:
            changed["halt_max_steps"] = 1
        arch = new_class(**changed)
    except ValueError as error:
        raise UserError(str(error)) from error
    return dataclasses.replace(config, model=model, arch=arch, task=task, task_config=task_config)


def with_task(config: RunConfig, task: str) -> RunConfig:
    """Returns the same run with another task and the defaults of its fields."""
    return with_model(config, config.model, task)


def to_json(config: RunConfig, run_id: str = "") -> str:
    """Returns config.json: the fields, the plugins of the user in this process, and the id of the run."""
    fields = dataclasses.asdict(config)
    if plugins := plugin.record(config.task):
        fields[plugin.RECORD] = plugins
    if run_id:
        fields[RUN_ID] = run_id
    return json.dumps(fields, indent=1)


def read_config(path: Path, *, needs_script: bool = True) -> RunConfig:
    """Reads the config.json of a run. Raises `UserError` if it was not written by a version of this class.

    `needs_script`: raise it for the run of a training script whose file is not in use. The file of a plugin with a task
    of its own is always needed.
    """
    parts = {"model": TEXT, "task": TEXT, "arch": OBJECT, "task_config": OBJECT, "optim": OBJECT, "compute": OBJECT}
    remedy = "use a run folder that `trm train` wrote"
    values = read_object(path, parts, remedy=remedy)
    if needs_script or values["task"] != plugin.SCRIPT_TASK:
        plugin.require(values.get(plugin.RECORD), str(path.parent))
    else:
        plugin.use_scripts()
    try:
        return from_values(values)
    except (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} cannot be read ({str(error)[:200]}); {remedy}") from error


def from_json(text: str) -> RunConfig:
    """Returns the configuration that `to_json` wrote."""
    return from_values(json.loads(text))


def from_values(values: dict[str, Any]) -> RunConfig:
    """Returns the configuration with these JSON values. Raises several errors for values that are none's."""
    parts = {
        "arch": config_class(values["model"], values["task"])(**values["arch"]),
        "task_config": _from_fields(task_config_class(values["task"]), values["task_config"]),
        "optim": optim_config.from_fields(values["optim"]),
        "compute": _from_fields(ComputeConfig, values["compute"]),
    }
    others = {name: value for name, value in values.items() if name not in (RUN_ID, plugin.RECORD, *parts)}
    return RunConfig(**others, **parts)


def _from_fields(cls: type, values: dict[str, Any]) -> Any:
    """Builds a dataclass from JSON values, with lists converted to tuples."""
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def differences_of_fields(before: dict, now: dict, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yields the fields of two configurations with different values, by dotted name: (name, [before, now])."""
    for name in now | before:
        old = before.get(name)
        new = now.get(name)
        if isinstance(new, dict) and isinstance(old, dict):
            yield from differences_of_fields(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", [old, new]
