"""The plan of a sweep: its runs by name, with free settings, seeds and folders; its order, steps and FLOPs as text."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from models_torch.flops import train_flops_per_example
from models_torch.gpt import GPTConfig
from models_torch.outside import is_outside
from train_jax.errors import UserError
from train_jax.puzzles.kinds import kind_from_key
from train_jax.puzzles.task import Curriculum, PuzzleConfig
from train_jax.research.runs import command_of, experiment_run, with_changes
from train_jax.research.sweeper import SweepFiles, Work
from train_jax.research.table import (
    BASE_PRESET,
    CONFOUNDED,
    EXPERIMENTS,
    GROUPS,
    SUDOKU_SIZES,
    DataSet,
    data_sets,
    puzzles_of,
    twins_of,
)
from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder
from train_jax.run.plan import Plan, plan
from train_jax.run.presets import find_preset, preset, preset_names
from train_jax.runtime.batch_size import epochs_to_steps
from train_jax.storage.storage import path_of

Settings = dict[str, Any]
"""Values by dotted field name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Work):
    """The work of a run, with its experiment, configuration and data sets."""

    experiment: str
    """Experiment or preset."""
    group: str
    seed: int
    config: RunConfig
    sets: tuple[DataSet, ...]
    """Data sets of the run; empty if no experiment knows them."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The configuration that all runs of a sweep have in common."""

    root: str = "runs"
    data_root: str = "data"
    preset: str | None = None
    seeds: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `RunConfig` that do not change what is learned, such as `platform`."""


def select(words: Sequence[str]) -> list[str]:
    """Returns the experiments and presets that ids, groups, presets and patterns such as `exp0[12]*` name.

    Each one occurs once, in the order of the table. Raises `UserError` for a word that names none.
    """
    order = [*EXPERIMENTS, *(name for name in preset_names() if name not in EXPERIMENTS)]
    order += [word for word in words if word not in order and find_preset(word)]  # such as d12-r8
    chosen: set[str] = set()
    for word in words:
        in_group = [name for name, row in EXPERIMENTS.items() if row.group == word]
        named = ([word] if word in order else []) + (in_group or fnmatch.filter(EXPERIMENTS, word))
        if not named:
            near = difflib.get_close_matches(word, [*order, *GROUPS], 4)
            raise UserError(
                f"{word!r} names no experiment, group or preset; use {' or '.join(near) or 'one of `trm sweep list`'}"
            )
        chosen.update(named)
    return [name for name in order if name in chosen]


def combinations(axes: Sequence[str]) -> list[Settings]:
    """Returns the settings of every run of a free sweep, those of the last axis changing fastest; [{}] without axes.

    An axis is `FIELD=VALUE,VALUE`, or `FIELD,FIELD=[[VALUE, VALUE], …]` for fields that change together. Values are
    JSON, or words. Raises `UserError` for an invalid axis, and for a field that occurs twice.
    """
    parts = [_axis(axis) for axis in axes]
    for name, count in Counter(name for part in parts for name in part[0]).items():
        if count > 1:
            raise UserError(f"{name} occurs {count} times in --over; give it once, with all its values")
    return [{name: row[name] for row in rows for name in row} for rows in itertools.product(*parts)]


def _axis(text: str) -> list[Settings]:
    fields, _, values = text.partition("=")
    names = fields.split(",")
    rows = _json(values) if values.startswith("[") else [_json(word) for word in values.split(",") if word]
    if len(names) == 1 and isinstance(rows, list):
        rows = [[row] for row in rows]
    fits = isinstance(rows, list) and rows and all(isinstance(row, list) and len(row) == len(names) for row in rows)
    if not fits or not all(re.fullmatch(r"[A-Za-z_][\w.]*", name) for name in names):
        raise UserError(
            f"--over {text!r} cannot be read; write it as optim.lr=1e-4,3e-4, or as "
            "'arch.H_cycles,arch.L_cycles=[[2, 6], [3, 4]]' for fields that change together"
        )
    return [dict(zip(names, map(_as_field, row), strict=True)) for row in rows]


def _json(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def _as_field(value: Any) -> Any:
    return tuple(map(_as_field, value)) if isinstance(value, list) else value


def jobs_of(names: Sequence[str], combinations: Sequence[Settings], options: Options) -> list[Job]:
    """Returns the runs in the order in which they are trained: all ids of a seed before the next seed, and every run
    after the one whose weights it needs. One whose configuration an earlier run has is a copy of that run.

    Raises `UserError` for settings that a configuration does not accept, for a run that would occur twice, and if the
    weights that one needs are those of no run.
    """
    if options.seeds > 1 and any("seed" in settings for settings in combinations):
        raise UserError(f"--seeds {options.seeds} and seed in --over both choose seeds; give only one of them")
    jobs = [
        _job(name, settings, seed, options)
        for seed in range(options.seeds)
        for name in names
        for settings in combinations
    ]
    counts = Counter(job.name for job in jobs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UserError(f"{twice[0]} would be trained twice; remove a repeated value from --over")
    if missing := sorted({job.needs for job in jobs if job.needs} - counts.keys()):
        raise UserError(f"the weights of {missing[0]} are needed; add {missing[0].split('/')[1]} to the sweep")
    trained: dict[str, str] = {}
    marked = []
    for job in sorted(jobs, key=lambda job: bool(job.needs)):
        config = dataclasses.replace(job.config, run_dir="", wandb_project="", wandb_group="", wandb_name="")
        first = trained.setdefault(repr(config), job.name)
        same_as = "" if first == job.name else first
        marked.append(dataclasses.replace(job, same_as=same_as))
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
    row = EXPERIMENTS.get(name)
    size = options.preset if row else None
    default = experiment_run(name, size) if row else preset(name)
    group = row.group if row else name
    free = {field: value for field, value in settings.items() if field != "seed"}
    seed = settings.get("seed", seed)
    label = name + (f"@{_text(free)}" if free else "")
    folder = f"{group}/{label}/seed-{seed}"
    changes: dict[str, Any] = {**options.settings, **settings, "seed": seed, "run_dir": f"{options.root}/{folder}"}
    base = size or (BASE_PRESET if row else name)
    sets: tuple[DataSet, ...] = ()
    if "data_dir" not in settings and base in (BASE_PRESET, *SUDOKU_SIZES):
        sets = data_sets(row or EXPERIMENTS["baseline"], base, options.data_root)
        changes["data_dir"] = ",".join(each.folder for each in sets)
    needs = ""
    if row and row.starts_from and "init_from" not in settings:
        needs = f"{EXPERIMENTS[row.starts_from].group}/{row.starts_from}/seed-{seed}"
        changes["init_from"] = f"{options.root}/{needs}"
    changes |= {"wandb_project": f"trm-{group}", "wandb_group": label, "wandb_name": f"{label}/seed-{seed}"}
    config = with_changes(default, changes)
    return Job(
        name=folder,
        steps=config.steps or (plan(config, puzzles_of(sets)).steps if sets else 0),
        command=command_of(name, config, default, size),
        builds=tuple(each.command for each in sets),
        needs=needs,
        experiment=name,
        group=group,
        seed=seed,
        config=config,
        sets=sets,
    )


def _text(settings: Settings) -> str:
    """Returns settings as a part of a folder's name, by the last part of each field if that is unique."""
    last = [field.rpartition(".")[2] for field in settings]
    names = [short if last.count(short) == 1 else field for field, short in zip(settings, last, strict=True)]
    return ",".join(f"{name}={_value(value)}" for name, value in zip(names, settings.values(), strict=True))


def _value(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else None
    text = text or (value if isinstance(value, str) else json.dumps(value))
    return re.sub(r"[^\w.+-]+", "-", text)


# ---- the plan, its costs and its text


def train_flops(config: RunConfig, sizes: Mapping[str, int], steps: int, examples_per_epoch: float) -> float | None:
    """Returns the FLOPs of the matrix products of a training, without recomputation and evaluations.

    `sizes`: `seq_len` and `vocab_size` of the data. None for a model whose FLOPs are not known. Raises `ValueError` if
    the model cannot be built.
    """
    arch: Any = dataclasses.replace(config.arch, **sizes)
    steps_of_arch = [(arch, steps)]  # not a dict, since the options of an own model have no hash
    task = config.task_config
    if isinstance(task, PuzzleConfig) and task.curriculum_epochs:
        ends = epochs_to_steps(examples_per_epoch, task.curriculum_epochs, config.global_batch_size)
        schedule = Curriculum(task.curriculum_start, (arch.H_cycles, arch.L_cycles), ends)
        depths = Counter(schedule.at(step) for step in range(steps))
        steps_of_arch = [(dataclasses.replace(arch, H_cycles=H, L_cycles=L), n) for (H, L), n in depths.items()]
    try:
        each = sum(train_flops_per_example(config.model, arch) * count for arch, count in steps_of_arch)
    except ValueError:
        if not is_outside(config.model):
            raise
        return None
    return each * config.global_batch_size


def cost_of(job: Job) -> tuple[Plan | None, float | None]:
    """Returns the length of a run and its FLOPs, counted without data, devices or compilation; None if not known.

    Raises `UserError` if its model cannot be built.
    """
    if not (job.sets or job.config.steps):
        return None, None
    length = plan(job.config, puzzles_of(job.sets))
    if isinstance(job.config.arch, GPTConfig):
        return length, train_flops(job.config, {}, length.steps, 0)
    # The longest sequence and the largest vocabulary of the data sets.
    kinds = [kind for each in job.sets if (kind := kind_from_key(each.kind)) is not None]
    if not kinds:
        return length, None
    sizes = {"seq_len": max(kind.seq_len for kind in kinds), "vocab_size": max(kind.vocab_size for kind in kinds)}
    try:
        return length, train_flops(job.config, sizes, length.steps, puzzles_of(job.sets))
    except ValueError as error:
        raise UserError(f"{job.name}: the model cannot be built: {error}") from error


def sweep_lines(jobs: Sequence[Job], files: SweepFiles) -> Iterator[str]:
    """Yields the lines of a dry run."""
    width = max(len("run"), *(len(job.name) for job in jobs))
    yield f"{'run':<{width}}      steps  warm-up       examples      PFLOP  state"
    total = 0.0
    states = Counter()
    for job in jobs:
        length, flops = cost_of(job)
        steps = warmup = examples = "?"
        if length is not None:
            steps = f"{length.steps:,}"
            examples = f"{length.examples:,}"
            warmup = f"{length.warmup_share:.1%}"
        pflop = "?" if flops is None else f"{flops / 1e15:,.4g}"
        total += 0.0 if job.same_as else flops or 0.0
        state = files.state(job.name, job.steps)
        states[state] += 1
        if state == "waiting" and job.same_as:
            state = f"copy of {job.same_as}"
        yield f"{job.name:<{width}}  {steps:>9}  {warmup:>7}  {examples:>13}  {pflop:>9}  {state}"
    yield ""
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    yield f"{len(jobs)} runs of {len({job.experiment for job in jobs})} experiments: {counted}"
    yield f"{total:.3g} FLOP in matrix products of train steps, without evaluations; memory by `trm compile-pod ID`"
    if commands := dict.fromkeys(command for job in jobs for command in job.builds):
        yield f"\n{len(commands)} data sets, each built before its first run unless it is there:"
        yield from (f"  trm {shlex.join(words)}" for words in commands)
    for group in CONFOUNDED:
        if any(job.group == group for job in jobs):
            yield f"note: in {group} {CONFOUNDED[group]}; {twins_of(group)} answer the question"
