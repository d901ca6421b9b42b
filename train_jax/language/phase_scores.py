"""The phases of a chat model side by side: the run of the last phase, and the runs that it started from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from train_jax.report.render import spelled
from train_jax.report.run_page import RunFiles, read_run_files
from train_jax.run.folder import is_run
from train_jax.storage.json_files import NUMBER, find_object, object_of, record_of
from train_jax.storage.storage import path_of

PHASE_TASKS = {"chat", "rollouts"}


@dataclasses.dataclass(frozen=True)
class PhaseTable:
    """A row for each phase, as text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def phase_table(files: RunFiles) -> PhaseTable | None:
    """Returns the cost and the abilities of each phase; None for a run that is no phase."""
    if files.config.task not in PHASE_TASKS:
        return None
    runs = _phases(files)
    scores = [_accuracies(each) for each in runs]
    tasks = list(dict.fromkeys(name for each in scores for name in each))
    price = files.price_per_hour
    head = ["run", "steps", "time", *(["cost"] if price else []), "bits per byte", *tasks]
    rows = []
    hours = 0.0
    for run, accuracies in zip(runs, scores, strict=True):
        seconds = run.goodput.wall_seconds if run.goodput else run.train_seconds or 0.0
        hours += seconds / 3600
        bits = run.held_out_by("bits_per_byte").get("bits_per_byte")
        cost = [f"{price * seconds / 3600:.2f}"] if price else []
        shown = ["-" if value is None else f"{value:.4f}" for value in (bits, *map(accuracies.get, tasks))]
        rows.append([run.folder.path.name, f"{run.steps:,}", spelled(seconds), *cost, *shown])
    total = [spelled(3600 * hours), *([f"{price * hours:.2f}"] if price else [])]
    rows.append(["together", "", *total, *[""] * (1 + len(tasks))])
    return PhaseTable(head, rows)


def _phases(files: RunFiles) -> list[RunFiles]:
    """Returns the existing runs, the first phase first."""
    runs = [files]
    seen = {path_of(files.folder.path)}
    while (source := runs[0].config.init_from) and is_run(source) and path_of(source) not in seen:
        seen.add(path_of(source))
        runs.insert(0, read_run_files(source))
    return runs


def _accuracies(files: RunFiles) -> dict[str, float]:
    """Returns the accuracies that `trm chat-eval` wrote."""
    fields = {"tasks": object_of(record_of({"accuracy": NUMBER}))}
    content = find_object(files.folder.evaluation("chat"), fields, remedy="write it again with `trm chat-eval`")
    content = content or {"tasks": {}}
    return {name: each["accuracy"] for name, each in content["tasks"].items()}


def markdown_path(files: RunFiles) -> Path:
    """Returns the path of the same table in Markdown."""
    return files.folder.report.with_name("phases.md")
