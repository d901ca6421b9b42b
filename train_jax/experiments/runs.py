"""Experiments as runs: the configuration of an id, what differs from the baseline, and how long it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from train_jax.errors import UserError
from train_jax.experiments.table import BASE_PRESET, EXPERIMENTS, Experiment
from train_jax.run.config import RunConfig
from train_jax.run.presets import all_presets, preset
from train_jax.runtime.batch_size import epochs_to_steps

EVAL_EVERY_STEPS = 5000
LONG_WARMUP = 0.1
"""Share of the steps above which a warm-up is remarked on."""


def experiment(experiment_id: str) -> Experiment:
    """Raises `UserError` for an unknown id."""
    if experiment_id not in EXPERIMENTS:
        near = [known for known in EXPERIMENTS if known.startswith(experiment_id[:5])]
        raise UserError(
            f"unknown experiment {experiment_id!r}; use one of {', '.join(near) or 'those of `trm sweep list`'}"
        )
    return EXPERIMENTS[experiment_id]


def named_run(name: str, base: str | None = None) -> RunConfig:
    """The run that a preset or an experiment id names; `base`: apply the experiment to another preset."""
    if name in EXPERIMENTS:
        return experiment_run(name, base)
    if base is not None:
        raise UserError(f"--preset {base} is for experiments, and {name} is a preset already; leave it out")
    if name not in all_presets():
        raise UserError(
            f"unknown preset {name!r}; use one of {', '.join(all_presets())}, or an experiment of `trm sweep list`"
        )
    return preset(name)


def experiment_run(experiment_id: str, base: str | None = None) -> RunConfig:
    """The configuration of an experiment. On another preset than the baseline's only the listed changes are made."""
    row = experiment(experiment_id)
    changes: dict[str, Any] = {"run_dir": f"runs/{row.group}/{experiment_id}", **row.changes}
    if base is None:
        changes = {"eval_every_steps": EVAL_EVERY_STEPS, "data_dir": row.data_dir, **changes}
    return with_changes(preset(base or BASE_PRESET), changes)


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The same run with other values, by dotted field name. Raises `UserError` for a field that it does not have."""
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in changes.items():
        owner, _, field = name.rpartition(".")
        target = getattr(config, owner) if owner else config
        if not hasattr(target, field):
            raise UserError(f"{name} is not a field of this run ({config.model}, {config.task})")
        (nested.setdefault(owner, {}) if owner else flat)[field] = value
    parts = {owner: dataclasses.replace(getattr(config, owner), **values) for owner, values in nested.items()}
    return dataclasses.replace(config, **flat, **parts)


def differences(config: RunConfig, reference: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted field name -> (value in `reference`, value in `config`), where they differ."""
    return _differences(dataclasses.asdict(reference), dataclasses.asdict(config))


def _differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    changed: dict[str, tuple[Any, Any]] = {}
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed |= _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            changed[prefix + name] = (old, new)
    return changed


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long a run trains."""

    steps: int
    warmup_share: float
    """Of the steps, those in which the learning rate still rises."""
    examples: int

    def lines(self) -> list[str]:
        lines = [
            f"steps            {self.steps:,}",
            f"share of warm-up {self.warmup_share:.1%}",
            f"examples seen    {self.examples:,}",
        ]
        if self.warmup_share > LONG_WARMUP:
            lines.append(f"warning: warm-up takes more than {LONG_WARMUP:.0%} of the steps")
        return lines


def plan(config: RunConfig, examples_per_epoch: float) -> Plan:
    """The plan of a run on data with so many examples in an epoch."""
    steps = config.steps or epochs_to_steps(examples_per_epoch, config.epochs, config.global_batch_size)
    return Plan(steps, min(config.optim.warmup_steps / steps, 1.0), steps * config.global_batch_size)
