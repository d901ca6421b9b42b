"""The plan of a sweep: its runs by name, with free settings, seeds and folders; their order, steps and FLOPs as text.

A free sweep is one expression of `product`, `zip` and `chain`, with lists of values for fields:

    product(optim.lr=[1e-4, 3e-4], zip(arch.hidden_size=[256, 512], arch.num_heads=[4, 8]))

Values are JSON, or words without quotes. Nothing is evaluated.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import itertools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from models_torch.flops import language_flops_per_token, train_flops_per_example
from models_torch.gpt import GPTConfig
from train_jax.errors import UserError
from train_jax.experiments.runs import LONG_WARMUP, Plan, command_of, differences, named_run, plan, with_changes
from train_jax.experiments.sweeper import SweepFiles, Work
from train_jax.experiments.table import (
    BASE_PRESET,
    CONFOUNDED,
    CONTRIBUTIONS,
    EXPERIMENTS,
    GROUPS,
    LISTED,
    SUDOKU_SIZES,
    DataSet,
    data_sets,
    twins_of,
)
from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder
from train_jax.run.presets import find_preset, preset_names
from train_jax.run.storage import path_of
from train_jax.runtime.batch_size import epochs_to_steps
from train_jax.tasks.puzzles.kinds import kind_from_key
from train_jax.tasks.puzzles.task import Curriculum, PuzzleConfig

Settings = dict[str, Any]
"""Values by dotted field name."""
EXAMPLE = "product(optim.lr=[1e-4, 3e-4], seed=[0, 1])"
LARGEST = 100_000
"""Combinations; more are a mistake."""
LONGEST_NAME = 100
"""Characters of the name of a run in wandb."""
SECONDS_PER_HOUR = 3600
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[()\[\],=]|[^\s()\[\],="]+)')


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


def select(words: Sequence[str]) -> list[str]:
    """Returns the experiments and presets that ids, groups, presets and patterns such as `exp0[12]*` name.

    Each one is there once, in the order of the table. Raises `UserError` for a word that names none.
    """
    order = [*EXPERIMENTS, *(name for name in preset_names() if name not in EXPERIMENTS)]
    order += [word for word in words if word not in order and find_preset(word)]  # such as d12-r8
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
    """Returns the runs in the order in which they are trained: all ids of a seed before the next seed, and every run
    after the one whose weights it needs.

    Raises `UserError` for settings that a configuration does not accept, for a run that would occur twice, and if the
    weights that one needs are those of no run.
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
    counts = Counter(job.work.name for job in jobs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UserError(f"{twice[0]} would be trained twice; remove a repeated value from --over")
    if missing := sorted({job.work.needs for job in jobs if job.work.needs} - counts.keys()):
        raise UserError(f"the weights of {missing[0]} are needed; add {missing[0].split('/')[1]} to the sweep")
    return sorted(jobs, key=lambda job: bool(job.work.needs))


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
    return data_sets(EXPERIMENTS.get(name, EXPERIMENTS["baseline"]), base, root)


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


# ---- the expression of a free sweep


def combinations(text: str) -> list[Settings]:
    """Returns the settings of every run of an expression, in order. Raises `UserError` for an invalid expression."""
    parser = _Parser(text)
    settings = parser.expression()
    if parser.tokens:
        raise parser.error(f"{parser.tokens[0]!r} follows the end of the expression")
    return settings


def _product(parts: Sequence[list[Settings]]) -> list[Settings]:
    size = math.prod(map(len, parts))
    if size > LARGEST:
        raise UserError(f"the sweep has {size:,} runs; use at most {LARGEST:,}")
    return [_merged(each) for each in itertools.product(*parts)]


def _zip(parts: Sequence[list[Settings]]) -> list[Settings]:
    lengths = [len(part) for part in parts]
    if len(set(lengths)) > 1:
        raise UserError(
            f"zip needs lists of equal length, found {', '.join(map(str, lengths))}; use product, or one zip"
        )
    return [_merged(each) for each in zip(*parts, strict=True)]


def _merged(parts: Sequence[Settings]) -> Settings:
    merged: Settings = {}
    for part in parts:
        twice = merged.keys() & part.keys()
        if twice:
            raise UserError(f"{min(twice)} occurs twice in one combination; give it once")
        merged |= part
    return merged


_FUNCTIONS: dict[str, Callable[[Sequence[list[Settings]]], list[Settings]]] = {
    "product": _product,
    "zip": _zip,
    "chain": lambda parts: list(itertools.chain(*parts)),
}


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str):
        self._text, self.tokens, position = text, [], 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.error(f"a quote at {text[position:].strip()[:20]!r} has no end")
            self.tokens.append(match[1])
            position = match.end()

    def expression(self) -> list[Settings]:
        """`function(expression, …)` or `field=[value, …]`."""
        name = self._take("the name of a field, or product, zip or chain")
        if self._next() == "(":
            if name not in _FUNCTIONS:
                raise self.error(f"unknown function {name!r}, expected {', '.join(_FUNCTIONS)}")
            return _FUNCTIONS[name](self._listed("(", ")", self.expression))
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            raise self.error(f"{name!r} is not the name of a field")
        self._expect("=")
        return [{name: value} for value in self._listed("[", "]", self._value)]

    def _listed(self, opening: str, closing: str, item: Callable[[], Any]) -> list[Any]:
        self._expect(opening)
        items = [item()]
        while self._next() == ",":
            self._take(",")
            items.append(item())
        self._expect(closing)
        return items

    def _value(self) -> Any:
        if self._next() == "[":
            return tuple(self._listed("[", "]", self._value))
        word = self._take("a value")
        if word in "()[],=":
            raise self.error(f"expected a value, found {word!r}")
        try:
            return json.loads(word)
        except ValueError:
            return {"True": True, "False": False, "None": None}.get(word, word)

    def _next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def _take(self, expected: str) -> str:
        if not self.tokens:
            raise self.error(f"it ends where {expected} is expected")
        return self.tokens.pop(0)

    def _expect(self, token: str) -> None:
        word = self._take(repr(token))
        if word != token:
            raise self.error(f"expected {token!r}, found {word!r}")

    def error(self, problem: str) -> UserError:
        return UserError(f"the sweep {self._text!r} cannot be read: {problem}; write it as '{EXAMPLE}'")


# ---- costs


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of the training of one run, without evaluations."""

    plan: Plan | None
    """None if the number of steps depends on a data set that is not known."""
    flops: float | None
    """Of matrix products, without recomputation; None for data sets that no experiment knows."""


def cost_of(job: Job) -> Cost:
    """Returns the cost of a run, counted without data, devices or compilation.

    Raises `UserError` if its model cannot be built.
    """
    config = job.config
    if not (job.examples_per_epoch or config.steps):
        return Cost(None, None)
    length = plan(config, job.examples_per_epoch)
    if isinstance(config.arch, GPTConfig):
        return Cost(length, train_flops(config.model, config.arch, length.steps, config.global_batch_size))
    if not job.sets:
        return Cost(length, None)
    task, curriculum = config.task_config, None
    if isinstance(task, PuzzleConfig) and task.curriculum_epochs:
        curriculum = task.curriculum_start, task.curriculum_epochs, job.examples_per_epoch
    # The longest sequence and the largest vocabulary of the data sets.
    kinds = [kind for each in job.sets if (kind := kind_from_key(each.kind)) is not None]
    sizes = {"seq_len": max(kind.seq_len for kind in kinds), "vocab_size": max(kind.vocab_size for kind in kinds)}
    try:
        arch: Any = dataclasses.replace(config.arch, **sizes)
        return Cost(length, train_flops(config.model, arch, length.steps, config.global_batch_size, curriculum))
    except ValueError as error:
        raise UserError(f"{job.work.name}: the model cannot be built: {error}") from error


def train_flops(
    model: str, arch: Any, steps: int, batch_size: int, curriculum: tuple[Sequence[int], float, float] | None = None
) -> float:
    """Returns the FLOPs of matrix products of a training, without recomputation.

    `curriculum`: the H-cycles and L-cycles that it starts with, its epochs, and the examples of an epoch. Raises
    `ValueError` for a model whose FLOPs are not known.
    """
    if isinstance(arch, GPTConfig):
        return language_flops_per_token(arch) * arch.seq_len * batch_size * steps
    steps_of_arch = Counter({arch: steps})
    if curriculum is not None:
        (H_cycles, L_cycles), epochs, examples_per_epoch = curriculum
        ends = epochs_to_steps(examples_per_epoch, epochs, batch_size)
        schedule = Curriculum((H_cycles, L_cycles), (arch.H_cycles, arch.L_cycles), ends)
        depths = Counter(schedule.at(step) for step in range(min(ends, steps)))
        depths[schedule.end] += max(0, steps - ends)
        steps_of_arch = {dataclasses.replace(arch, H_cycles=H, L_cycles=L): n for (H, L), n in depths.items() if n}
    return sum(train_flops_per_example(model, each) * count * batch_size for each, count in steps_of_arch.items())


# ---- text


def sweep_lines(jobs: Sequence[Job], files: SweepFiles, flops_per_second: float | None) -> Iterator[str]:
    """Yields the lines of a dry run; with `flops_per_second` of all devices together, also hours."""
    costs = [cost_of(job) for job in jobs]
    width = max([len(job.work.name) for job in jobs] + [len("run")])
    hours = "    hours" if flops_per_second else ""
    yield f"{'run':<{width}}      steps  warm-up       examples      PFLOP{hours}  state"
    for job, cost in zip(jobs, costs, strict=True):
        steps = warmup = examples = pflop = hours = "?"
        if cost.plan is not None:
            steps, examples = f"{cost.plan.steps:,}", f"{cost.plan.examples:,}"
            warmup = f"{cost.plan.warmup_share:.1%}"
        if cost.flops is not None:
            pflop = f"{cost.flops / 1e15:,.4g}"
            hours = f"{cost.flops / (flops_per_second or math.inf) / SECONDS_PER_HOUR:,.2f}"
        state, _ = files.state(job.work)
        if job.work.same_as and state == "waiting":
            state = f"copy of {job.work.same_as}"
        cells = [f"{job.work.name:<{width}}", f"{steps:>9}", f"{warmup:>7}", f"{examples:>13}", f"{pflop:>9}"]
        yield "  ".join([*cells, *([f"{hours:>7}"] if flops_per_second else []), state])
    yield ""
    yield from _totals(jobs, costs, flops_per_second)
    commands = dict.fromkeys(command for job in jobs for command in job.work.builds)
    if commands:
        yield ""
        yield f"{len(commands)} data sets, each built before its first run unless it is there:"
        yield from (f"  trm {shlex.join(words)}" for words in commands)
    pairs = zip(jobs, costs, strict=True)
    long = {job.label for job, cost in pairs if cost.plan is not None and cost.plan.warmup_share > LONG_WARMUP}
    confounded = [group for group in CONFOUNDED if any(job.group == group for job in jobs)]
    if long or confounded:
        yield ""
    if long:
        yield f"warning: warm-up takes more than {LONG_WARMUP:.0%} of the steps of {len(long)} experiments"
    for group in confounded:
        yield f"note: in {group} {CONFOUNDED[group]}; {twins_of(group)} answer the question"


def _totals(jobs: Sequence[Job], costs: Sequence[Cost], flops_per_second: float | None) -> Iterator[str]:
    trained = [cost for job, cost in zip(jobs, costs, strict=True) if not job.work.same_as]
    names = {job.experiment for job in jobs}
    parts = {
        "of the list": len(names & LISTED.keys()),
        "of contributions 3 to 6": len(names & CONTRIBUTIONS.keys()),
        "twins": sum(bool(EXPERIMENTS[name].twin) for name in names & EXPERIMENTS.keys()),
        "baseline or presets": len({name for name in names if name == "baseline" or name not in EXPERIMENTS}),
    }
    counted = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
    seeds = len({job.seed for job in jobs})
    yield f"{len(jobs)} runs of {len(names)} experiments ({counted}), {seeds} seed{'s' * (seeds > 1)}"
    if copies := len(jobs) - len(trained):
        yield f"copied instead of trained, because another run has the same configuration: {copies}"
    groups = Counter(job.group for job in jobs)
    yield "runs per group: " + ", ".join(f"{group} {count}" for group, count in groups.items())
    flops = sum(cost.flops for cost in trained if cost.flops is not None)
    total = f"{flops:.3g} FLOP in matrix products of train steps, without evaluations"
    if flops_per_second:
        total += f": {flops / flops_per_second / SECONDS_PER_HOUR:,.1f} hours at {flops_per_second:.3g} FLOP/s"
    yield total + "; memory by `trm compile-pod ID`"
