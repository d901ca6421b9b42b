"""The configuration of the optimizer, for all parameters and for parameter groups."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal

from models_torch.ranges import Range
from train_jax.errors import UserError, check_fields
from train_jax.plugin import names_object

Decay = Literal["cosine", "linear", "warmdown"]
NewtonSchulzDtype = Literal["float32", "bfloat16"]
WeightDecaySchedule = Literal["constant", "cosine"]

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
    muon_beta2: BelowOne | None = None
    newton_schulz_dtype: NewtonSchulzDtype | None = None
    momentum_start: BelowOne | None = None
    momentum_warmup_steps: Steps | None = None
    momentum_end: BelowOne | None = None
    weight_decay: WeightDecay | None = None
    weight_decay_schedule: WeightDecaySchedule | None = None
    cautious_decay: bool | None = None

    def __post_init__(self):
        check_fields(self, "optim.groups: ")
        check_pattern("optim.groups: pattern", self.pattern)


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The configuration of the optimizer. Raises `UserError` for a value out of its range."""

    optimizer: str = "adamw"
    """Update rule of the dense parameters: adamw, adam_atan2, adam_atan2_published, lion, muon, muon_2025,
    muon_2026 (those of `train_jax/core/optim/rules.py`), or package.module:function for your own. The three `muon`
    orthogonalize hidden matrices; embeddings and heads use AdamW. `muon` scales steps to those of AdamW, `muon_2025`
    and `muon_2026` are those of nanochat."""
    lr: LearningRate = 1e-4
    """Learning rate of the dense parameters after warm-up."""
    warmup_steps: Steps = 2000
    """Optimizer steps over which the learning rates increase linearly from 0."""
    decay: Decay = "cosine"
    """Shape of the decay to `lr_min_ratio`. `warmdown` is linear, and reaches it one step after the last."""
    decay_share: Share = 1.0
    """Share of the steps after warm-up, at the end of the run, over which the learning rate decays; for `warmdown` a
    share of all steps."""
    lr_min_ratio: Share = 1.0
    """The learning rate of the last step as a share of `lr`; 1 keeps it constant."""
    beta1: BelowOne = 0.9
    """Decay of the first moment; for `lion` the weight of the momentum inside the sign."""
    beta2: BelowOne = 0.95
    """Decay of the second moment; for `lion` of the momentum."""
    eps: Epsilon = 1e-8
    """Added to the root of the second moment in AdamW."""
    muon_momentum: BelowOne = 0.95
    """Nesterov momentum of the matrices that the `muon` optimizers update."""
    muon_beta2: BelowOne = 0.9
    """Decay of the mean squares of rows or columns in `muon_2026`."""
    newton_schulz_dtype: NewtonSchulzDtype = "float32"
    """Type in which the `muon` optimizers orthogonalize; nanochat uses bfloat16."""
    momentum_start: BelowOne | None = None
    """Momentum of the first step; it changes linearly to `muon_momentum`, or to `beta1` of other optimizers. By default
    it is constant."""
    momentum_warmup_steps: Steps = 0
    """Optimizer steps after which the momentum has changed from `momentum_start`."""
    momentum_end: BelowOne | None = None
    """Momentum at the end of the run; it changes linearly while the learning rate decays."""
    weight_decay: WeightDecay = 1.0
    """Decoupled weight decay of the dense parameters, per unit of learning rate."""
    weight_decay_schedule: WeightDecaySchedule = "constant"
    """`cosine` decays `weight_decay` to 0 over the run."""
    cautious_decay: bool = False
    """Decay only the elements that the update moves towards 0."""
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
    skip_zero_gradients: bool = False
    """A parameter whose gradient is zero everywhere does not change at a step, nor do its moments and its count of
    steps: as in PyTorch, where a parameter that no gradient reaches has none. Without parameter groups."""
    max_skipped_steps: Count = 20
    """Consecutive steps with a non-finite loss or gradient after which the run stops; such steps are skipped."""
    loss_scale_growth_steps: Count = 2000
    """Finite steps after which the loss scale of float16 doubles; it halves at every overflow."""

    def __post_init__(self):
        check_fields(self, "optim.")
        check_pattern("optim.freeze", self.freeze)
        self._check_momentum()

    def _check_momentum(self) -> None:
        scheduled = self.momentum_start is not None or self.momentum_end is not None
        if scheduled and names_object(self.optimizer):
            raise UserError(
                f"optim.momentum_start and optim.momentum_end do not change the momentum of {self.optimizer}; omit them"
            )
        if self.skip_zero_gradients and self.groups:
            raise UserError("optim.skip_zero_gradients has no meaning for optim.groups; omit one of them")
        if (self.momentum_start is None) != (self.momentum_warmup_steps == 0):
            raise UserError(
                f"optim.momentum_start is {self.momentum_start} and optim.momentum_warmup_steps is "
                f"{self.momentum_warmup_steps}; give both, or neither"
            )

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


def check_pattern(name: str, pattern: str) -> None:
    """Raises `UserError` if the value of a field is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{name} {pattern!r} is not a regular expression ({error}); correct it") from None
