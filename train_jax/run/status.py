"""The state of a run, read from its folder without torch and JAX: how far it is, how fast, and whether it is well."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train_jax.errors import UserError
from train_jax.plugin import find, load_object
from train_jax.run.events import goodput_of, read_events, read_heartbeat
from train_jax.run.folder import RunFolder, complete_steps, read_fields, runs_below
from train_jax.run.tracking import duration, read_metrics
from train_jax.storage.storage import path_of

if TYPE_CHECKING:
    from train_jax.report.commands import Metric

SILENT_SECONDS = 60.0
"""Age of the heartbeat in seconds above which a run counts as not running."""
STALLED_SECONDS = 300.0
"""Seconds for which a step may take without counting as stalled, unless ten times the usual duration is longer."""


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """The facts that `trm status` shows of a run; None for what is not known yet."""

    run: str
    health: str
    """One of running, stalled, silent, preempted, stopped, finished, not started."""
    why: str
    """Reason why the run is not well; empty if it is."""
    step: int
    steps: int | None
    """The number of steps of the whole run."""
    loss: float | None
    """The loss in the latest log line."""
    figure: float | None
    """`metric` of the latest evaluation or, before the first one, of the latest log line."""
    examples_per_second: float | None
    seconds_left: float | None
    """The time left of a running run, without evaluations."""
    checkpoint_step: int | None
    """The step of the newest complete checkpoint."""
    checkpoint_age_seconds: float | None
    silent_seconds: float | None
    """Seconds since the last sign of life."""
    skipped_steps: int
    """Steps that were left out because their loss or gradients were not finite."""
    goodput: dict[str, Any] | None
    """Fields `share`, `wall_seconds`, `seconds` by part, `sessions` and `lost_steps`."""
    metric: Metric | None = None
    """The metric of `figure`; None for a task of the user."""


def find_runs(paths: Sequence[str]) -> list[RunFolder]:
    """Returns the runs at the paths, each a run folder or a folder of runs, such as the root of a sweep.

    Raises `UserError` for a path without any.
    """
    if not paths:
        raise UserError("trm status needs a run; give run folders, or folders of runs")
    runs = [list(runs_below(path_of(path))) for path in paths]
    if [] in runs:
        raise UserError(f"no run at {paths[runs.index([])]} and none below it; train one with `trm train PRESET`")
    return [run for below in runs for run in below]


def read_status(folder: RunFolder, now: float | None = None) -> RunStatus:
    """Reads one run. Raises `UserError` for a folder whose config.json is damaged. `now`: seconds of the epoch."""
    now = time.time() if now is None else now
    config = read_fields(folder)
    events = read_events(folder)
    records = read_metrics(folder)
    beat = read_heartbeat(folder)
    task = config["task"]
    report = find("reports", task)
    metric = load_object(report, "commands").metric if report else None
    step = max([record["step"] for record in records] + [event.get("step", 0) for event in events[-1:]], default=0)
    steps = next(
        (event["total_steps"] for event in reversed(events) if "total_steps" in event), config["steps"] or None
    )
    seen = [each["time"] for each in (*events[-1:], *([beat] if beat else []))]
    silent = now - max(seen) if seen else None
    speeds = [record["step_seconds"] for record in records[-20:] if record.get("step_seconds", 0) > 0]
    step_seconds = statistics.median(speeds) if speeds else None
    health, why = _health(folder, events, beat, silent, step_seconds, now)
    saved, saved_at = _newest_checkpoint(folder)
    goodput = goodput_of(events)
    running = health == "running" and steps is not None and step_seconds is not None
    return RunStatus(
        run=str(folder.path),
        health=health,
        why=why,
        step=int(step),
        steps=steps,
        loss=_latest(records, "train/*loss"),
        figure=_latest(records, f"eval/{metric.name}", f"train/{metric.name}") if metric else None,
        examples_per_second=config["global_batch_size"] / step_seconds if step_seconds else None,
        seconds_left=max(0, steps - step) * step_seconds if running and steps and step_seconds else None,
        checkpoint_step=saved,
        checkpoint_age_seconds=None if saved_at is None else max(0.0, now - saved_at),
        silent_seconds=None if silent is None else max(0.0, silent),
        skipped_steps=int(sum(record.get("train/skipped_steps", 0) for record in records)),
        goodput=None if goodput is None else {"share": goodput.share, **dataclasses.asdict(goodput)},
        metric=metric,
    )


def _health(
    folder: RunFolder,
    events: list[dict[str, Any]],
    beat: dict[str, Any] | None,
    silent: float | None,
    step_seconds: float | None,
    now: float,
) -> tuple[str, str]:
    """Returns the health and, if the run is not well, the reason."""
    last = events[-1] if events else None
    if last is not None and last["event"] == "end" and last["reason"] != "finished":
        reason = last["reason"]
        return ("preempted", "") if reason == "preempted" else ("stopped", reason.removeprefix("error: "))
    if folder.finished.is_file():
        return "finished", ""
    if silent is None:
        return ("silent", "no events, as of older versions") if folder.metrics.is_file() else ("not started", "")
    if silent < -SILENT_SECONDS:
        return ("silent", f"last sign of life {duration(-silent)} in the future: compare the clocks of the machines")
    if silent > SILENT_SECONDS:
        return "silent", f"not written for {duration(silent)}: killed, frozen, or its storage cannot be reached"
    waits = now - beat["step_time"] if beat is not None and beat["kind"] in ("steps", "data") else 0.0
    if waits > max(STALLED_SECONDS, 10 * (step_seconds or 0.0)):
        return "stalled", f"no step for {duration(waits)}"
    return "running", "" if beat is None or beat["kind"] == "steps" else beat["kind"]


def _newest_checkpoint(folder: RunFolder) -> tuple[int | None, float | None]:
    """Returns the step of the newest complete checkpoint, and the time at which it was complete."""
    for step in reversed(complete_steps(folder.checkpoints)):
        with contextlib.suppress(OSError):  # deleted since it was listed
            return step, (folder.checkpoints / str(step) / "_CHECKPOINT_METADATA").stat().st_mtime
    return None, None


def _latest(records: list[dict[str, float]], *patterns: str) -> float | None:
    """Returns the latest value of a metric that matches the first pattern, or if there is none, the second one."""
    for pattern in patterns:
        for record in reversed(records):
            if names := fnmatch.filter(record, pattern):
                return record[names[0]]
    return None
