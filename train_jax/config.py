"""What defines a run: one frozen dataclass, every field with its unit; presets by name."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal, get_args

from models_torch import outside, registry
from models_torch.config import ACTConfig
from models_torch.trm import TRMConfig
from train_jax.errors import UserError
from train_jax.puzzles.format import Metadata

Optimizer = Literal["adamw", "adam_atan2", "lion", "muon"]


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """How parameters move. A value out of its range is a `UserError`."""

    optimizer: Optimizer = "adamw"
    """Rule of the dense parameters; `muon` orthogonalises hidden matrices, embeddings and heads stay with AdamW."""
    lr: float = 1e-4
    """Learning rate of the dense parameters after warm-up."""
    warmup_steps: int = 2000
    """Optimizer steps over which the learning rates grow linearly from 0."""
    lr_min_ratio: float = 1.0
    """The learning rate falls on a cosine to this share of `lr` at the last step; 1 keeps it constant."""
    beta1: float = 0.9
    """Decay of the first moment; for `lion` the share of the momentum in the sign that is taken."""
    beta2: float = 0.95
    """Decay of the second moment; for `lion` of the momentum."""
    muon_momentum: float = 0.95
    """Nesterov momentum of the matrices that `muon` moves."""
    weight_decay: float = 1.0
    """Decoupled weight decay of the dense parameters, per unit of learning rate."""
    clip_norm: float = 0.0
    """Dense gradients with a larger global norm are scaled down to it; 0 clips nothing."""
    freeze_weights: bool = False
    """Learn the puzzle table alone; dense parameters and their average stay as they are."""
    puzzle_lr: float = 1e-4
    """Learning rate of the puzzle table (sign SGD), same schedule."""
    puzzle_weight_decay: float = 1.0
    """Decoupled weight decay of the puzzle rows in the batch, per unit of learning rate."""
    ema_decay: float = 0.999
    """Decay per step of the averaged weights that are evaluated and exported; 0 evaluates the raw weights."""
    max_skipped_steps: int = 20
    """Steps in a row with a loss or gradient that is not finite after which the run stops; each one is left out."""
    loss_scale_growth_steps: int = 2000
    """Good steps after which the loss scale of float16 doubles; it halves at every overflow."""

    def __post_init__(self):
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value < high:
                wanted = f"at least {low}" if high == math.inf else f"a value from {low} to below {high}"
                raise UserError(f"optim.{name} is {value}; use {wanted}")
        if not 0 <= self.lr_min_ratio <= 1:
            raise UserError(f"optim.lr_min_ratio is {self.lr_min_ratio}; use a share of lr, from 0 to 1")
        if self.optimizer not in get_args(Optimizer):
            raise UserError(f"optim.optimizer is {self.optimizer!r}; use one of {', '.join(get_args(Optimizer))}")


_RANGES: dict[str, tuple[float, float]] = {
    "lr": (0, math.inf),
    "warmup_steps": (0, math.inf),
    "beta1": (0, 1),
    "beta2": (0, 1),
    "muon_momentum": (0, 1),
    "weight_decay": (0, math.inf),
    "clip_norm": (0, math.inf),
    "puzzle_lr": (0, math.inf),
    "puzzle_weight_decay": (0, math.inf),
    "ema_decay": (0, 1),
    "max_skipped_steps": (1, math.inf),
    "loss_scale_growth_steps": (1, math.inf),
}
"""From, and below what."""


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How the work is laid on the devices. None of it changes what is learned."""

    runner: Literal["pmap", "shard_map"] = "pmap"
    """What spreads a step over the devices."""
    accumulation_steps: int = 1
    """Parts in which a device takes its share of a batch, one after the other: less memory, the same gradients."""
    steps_per_dispatch: int = 1
    """Optimizer steps that the devices do by themselves before the host speaks to them again."""
    remat: str = ""
    """Submodules whose activations are computed again in the backward pass instead of kept: `blocks` for the layers of
    the models here, or a regular expression over qualified names."""
    batches_ahead: int = 2
    """Batches that wait on the devices."""

    def __post_init__(self):
        for name in ("accumulation_steps", "steps_per_dispatch", "batches_ahead"):
            if getattr(self, name) < 1:
                raise UserError(f"compute.{name} is {getattr(self, name)}; use at least 1")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run. `trm train PRESET` starts from a preset; any field can be set after it."""

    data_dir: str = "data/sudoku-extreme-1k-aug-1000"
    """Data set made by `trm build-data`, or several with commas between them to train on jointly."""
    data_weights: str = ""
    """Of several data sets, the share of each in a batch (3,1: three quarters and one); by default one pass over each
    takes equally long."""
    augment: bool = False
    """Every training example that is drawn gets a symmetry of its own, instead of copies stored in the data set; for
    Sudokus and mazes. Evaluation is never augmented."""
    run_dir: str = "runs/sudoku-extreme"
    """Where the run lives; started again with the same fields, it continues where it stopped."""
    model: str = "trm"
    """Architecture: trm, trm_singlez, trm_hier6, hrm, transformer, or package.module:Class for one of your own."""
    arch: ACTConfig = dataclasses.field(default_factory=lambda: TRMConfig(mlp_t=True, pos_encodings="none"))
    """Its configuration, of the class that belongs to `model`."""
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    """Its optimizer."""
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    """How it is computed."""
    curriculum_epochs: float = 0
    """Passes over the data during which recursion deepens, both cycles linearly, to what `arch` says; 0: not at all."""
    curriculum_start: tuple[int, int] = (1, 2)
    """H-cycles and L-cycles that the curriculum starts with."""
    halt_exploration_end: float | None = None
    """The halting exploration falls or grows linearly from `arch.halt_exploration_prob` to this at the last step."""
    epochs: int = 50_000
    """Passes over the data: each draws one puzzle of every group."""
    steps: int = 0
    """Optimizer steps; 0 takes as many as `epochs` makes."""
    global_batch_size: int = 6144
    """Examples in a step, all devices together."""
    eval_every_steps: int = 1000
    """Optimizer steps between evaluations on the test set; 0 evaluates only at the end."""
    eval_batch_size: int = 6144
    """Examples in an evaluation batch, all devices together."""
    eval_examples: int = 0
    """Test examples scored during training; 0 takes all. The last evaluation always takes all."""
    checkpoint_every_steps: int = 1000
    """Optimizer steps between checkpoints."""
    log_every_steps: int = 50
    """Optimizer steps that a line of metrics averages over."""
    seed: int = 0
    """Seeds weights, batches and exploration."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online with a key, otherwise written to the run's folder for `wandb sync`; absent wandb is no error."""
    wandb_project: str = "trm"
    """Project that the run is logged to."""

    def __post_init__(self):
        expected = _config_class(self.model)
        if type(self.arch) is not expected:
            raise UserError(
                f"model {self.model} is configured by {expected.__name__}, arch is a {type(self.arch).__name__}; "
                "change both with `with_model`"
            )
        together = self.compute.steps_per_dispatch
        for name in ("eval_every_steps", "checkpoint_every_steps", "log_every_steps"):
            if getattr(self, name) % together:
                raise UserError(
                    f"{name} {getattr(self, name)} is no multiple of compute.steps_per_dispatch {together}; make it one"
                )
        for name in ("H_cycles", "L_cycles"):
            if self.curriculum_epochs and not hasattr(self.arch, name):
                raise UserError(f"curriculum_epochs deepens recursion and {self.model} has no {name}; leave it out")
        if self.halt_exploration_end is not None and not 0 <= self.halt_exploration_end <= 1:
            raise UserError(f"halt_exploration_end is {self.halt_exploration_end}; use a probability, from 0 to 1")


def _config_class(model: str) -> type[ACTConfig]:
    try:
        return registry.config_class(model)
    except ValueError as error:
        raise UserError(str(error)) from error


def _small_sudoku(
    size: int, *, steps: int, eval_every_steps: int, halt_max_steps: int, halt_exploration_prob: float
) -> RunConfig:
    """What learns fastest on two CPU cores: one wide mixer block, softmax, a high learning rate with full decay.

    docs/log.md has what else was tried.
    """
    return RunConfig(
        data_dir=f"data/sudoku-{size}x{size}",
        run_dir=f"runs/sudoku{size}",
        arch=TRMConfig(
            mlp_t=True,
            pos_encodings="none",
            hidden_size=128,
            L_layers=1,
            H_cycles=2,
            L_cycles=2,
            mlp_multiple_of=16,
            puzzle_emb_ndim=128,
            puzzle_emb_len=1,
            halt_max_steps=halt_max_steps,
            halt_exploration_prob=halt_exploration_prob,
            forward_dtype="float32",
            loss_type="softmax_cross_entropy",
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=100, lr_min_ratio=0.02, puzzle_lr=1e-2, ema_decay=0.99),
        steps=steps,
        global_batch_size=32,
        eval_every_steps=eval_every_steps,
        eval_batch_size=250,
        eval_examples=250,
        checkpoint_every_steps=200,
        log_every_steps=25,
    )


PRESETS: dict[str, RunConfig] = {
    "sudoku-extreme": RunConfig(),
    "sudoku9": _small_sudoku(9, steps=2200, eval_every_steps=550, halt_max_steps=5, halt_exploration_prob=0.3),
    "sudoku6": _small_sudoku(6, steps=700, eval_every_steps=175, halt_max_steps=8, halt_exploration_prob=0.1),
    "tiny": RunConfig(
        data_dir="data/tiny",
        run_dir="runs/tiny",
        arch=TRMConfig(
            mlp_t=True,
            pos_encodings="none",
            hidden_size=32,
            num_heads=2,
            L_layers=1,
            H_cycles=2,
            L_cycles=2,
            mlp_multiple_of=16,
            puzzle_emb_ndim=32,
            puzzle_emb_len=1,
            halt_max_steps=4,
            forward_dtype="float32",
        ),
        optim=OptimConfig(lr=1e-3, warmup_steps=10, weight_decay=0.1, ema_decay=0.9),
        steps=40,
        global_batch_size=16,
        eval_every_steps=20,
        eval_batch_size=16,
        checkpoint_every_steps=10,
        log_every_steps=5,
    ),
}
"""`sudoku-extreme` is the research baseline (a pod, or a patient accelerator). `sudoku9` (half the cells empty) learns
on two CPU cores in minutes, `sudoku6` in half a minute. `tiny` runs through in seconds and learns little."""


def preset(name: str) -> RunConfig:
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; use one of {', '.join(PRESETS)}")
    return PRESETS[name]


def with_model(config: RunConfig, model: str) -> RunConfig:
    """The same run with another architecture.

    What `config.arch` sets beside its class's defaults is carried over where the new class has a field of that name;
    the rest are the new class's own defaults. Raises `UserError` for an unknown architecture, or a class that is not
    there.
    """
    if model == config.model:
        return config
    new_class = _config_class(model)
    names = {field.name for field in dataclasses.fields(new_class)}
    set_here = {
        field.name: getattr(config.arch, field.name)
        for field in dataclasses.fields(config.arch)
        if field.name in names and getattr(config.arch, field.name) != field.default
    }
    try:
        if outside.is_outside(model) and outside.is_plain(outside.find(model)):
            set_here["halt_max_steps"] = 1
        arch = new_class(**set_here)
    except ValueError as error:
        raise UserError(str(error)) from error
    return dataclasses.replace(config, model=model, arch=arch)


def sized_for(config: RunConfig, data: Metadata, local_batch_size: int) -> Any:
    """The architecture's configuration with what the data set and the devices decide filled in."""
    return dataclasses.replace(
        config.arch,
        batch_size=local_batch_size,
        seq_len=data.seq_len,
        vocab_size=data.vocab_size,
        num_puzzle_identifiers=data.num_puzzle_identifiers,
    )


def to_json(config: RunConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=1)


def from_json(text: str) -> RunConfig:
    """Raises `UserError` for a file that no version of this class wrote."""
    try:
        fields = json.loads(text)
        fields["arch"] = _config_class(fields["model"])(**fields["arch"])
        fields["optim"] = OptimConfig(**fields["optim"])
        fields["compute"] = ComputeConfig(**fields.get("compute", {}))
        fields["curriculum_start"] = tuple(fields.get("curriculum_start", (1, 2)))
        return RunConfig(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the run's config.json cannot be read ({error}); it must be one that `trm train` wrote"
        ) from error
