"""The runs of a sweep: experiments, groups and presets by name, with free settings, seeds and folders."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from train_jax.errors import UserError
from train_jax.experiments.command import command_of
from train_jax.experiments.data_sets import SUDOKU_SIZES, DataSet, data_sets
from train_jax.experiments.expression import Settings
from train_jax.experiments.runs import differences, named_run, plan, with_changes
from train_jax.experiments.sweep_files import Work
from train_jax.experiments.table import BASE_PRESET, EXPERIMENTS, GROUPS
from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder
from train_jax.run.presets import all_presets
from train_jax.run.storage import path_of

LONGEST_NAME = 100
"""Characters of the name of a run in wandb."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    experiment: str
    """Experiment or preset."""
    group: str
    label: str
    """The experiment with the settings of a free sweep, such as `exp01a@lr=0.0003`; the name of a folder."""
    seed: int
    config: RunConfig
    sets: tuple[DataSet, ...]
    """Empty for data sets that no experiment knows."""
    work: Work
    examples_per_epoch: float


@dataclasses.dataclass(frozen=True)
class Options:
    """What all runs of a sweep have in common."""

    root: str = "runs"
    data_root: str = "data"
    preset: str | None = None
    seeds: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `RunConfig` that do not change what is learned, such as `platform`."""


def select(words: Iterable[str]) -> list[str]:
    """Returns the experiments and presets that ids, groups, presets and patterns such as `exp0[12]*` name.

    Each one is there once, in the order of the table. Raises `UserError` for a word that names none.
    """
    order = [*EXPERIMENTS, *(name for name in all_presets() if name not in EXPERIMENTS)]
    chosen: set[str] = set()
    for word in words:
        in_group = [name for name, row in EXPERIMENTS.items() if row.group == word]
        matching = [name for name in EXPERIMENTS if fnmatch.fnmatchcase(name, word)]
        named = ([word] if word in order else []) + (in_group or matching)
        if not named:
            near = difflib.get_close_matches(word, [*order, *GROUPS], 4)
            raise UserError(
                f"{word!r} names no experiment, group or preset; use {' or '.join(near) or 'one of `trm sweep list`'}"
            )
        chosen.update(named)
    return [name for name in order if name in chosen]


def jobs_of(names: Sequence[str], combinations: Sequence[Settings], options: Options) -> list[Job]:
    """Returns the runs in the order in which they are trained: all ids of a seed before the next seed.

    Raises `UserError` for settings that a configuration does not accept, and for a run that would occur twice.
    """
    swept = {field for settings in combinations for field in settings}
    if "seed" in swept and options.seeds > 1:
        raise UserError(f"--seeds {options.seeds} and seed in --over both choose seeds; give only one of them")
    jobs = [
        _job(name, settings, seed, options)
        for seed in range(options.seeds)
        for name in names
        for settings in combinations or [{}]
    ]
    seen: set[str] = set()
    for job in jobs:
        if job.work.name in seen:
            raise UserError(f"{job.work.name} would be trained twice; remove a repeated value from --over")
        seen.add(job.work.name)
    return _sources_first(jobs)


def without_done(jobs: Sequence[Job], names: Collection[str]) -> list[Job]:
    """Returns the jobs that are not done elsewhere, and those whose weights another one needs."""
    left = [job for job in jobs if job.work.name not in names]
    needed = {job.work.needs for job in left}
    return [job for job in jobs if job.work.name not in names or job.work.name in needed]


def with_copies(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs; one whose configuration an earlier job has is a copy of that job's run."""
    trained: dict[str, str] = {}
    marked = []
    for job in jobs:
        config = dataclasses.replace(job.config, run_dir="", wandb_project="", wandb_group="", wandb_name="")
        first = trained.setdefault(repr(config), job.work.name)
        same_as = "" if first == job.work.name else first
        marked.append(dataclasses.replace(job, work=dataclasses.replace(job.work, same_as=same_as)))
    return marked


def check_folders(jobs: Iterable[Job]) -> None:
    """Raises `UserError` if the folder of a job holds a run with other fields, such as that of another preset."""
    for job in jobs:
        folder = RunFolder(path_of(job.config.run_dir))
        if folder.config.is_file():
            from train_jax.run.resume import changed_fields  # imports Orbax

            try:
                changed_fields(folder, job.config)
            except UserError as error:
                raise UserError(str(error).replace("--run-dir", "--runs-root")) from None


def _job(name: str, settings: Settings, seed: int, options: Options) -> Job:
    preset = options.preset if name in EXPERIMENTS else None
    default = named_run(name, preset)
    row = EXPERIMENTS.get(name)
    group = row.group if row else name
    free = {field: value for field, value in settings.items() if field != "seed"}
    seed = settings.get("seed", seed)
    label = name + (f"@{_text(free)}" if free else "")
    folder = f"{group}/{label}/seed-{seed}"
    changes: dict[str, Any] = {**options.settings, **settings, "seed": seed, "run_dir": f"{options.root}/{folder}"}
    sets = () if "data_dir" in settings else _data_sets(name, preset, options.data_root)
    if sets:
        changes["data_dir"] = ",".join(each.folder for each in sets)
    needs = ""
    if row and row.starts_from and "init_from" not in settings:
        needs = f"{EXPERIMENTS[row.starts_from].group}/{row.starts_from}/seed-{seed}"
        changes["init_from"] = f"{options.root}/{needs}"
    changes |= {"wandb_project": f"trm-{group}", "wandb_group": label}
    config = with_changes(default, changes)
    config = dataclasses.replace(
        config, wandb_name=_wandb_name(config, named_run("baseline", preset) if row else default)
    )
    per_epoch = float(sum(each.puzzles for each in sets))
    steps = config.steps or (plan(config, per_epoch).steps if sets else 0)
    work = Work(
        name=folder,
        steps=steps,
        command=command_of(name, config, default, preset),
        builds=tuple(each.command for each in sets),
        needs=needs,
    )
    return Job(name, group, label, seed, config, sets, work, per_epoch)


def _data_sets(name: str, preset: str | None, root: str) -> tuple[DataSet, ...]:
    base = preset or (BASE_PRESET if name in EXPERIMENTS else name)
    if base not in (BASE_PRESET, *SUDOKU_SIZES):
        return ()
    return tuple(each.inside(root) for each in data_sets(EXPERIMENTS.get(name, EXPERIMENTS["baseline"]), base))


def _sources_first(jobs: list[Job]) -> list[Job]:
    """Returns the jobs with every job after the one that it needs. Raises `UserError` if that one is missing."""
    names = {job.work.name for job in jobs}
    missing = sorted({job.work.needs for job in jobs if job.work.needs and job.work.needs not in names})
    if missing:
        raise UserError(f"the weights of {missing[0]} are needed; add {missing[0].split('/')[1]} to the sweep")
    return sorted(jobs, key=lambda job: bool(job.work.needs))


def _text(settings: Settings) -> str:
    """Returns settings as a part of a folder's name, by the last part of each field if that is unique."""
    last = [field.rpartition(".")[2] for field in settings]
    names = [short if last.count(short) == 1 else field for field, short in zip(settings, last, strict=True)]
    return ",".join(f"{name}={_value(value)}" for name, value in zip(names, settings.values(), strict=True))


def _value(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else None
    text = text or (value if isinstance(value, str) else json.dumps(value))
    return re.sub(r"[^\w.+-]+", "-", text)


def _wandb_name(config: RunConfig, reference: RunConfig) -> str:
    """Returns what differs from the baseline, or from the preset, and the seed."""
    operational = ("run_dir", "data_dir", "init_from", "seed", "platform")
    parts = [
        f"{name.rpartition('.')[2]}={_value(new)}"
        for name, (_, new) in differences(config, reference).items()
        if name not in operational and not name.startswith("wandb")
    ]
    return ",".join([*parts, f"seed={config.seed}"])[:LONGEST_NAME]
