"""What defines a run: one frozen dataclass, every field with its unit; presets by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from models_torch.registry import ARCHITECTURES
from models_torch.trm import TRMConfig
from train_jax.errors import UserError
from train_jax.puzzles.format import Metadata


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """How parameters move."""

    lr: float = 1e-4
    """Learning rate of the dense parameters after warm-up."""
    warmup_steps: int = 2000
    """Optimizer steps over which the learning rates grow linearly from 0."""
    lr_min_ratio: float = 1.0
    """The learning rate falls on a cosine to this share of `lr` at the last step; 1 keeps it constant."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    weight_decay: float = 1.0
    """Decoupled weight decay of the dense parameters, per unit of learning rate."""
    puzzle_lr: float = 1e-4
    """Learning rate of the puzzle table (sign SGD), same schedule."""
    puzzle_weight_decay: float = 1.0
    """Decoupled weight decay of the puzzle rows in the batch, per unit of learning rate."""
    ema_decay: float = 0.999
    """Decay per step of the averaged weights that are evaluated and exported; 0 evaluates the raw weights."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run. `trm train PRESET` starts from a preset; any field can be set after it."""

    data_dir: str = "data/sudoku-extreme-1k-aug-1000"
    """Data set made by `trm build-data`, or several with commas between them to train on jointly."""
    data_weights: str = ""
    """Of several data sets, the share of each in a batch (3,1: three quarters and one); by default one pass over each
    takes equally long."""
    run_dir: str = "runs/sudoku-extreme"
    """Where the run lives; started again with the same fields, it continues where it stopped."""
    model: Literal["trm"] = "trm"
    """Architecture."""
    arch: TRMConfig = dataclasses.field(default_factory=lambda: TRMConfig(mlp_t=True, pos_encodings="none"))
    """Its configuration."""
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    """Its optimizer."""
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
        fields["arch"] = ARCHITECTURES[fields["model"]].config_class(**fields["arch"])
        fields["optim"] = OptimConfig(**fields["optim"])
        return RunConfig(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the run's config.json cannot be read ({error}); it must be one that `trm train` wrote"
        ) from error
