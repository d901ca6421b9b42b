"""The configuration of an experiment, its differences from the baseline, and its number of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from train_jax.errors import UserError
from train_jax.experiments.data_sets import SUDOKU_SIZES, data_sets
from train_jax.experiments.scaling import scaled_changes
from train_jax.experiments.table import BASE_PRESET, CONFOUNDED, EXPERIMENTS, TWINS, Experiment
from train_jax.run.config import RunConfig, with_model
from train_jax.run.presets import preset
from train_jax.runtime.batch_size import epochs_to_steps

EVAL_EVERY_STEPS = 5000
LONG_WARMUP = 0.1
"""Share of the steps above which a warm-up causes a warning."""


def experiment(experiment_id: str) -> Experiment:
    """Returns an experiment. Raises `UserError` for an unknown id."""
    if experiment_id not in EXPERIMENTS:
        near = [known for known in EXPERIMENTS if known.startswith(experiment_id[:5])]
        raise UserError(
            f"unknown experiment {experiment_id!r}; use one of {', '.join(near) or 'those of `trm sweep list`'}"
        )
    return EXPERIMENTS[experiment_id]


def named_run(name: str, base: str | None = None) -> RunConfig:
    """Returns the run of a preset or experiment id; an experiment can be applied to another preset, `base`."""
    if name in EXPERIMENTS:
        return experiment_run(name, base)
    if base is not None:
        raise UserError(f"--preset {base} is for experiments, but {name} is a preset; omit --preset")
    return preset(name, or_else=", or an experiment of `trm sweep list`")


def experiment_run(experiment_id: str, base: str | None = None) -> RunConfig:
    """Returns the configuration of an experiment; on a preset `base`, the changes have the proportions of its size."""
    row, reference = experiment(experiment_id), preset(base or BASE_PRESET)
    sets = data_sets(row, base or BASE_PRESET)
    changes: dict[str, Any] = {"run_dir": run_dir_of(experiment_id)}
    if row.starts_from:
        changes["init_from"] = run_dir_of(row.starts_from)
    if base is None:
        changes["eval_every_steps"] = EVAL_EVERY_STEPS
    if base is None or base in SUDOKU_SIZES:
        changes["data_dir"] = ",".join(each.folder for each in sets)
    puzzles = float(sum(each.puzzles for each in sets))
    return with_changes(reference, changes | scaled_changes(row, base or BASE_PRESET, reference, puzzles))


def run_dir_of(experiment_id: str, root: str = "runs") -> str:
    """Returns the folder of an experiment's runs, by group and id."""
    return f"{root.rstrip('/')}/{experiment(experiment_id).group}/{experiment_id}"


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Returns the same run with other values, by dotted field name. Raises `UserError` for an unknown field."""
    if "model" in changes:
        config = with_model(config, changes["model"])
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in changes.items():
        owner, _, field = name.rpartition(".")
        if not owner and not _has(config, field) and _has(config.task_config, field):
            owner = "task_config"  # without a prefix, as on the command line
        if not _has(getattr(config, owner, None) if owner else config, field):
            raise UserError(
                f"{name} is not a field of a run with model {config.model} and task {config.task}; use another --preset"
            )
        (nested.setdefault(owner, {}) if owner else flat)[field] = value
    try:
        parts = {owner: dataclasses.replace(getattr(config, owner), **values) for owner, values in nested.items()}
    except ValueError as error:
        raise UserError(str(error)) from None
    return dataclasses.replace(config, **flat, **parts)


def _has(config: Any, field: str) -> bool:
    return dataclasses.is_dataclass(config) and field in {each.name for each in dataclasses.fields(config)}


def differences(config: RunConfig, reference: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the fields that differ: dotted name -> (value in `reference`, value in `config`)."""
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
    """The length of a training run."""

    steps: int
    warmup_share: float
    """Share of the steps in which the learning rate increases."""
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


def remark(experiment_id: str) -> str:
    """Returns which twins answer the question of a run whose group changes several things at once; "" for others."""
    row = EXPERIMENTS.get(experiment_id)
    if row is None or row.group not in CONFOUNDED:
        return ""
    twins = " and ".join(f"{experiment_id}_{twin}" for twin in TWINS)
    return f"note: in {row.group} {CONFOUNDED[row.group]}; {twins} answer the question"


def plan(config: RunConfig, examples_per_epoch: float) -> Plan:
    """Returns the plan of a run, for data with `examples_per_epoch`."""
    steps = config.steps or epochs_to_steps(examples_per_epoch, config.epochs, config.global_batch_size)
    return Plan(steps, min(config.optim.warmup_steps / steps, 1.0), steps * config.global_batch_size)
