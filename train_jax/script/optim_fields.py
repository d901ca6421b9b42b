"""The fields of `OptimConfig` in the run of a script: their defaults, and those beside an optimizer of the script."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from train_jax.core.optim.config import OptimConfig
from train_jax.errors import UserError

ADAMW = OptimConfig(lr=1e-3, warmup_steps=0, beta2=0.999, weight_decay=0.01, ema_decay=0.0)
"""The defaults of `torch.optim.AdamW`, for a script without `optimizer`."""
BESIDE_OPTIMIZER = ("clip_norm", "freeze", "ema_decay", "max_skipped_steps", "loss_scale_growth_steps")
"""The fields that a run with an optimizer of its script uses."""


def check_beside_optimizer(optim: OptimConfig, where: str, defaults: OptimConfig = ADAMW) -> None:
    """Raises `UserError` for a field that differs from its default and that the script's own optimizer replaces.

    `where`: the line of `optimizer`.
    """
    names = [field.name for field in dataclasses.fields(optim)]
    changed = [name for name in names if getattr(optim, name) != getattr(defaults, name)]
    check_given_beside_optimizer(optim, changed, where)


def check_given_beside_optimizer(optim: OptimConfig, given: Iterable[str], where: str) -> None:
    """Raises `UserError` for a field among `given` that the script's own optimizer replaces."""
    for name in given:
        if name in BESIDE_OPTIMIZER or not hasattr(optim, name):
            continue
        raise UserError(
            f"{where}: optim.{name} is {getattr(optim, name)!r}, but the optimizer is that of the script, which does "
            "not read it; set it there, or omit one of the two"
        )


def beside_optimizer(optim: OptimConfig) -> OptimConfig:
    """Returns the defaults of a script with the fields of `optim` that are used beside an optimizer."""
    return dataclasses.replace(ADAMW, **{name: getattr(optim, name) for name in BESIDE_OPTIMIZER})
