"""Reads the runs of a root, from their folders alone: finished, half-finished, missing and foreign ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from train_jax.errors import UserError
from train_jax.experiments.runs import flat
from train_jax.experiments.sweeper import SweepFiles, Work, finished_figures, read_json
from train_jax.run.folder import RunFolder
from train_jax.run.lines import parsed_lines
from train_jax.run.storage import path_of

OWN_FOLDERS = ("sweep", "analysis", "compiled")
"""In a root beside the groups."""
MOST_NAMES = 6
"""Names of missing runs in a line."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What the files of one run say; None for what is not known."""

    group: str
    experiment: str
    seed: int
    state: str
    """Finished, running, failed or stopped."""
    run_dir: str
    config: Mapping[str, Any]
    """The fields of config.json by dotted name."""
    facts: Mapping[str, Any]
    """Of the data set."""
    final: float | None
    """The metric of the final evaluation, on the whole test set."""
    curve: tuple[tuple[float, float], ...]
    """The metric of every evaluation, (step, value)."""
    train_steps: int
    train_seconds: float | None
    parameters: int | None
    flops: float | None
    """Of the matrix products of all train steps."""
    hbm_peak: float | None
    """Bytes."""
    act_steps: float | None
    """Mean ACT steps until a sequence halted, in the last log line with one."""
    metrics_sha256: str

    @property
    def peak(self) -> tuple[float, float] | None:
        """The highest value of the metric, and its step."""
        return max(((value, step) for step, value in self.curve), default=None)

    @property
    def examples(self) -> int:
        return self.train_steps * self.config["global_batch_size"]


@dataclasses.dataclass(frozen=True)
class Study:
    """All runs of a root, and what could not be read."""

    root: Path
    metric: str
    runs: tuple[Run, ...]
    planned: Mapping[str, tuple[str, ...]]
    """Planned runs by group, as ID/seed-N; empty if no sweep was started in the root."""
    problems: tuple[str, ...]
    """One line for each folder that is not analysed, and for each group with planned runs that are not started."""

    def group(self, name: str) -> list[Run]:
        return [run for run in self.runs if run.group == name]

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys([*self.planned, *(run.group for run in self.runs)]))


def read_study(root: str, metric: str = "exact_accuracy") -> Study:
    """Reads every run in `ROOT/GROUP/ID/seed-N`. Raises `UserError` if the root does not exist."""
    folder = path_of(root)
    if not folder.is_dir():
        raise UserError(f"{root} is not a folder; give the --runs-root of a sweep")
    files, works = SweepFiles(root), {}
    with contextlib.suppress(UserError):  # runs of `trm train`, without a sweep
        works = {work.name: work for work in files.planned()}
    runs, problems, there = [], [], set()
    for name, path in _candidates(folder, problems):
        there.add(name)
        try:
            runs.append(_read(files, works.get(name), name, path, metric))
        except (UserError, ValueError, KeyError, TypeError, OSError, AttributeError) as error:
            problems.append(f"{path}: cannot be read ({error!r})")
    planned: dict[str, tuple[str, ...]] = {}
    for name in works:
        group, _, rest = name.partition("/")
        planned[group] = (*planned.get(group, ()), rest)
    for group, names in planned.items():
        missing = [name for name in names if f"{group}/{name}" not in there]
        if missing:
            more = f" and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
            shown = f"{', '.join(missing[:MOST_NAMES])}{more}"
            problems.append(f"{files.root / group}: {len(missing)} planned runs are not started: {shown}")
    order = {name: number for number, name in enumerate(works)}
    runs.sort(key=lambda run: (order.get(f"{run.group}/{run.experiment}/seed-{run.seed}", len(order)), run.run_dir))
    return Study(folder, metric, tuple(runs), planned, tuple(problems))


def _candidates(root: Path, problems: list[str]) -> Iterator[tuple[str, Path]]:
    """Yields the runs as (GROUP/ID/seed-N, folder); folders in other places are problems."""
    for group in _folders(root):
        if group.name in OWN_FOLDERS:
            continue
        if (group / "config.json").is_file():
            problems.append(f"{group}: not in ROOT/GROUP/ID/seed-N, so it belongs to no group")
            continue
        for experiment in _folders(group):
            for seed in _folders(experiment):
                name = f"{group.name}/{experiment.name}/{seed.name}"
                if not seed.name.removeprefix("seed-").isdecimal() or not (seed / "config.json").is_file():
                    problems.append(f"{seed}: not a run (no seed-N with a config.json)")
                else:
                    yield name, seed


def _folders(path: Path) -> list[Path]:
    return sorted((each for each in path.iterdir() if each.is_dir()), key=lambda each: each.name)


def _read(files: SweepFiles, work: Work | None, name: str, path: Path, metric: str) -> Run:
    folder = RunFolder(path)
    group, experiment, seed = name.split("/")
    config = json.loads(folder.config.read_text())
    fields = dict(flat(config))
    figures = finished_figures(folder)
    work = work or Work(name, int(figures["train_steps"]) if figures else 0, ())
    content = folder.metrics.read_bytes() if folder.metrics.is_file() else b""
    records = [record for record in parsed_lines(content) if "step" in record]
    facts = _json(folder.data)
    steps = int(figures["train_steps"]) if figures else int(max((r["step"] for r in records), default=0))
    final = figures.get(metric) if figures else None
    curve = {float(r["step"]): float(r[f"eval/{metric}"]) for r in records if f"eval/{metric}" in r}
    state = files.state(work)[0]
    act_steps = [r["train/steps"] for r in records if r.get("train/count") and "train/steps" in r]
    return Run(
        group=group,
        experiment=experiment,
        seed=int(seed.removeprefix("seed-")),
        state="stopped" if state == "waiting" else state,
        run_dir=str(path),
        config=fields,
        facts=facts,
        final=None if final is None or state != "finished" else float(final),
        curve=tuple(sorted(curve.items())),
        train_steps=steps,
        train_seconds=(figures or {}).get("train_seconds"),
        parameters=_json(folder.machine).get("parameters"),
        flops=_flops(config["model"], steps, fields["global_batch_size"], json.dumps([config, facts], sort_keys=True)),
        hbm_peak=max((r["perf/hbm_peak"] for r in records if "perf/hbm_peak" in r), default=None),
        act_steps=act_steps[-1] if act_steps else None,
        metrics_sha256=hashlib.sha256(content).hexdigest(),
    )


def _json(path: Path) -> dict[str, Any]:
    content = read_json(path)
    return content if isinstance(content, dict) else {}


@functools.cache
def _flops(model: str, steps: int, batch_size: int, content: str) -> float | None:
    """None for a model that cannot be built from its fields, such as one of the user."""
    from models_torch.registry import config_class
    from train_jax.experiments.jobs import train_flops

    config, facts = json.loads(content)
    task = config.get("task_config") or {}
    try:
        sizes = {name: facts[name] for name in ("seq_len", "vocab_size") if name in facts}
        curriculum = None
        if task.get("curriculum_epochs"):
            examples = facts["total_groups"] * facts["mean_puzzle_examples"]
            curriculum = task["curriculum_start"], task["curriculum_epochs"], examples
        arch = config_class(model)(**(config["arch"] | sizes))
        return train_flops(model, arch, steps, batch_size, curriculum)
    except (ValueError, TypeError, KeyError):
        return None
