"""The run of an experiment: its configuration, also at the size of another preset, and its command line."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train_jax.errors import UserError
from train_jax.research.table import (
    BASE_PRESET,
    CONFOUNDED,
    EXPERIMENTS,
    SUDOKU_SIZES,
    WARMUP_SHARE,
    Experiment,
    data_sets,
    puzzles_of,
    twins_of,
)
from train_jax.run.config import RunConfig, with_model
from train_jax.run.plan import REFERENCE_EVAL_EVERY_STEPS
from train_jax.run.presets import Presets, listed_presets, preset


class ExperimentRuns(Presets):
    """The runs of the experiments at full size. They are listed by `trm sweep list`, not among the presets."""

    def __getitem__(self, name: str) -> RunConfig:
        return experiment_run(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __contains__(self, name: object) -> bool:
        return name in EXPERIMENTS

    def examples_per_epoch(self, name: str, config: RunConfig, base: str | None) -> float | None:
        """Returns the examples of an epoch if the run trains on the data sets of the experiment."""
        sets = data_sets(EXPERIMENTS[name], base or BASE_PRESET)
        return puzzles_of(sets) if config.data_dir == ",".join(each.folder for each in sets) else None

    def notes(self, name: str) -> Sequence[str]:
        group = EXPERIMENTS[name].group
        if group not in CONFOUNDED:
            return ()
        return (f"note: in {group} {CONFOUNDED[group]}; {twins_of(name)} answer the question",)


EXPERIMENT_RUNS = ExperimentRuns()


def at_preset(name: str, config: RunConfig, base: str, arguments: Sequence[str] = ()) -> RunConfig:
    """Returns the run of an experiment at the size of a preset, `--preset`; `config` is the run at full size.

    Raises `UserError` if `name` is no experiment.
    """
    if name not in EXPERIMENTS:
        raise UserError(f"--preset {base} is for experiments, but {name} is a preset; omit --preset")
    return experiment_run(name, base)


def experiment_run(experiment_id: str, base: str | None = None) -> RunConfig:
    """Returns the configuration of an experiment; on a preset `base`, the changes have the proportions of its size."""
    if base in EXPERIMENTS:
        raise UserError(f"--preset {base} is an experiment; use one of {listed_presets()}")
    row = EXPERIMENTS[experiment_id]
    reference = preset(base or BASE_PRESET)
    sets = data_sets(row, base or BASE_PRESET)
    changes: dict[str, Any] = {"run_dir": run_dir_of(experiment_id)}
    if row.starts_from:
        changes["init_from"] = run_dir_of(row.starts_from)
    if base is None:
        changes["eval_every_steps"] = REFERENCE_EVAL_EVERY_STEPS
    if base is None or base in SUDOKU_SIZES:
        changes["data_dir"] = ",".join(each.folder for each in sets)
    scaled = scaled_changes(row, reference, puzzles_of(sets)) if base in SUDOKU_SIZES else row.changes
    return with_changes(reference, {**changes, **scaled})


def run_dir_of(experiment_id: str) -> str:
    """Returns the folder of an experiment's runs, by group and id."""
    return f"runs/{EXPERIMENTS[experiment_id].group}/{experiment_id}"


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
            raise _unknown(name, config)
        (nested.setdefault(owner, {}) if owner else flat)[field] = value
    try:
        parts = {owner: dataclasses.replace(getattr(config, owner), **values) for owner, values in nested.items()}
    except ValueError as error:
        raise UserError(str(error)) from None
    return dataclasses.replace(config, **flat, **parts)


def _unknown(name: str, config: RunConfig) -> UserError:
    """Returns the error for a field that a run does not have, with the nearest names."""
    owner = getattr(config, name.rpartition(".")[0], None) if "." in name else config
    fields = [each.name for each in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    near = difflib.get_close_matches(name.rpartition(".")[2], fields)
    prefix = name.rpartition(".")[0] + "." if "." in name else ""
    remedy = f"perhaps {' or '.join(prefix + field for field in near)}; " if near else ""
    return UserError(
        f"{name} is not a field of a run with model {config.model} and task {config.task}; {remedy}"
        "`trm train PRESET --help` lists the fields"
    )


def _has(config: Any, field: str) -> bool:
    return dataclasses.is_dataclass(config) and field in {each.name for each in dataclasses.fields(config)}


# ---- the size of another preset

PROPORTIONAL = {
    "arch.hidden_size": 512, "arch.num_heads": 8, "arch.puzzle_emb_ndim": 512, "global_batch_size": 6144,
    "optim.lr": 1e-4, "optim.sparse_lr": 1e-4,
}  # fmt: skip
"""Fields that change in proportion: the value of the preset times the ratio of the experiment's value to this one."""
SMALL_WINDOW = 3
"""Attention window in the small mazes of presets."""
CURRICULUM_SHARE = 10_000 / 50_000
"""Share of the run in which the curriculum of contribution 1 ends."""


def scaled_changes(row: Experiment, config: RunConfig, puzzles: float) -> dict[str, Any]:
    """Returns the changes of an experiment on the smaller preset `config`, which trains on `puzzles` train puzzles.

    Cycles, layers, halting steps and decays are literal. Sizes, batch size and learning rates keep their ratio to the
    baseline. A preset with a fixed number of steps gets those of the experiment, in proportion to the baseline's.
    """
    changes = {name: _scaled(name, value, config) for name, value in row.changes.items()}
    batch = changes.get("global_batch_size", config.global_batch_size)
    steps = config.steps
    if row.twin != "equal_steps":
        steps = max(1, round(steps * row.puzzles / 1000 * config.global_batch_size / batch))
    changes.pop("steps", None)
    if steps != config.steps:
        changes["steps"] = steps
    if row.twin == "scaled_warmup":
        changes["optim.warmup_steps"] = int(WARMUP_SHARE * steps)
    if "task_config.curriculum_epochs" in changes:
        # Half a step more, because whole steps are counted.
        changes["task_config.curriculum_epochs"] = (CURRICULUM_SHARE * steps + 0.5) * batch / puzzles
    return changes


def _scaled(name: str, value: Any, config: RunConfig) -> Any:
    if name == "arch.attention_window":
        return SMALL_WINDOW
    if name not in PROPORTIONAL:
        return value
    owner, _, field = name.rpartition(".")
    here = getattr(getattr(config, owner) if owner else config, field)
    scaled = here * value / PROPORTIONAL[name]
    return max(1, round(scaled)) if isinstance(here, int) else scaled


# ---- the command line


def command_of(name: str, config: RunConfig, default: RunConfig, preset: str | None = None) -> tuple[str, ...]:
    """Returns the words after `trm` that train `config`; `default` is what NAME, on this preset, stands for."""
    words = ["train", name, *(["--preset", preset] if preset else [])]
    if config.model != default.model:
        words += ["--model", config.model]
    return (*words, *options_of(config, with_model(default, config.model)))


def options_of(value: Any, default: Any, prefix: str = "") -> Iterator[str]:
    """Yields the options of the fields of a dataclass that differ from those of `default`."""
    for field in dataclasses.fields(value):
        here = getattr(value, field.name)
        before = getattr(default, field.name, dataclasses.MISSING)
        if dataclasses.is_dataclass(here):
            yield from options_of(here, before, "" if field.name == "task_config" else f"{prefix}{field.name}.")
        elif here != before:
            yield from _option(prefix, field.name, here)


def _option(prefix: str, name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{prefix}{'' if value else 'no-'}{name}".replace("_", "-")]
    option = f"--{prefix}{name}".replace("_", "-")
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return [option, json.dumps([dataclasses.asdict(each) for each in value])]
    if isinstance(value, dict):
        return [option, json.dumps(value)]
    if isinstance(value, tuple):
        return [option, *map(str, value)]
    return [f"{option}={value}"] if isinstance(value, str) else [option, str(value)]
