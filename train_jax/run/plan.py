"""The length of a run, and its differences from another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from train_jax.run.config import RunConfig, differences_of_fields
from train_jax.run.presets import preset
from train_jax.runtime.batch_size import epochs_to_steps

REFERENCE = "sudoku-extreme"
"""Preset that runs are compared with."""
REFERENCE_EVAL_EVERY_STEPS = 5000
LONG_WARMUP = 0.1
"""Share of the steps above which a warm-up causes a warning."""


def reference_run() -> RunConfig:
    """Returns the baseline of the experiments."""
    return dataclasses.replace(preset(REFERENCE), eval_every_steps=REFERENCE_EVAL_EVERY_STEPS)


def flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of a configuration by their dotted names."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differences(config: RunConfig, reference: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the fields that differ: dotted name -> (value in `reference`, value in `config`)."""
    pairs = differences_of_fields(dataclasses.asdict(reference), dataclasses.asdict(config))
    return {name: (old, new) for name, (old, new) in pairs}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The length of a training run."""

    steps: int
    warmup_share: float
    """Share of the steps in which the learning rate increases."""
    examples: int


def plan(config: RunConfig, examples_per_epoch: float) -> Plan:
    """Returns the plan of a run, for data with `examples_per_epoch`."""
    steps = config.steps or epochs_to_steps(examples_per_epoch, config.epochs, config.global_batch_size)
    return Plan(steps, min(config.optim.warmup_steps / steps, 1.0), steps * config.global_batch_size)


def plan_lines(config: RunConfig, examples_per_epoch: float) -> Iterator[str]:
    """Yields the plan of a run, with a warning about a long warm-up."""
    length = plan(config, examples_per_epoch)
    yield f"steps            {length.steps:,}"
    yield f"share of warm-up {length.warmup_share:.1%}"
    yield f"examples seen    {length.examples:,}"
    if length.warmup_share > LONG_WARMUP:
        yield f"warning: warm-up takes more than {LONG_WARMUP:.0%} of the steps"
