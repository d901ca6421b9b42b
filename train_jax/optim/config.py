"""The configuration of the optimizer, for all parameters and for parameter groups."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal, get_args

from models_torch.ranges import Range, check_ranges
from train_jax.errors import UserError
from train_jax.plugins import is_plugin

Optimizer = Literal["adamw", "adam_atan2", "lion", "muon"]
Decay = Literal["cosine", "linear"]

LearningRate = Annotated[float, Range(0, 1e3)]
Share = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, 1, high_excluded=True)]
Steps = Annotated[int, Range(0, 10**12)]
Count = Annotated[int, Range(1, 10**12)]
WeightDecay = Annotated[float, Range(0, 1e6)]
Epsilon = Annotated[float, Range(0, 1)]


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Fields of `OptimConfig` for a group of parameters; None keeps the common value."""

    pattern: str
    """Regular expression that matches the whole qualified name of each parameter of the group. A parameter belongs to
    the first group that matches."""
    optimizer: str | None = None
    lr: LearningRate | None = None
    warmup_steps: Steps | None = None
    decay: Decay | None = None
    decay_share: Share | None = None
    lr_min_ratio: Share | None = None
    beta1: BelowOne | None = None
    beta2: BelowOne | None = None
    eps: Epsilon | None = None
    muon_momentum: BelowOne | None = None
    weight_decay: WeightDecay | None = None

    def __post_init__(self):
        _check(self, "optim.groups: ")
        check_pattern("optim.groups: pattern", self.pattern)


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The configuration of the optimizer. Raises `UserError` for a value out of its range."""

    optimizer: str = "adamw"
    """Update rule of the dense parameters: adamw, adam_atan2, lion, muon, or package.module:function for your own.
    `muon` orthogonalizes hidden matrices; embeddings and heads use AdamW."""
    lr: LearningRate = 1e-4
    """Learning rate of the dense parameters after warm-up."""
    warmup_steps: Steps = 2000
    """Optimizer steps over which the learning rates increase linearly from 0."""
    decay: Decay = "cosine"
    """Shape of the decay to `lr_min_ratio`."""
    decay_share: Share = 1.0
    """Share of the steps after warm-up, at the end of the run, over which the learning rate decays."""
    lr_min_ratio: Share = 1.0
    """The learning rate of the last step as a share of `lr`; 1 keeps it constant."""
    beta1: BelowOne = 0.9
    """Decay of the first moment; for `lion` the weight of the momentum inside the sign."""
    beta2: BelowOne = 0.95
    """Decay of the second moment; for `lion` of the momentum."""
    eps: Epsilon = 1e-8
    """Added to the root of the second moment in AdamW."""
    muon_momentum: BelowOne = 0.95
    """Nesterov momentum of the matrices that `muon` updates."""
    weight_decay: WeightDecay = 1.0
    """Decoupled weight decay of the dense parameters, per unit of learning rate."""
    clip_norm: Annotated[float, Range(0, 1e12)] = 0.0
    """Dense gradients with a larger global norm are scaled down to it; 0 does not clip."""
    groups: tuple[ParameterGroup, ...] = ()
    """Other values for some parameters, as JSON: '[{"pattern": "embed_tokens.*", "lr": 0.2, "weight_decay": 0}]'."""
    freeze: str = ""
    """Regular expression that matches the whole qualified names of dense parameters that are not trained; '.*' trains
    only the sparse tables. Their average does not change either."""
    sparse_lr: LearningRate = 1e-4
    """Learning rate of sparse tables such as the puzzle embedding (sign SGD), with the same schedule."""
    sparse_weight_decay: WeightDecay = 1.0
    """Decoupled weight decay of the table rows in the batch, per unit of learning rate."""
    ema_decay: BelowOne = 0.999
    """Decay per step of the averaged weights that are evaluated and exported; 0 keeps no average and evaluates the raw
    weights."""
    max_skipped_steps: Count = 20
    """Consecutive steps with a non-finite loss or gradient after which the run stops; such steps are skipped."""
    loss_scale_growth_steps: Count = 2000
    """Finite steps after which the loss scale of float16 doubles; it halves at every overflow."""

    def __post_init__(self):
        _check(self, "optim.")
        if self.optimizer not in get_args(Optimizer) and not is_plugin(self.optimizer):
            names = ", ".join(get_args(Optimizer))
            raise UserError(
                f"optim.optimizer is {self.optimizer!r}; use one of {names}, or package.module:function for your own"
            )
        check_pattern("optim.freeze", self.freeze)

    def of_group(self, group: ParameterGroup) -> OptimConfig:
        """Returns this configuration with the values of the group."""
        values = dataclasses.asdict(group)
        del values["pattern"]
        return dataclasses.replace(
            self, groups=(), **{name: value for name, value in values.items() if value is not None}
        )


def from_fields(values: dict[str, Any]) -> OptimConfig:
    """Returns an `OptimConfig` from JSON values. Raises TypeError for unknown fields."""
    groups: Any = tuple(ParameterGroup(**group) for group in values.get("groups", ()))
    return OptimConfig(**(values | {"groups": groups}))


def _check(config: Any, prefix: str) -> None:
    try:
        check_ranges(config)
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None


def check_pattern(name: str, pattern: str) -> None:
    """Raises `UserError` if the value of a field is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{name} {pattern!r} is not a regular expression ({error}); correct it") from None
