"""Reads the runs of a root, from their folders alone: finished, half-finished and damaged ones."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from models_torch.config import ACTConfig
from models_torch.flops import evaluation_flops_per_example
from train_jax.errors import UserError
from train_jax.research.jobs import train_flops
from train_jax.research.sweeper import SweepFiles, finished_figures, readable
from train_jax.research.table import EXPERIMENTS
from train_jax.run.config import from_values
from train_jax.run.folder import RESTORE, RUN_ID, RunFolder
from train_jax.run.plan import flat
from train_jax.run.tracking import METRICS
from train_jax.storage.json_files import COUNT, NUMBER, optional, read_object
from train_jax.storage.lines import parsed_lines
from train_jax.storage.storage import path_of


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The results of one run, from its files; None for what is not known."""

    group: str
    experiment: str
    seed: int
    state: str
    """`finished`, or the health of the run in `trm status`."""
    final: float | None
    """The metric of the final evaluation, on the whole test set."""
    curve: tuple[tuple[float, float], ...]
    """The metric of every evaluation, (step, value)."""
    train_steps: int
    train_seconds: float | None
    parameters: int | None
    train_flops: float | None
    """The FLOPs of the matrix products of all train steps."""
    evaluation_flops: float | None
    """The FLOPs of the matrix products of the final evaluation, for one example."""
    hbm_peak_bytes: float | None
    act_steps: float | None
    """Mean ACT steps until a sequence halted, in the last log line with one."""
    config: Mapping[str, Any]
    """The fields of config.json by dotted name."""
    facts: Mapping[str, Any]
    """Facts about the data set."""
    run_dir: str
    metrics_sha256: str

    @property
    def peak(self) -> tuple[float, float] | None:
        """The highest value of the metric, and its step."""
        return max(((value, step) for step, value in self.curve), default=None)


@dataclasses.dataclass(frozen=True)
class Study:
    """All runs of a root, and what could not be read."""

    root: Path
    metric: str
    runs: tuple[RunResult, ...]
    problems: tuple[str, ...]
    """One line for each run that cannot be read."""

    def group(self, name: str) -> list[RunResult]:
        return [run for run in self.runs if run.group == name]

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(run.group for run in self.runs))


def read_study(root: str, metric: str = "exact_accuracy") -> Study:
    """Reads every run in `ROOT/GROUP/ID/seed-N`. Raises `UserError` if the root does not exist."""
    folder = path_of(root)
    if not folder.is_dir():
        raise UserError(f"{root} is not a folder; give the --runs-root of a sweep")
    files = SweepFiles(root)
    runs = []
    problems = []
    for run in _runs_in(folder):
        try:
            runs.append(_read(files, "/".join(run.path.parts[-3:]), metric))
        except (UserError, ValueError, KeyError, TypeError, OSError, AttributeError) as error:
            problems.append(f"{run.path}: cannot be read ({error!r})")
    order = {name: number for number, name in enumerate(EXPERIMENTS)}
    runs.sort(key=lambda run: order.get(run.experiment, len(order)))
    return Study(folder, metric, tuple(runs), tuple(problems))


def _runs_in(root: Path) -> Iterator[RunFolder]:
    places = [root]
    for _ in ("group", "experiment", "seed"):
        places = [each for place in places for each in sorted(place.iterdir()) if each.is_dir()]
    runs = (RunFolder(each) for each in places if each.name.removeprefix("seed-").isdecimal())
    return (run for run in runs if run.config.is_file())


def _read(files: SweepFiles, name: str, metric: str) -> RunResult:
    folder = files.run(name)
    group, experiment, seed = name.split("/")
    config = read_object(folder.config, {}, remedy=RESTORE)
    figures = finished_figures(folder) or {}
    content = folder.metrics.read_bytes() if folder.metrics.is_file() else b""
    records = parsed_lines(content, METRICS)
    facts = readable(folder.data, dict.fromkeys(("total_groups", "mean_puzzle_examples"), optional(NUMBER))) or {}
    steps = int(figures.get("train_steps", max((record["step"] for record in records), default=0)))
    curve = {float(r["step"]): float(r[f"eval/{metric}"]) for r in records if f"eval/{metric}" in r}
    state = files.state(name, steps)
    act_steps = [r["train/steps"] for r in records if r.get("train/count") and "train/steps" in r]
    return RunResult(
        group=group,
        experiment=experiment,
        seed=int(seed.removeprefix("seed-")),
        state=state,
        final=float(figures[metric]) if state == "finished" and NUMBER.fits(figures.get(metric)) else None,
        curve=tuple(sorted(curve.items())),
        train_steps=steps,
        train_seconds=figures.get("train_seconds"),
        parameters=(readable(folder.machine, {"parameters": optional(COUNT)}) or {}).get("parameters"),
        train_flops=_flops(config, facts, steps),
        evaluation_flops=_evaluation_flops(config, facts, figures),
        hbm_peak_bytes=max((r["perf/hbm_peak"] for r in records if "perf/hbm_peak" in r), default=None),
        act_steps=act_steps[-1] if act_steps else None,
        config={name: value for name, value in flat(config) if name != RUN_ID},
        facts=facts,
        run_dir=str(folder.path),
        metrics_sha256=hashlib.sha256(content).hexdigest(),
    )


def _evaluation_flops(config: dict[str, Any], facts: Mapping[str, Any], figures: Mapping[str, Any]) -> float | None:
    """Returns the FLOPs of the ACT steps of the final evaluation, for one example; None for other models."""
    try:
        run = from_values(config)
        if not isinstance(run.arch, ACTConfig) or not NUMBER.fits(figures.get("steps")):
            return None
        arch = dataclasses.replace(run.arch, **{name: facts[name] for name in ("seq_len", "vocab_size")})
        return evaluation_flops_per_example(run.model, arch) * float(figures["steps"])
    except (UserError, ValueError, TypeError, KeyError):
        return None


def _flops(config: dict[str, Any], facts: Mapping[str, Any], steps: int) -> float | None:
    """Returns the FLOPs of all train steps; None for a model that cannot be built from its fields alone."""
    try:
        sizes = {name: facts[name] for name in ("seq_len", "vocab_size") if name in facts}
        examples = facts.get("total_groups", 0) * facts.get("mean_puzzle_examples", 0)
        return train_flops(from_values(config), sizes, steps, examples)
    except (UserError, ValueError, TypeError, KeyError):
        return None
