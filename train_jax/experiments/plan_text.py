"""The plan of a sweep as text: order, length and FLOPs of the runs, and the data sets to build."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Sequence

from train_jax.experiments.costs import Cost, cost_of
from train_jax.experiments.jobs import Job
from train_jax.experiments.runs import LONG_WARMUP
from train_jax.experiments.sweep_files import SweepFiles
from train_jax.experiments.table import CONFOUNDED, CONTRIBUTIONS, EXPERIMENTS, LISTED, TWINS

SECONDS_PER_HOUR = 3600


def plan_lines(jobs: Sequence[Job], files: SweepFiles, flops_per_second: float | None) -> list[str]:
    """Returns the lines of a dry run; with `flops_per_second` of all devices together, also hours."""
    costs = [cost_of(job) for job in jobs]
    width = max([len(job.work.name) for job in jobs] + [len("run")])
    hours = "    hours" if flops_per_second else ""
    lines = [f"{'run':<{width}}      steps  warm-up       examples      PFLOP{hours}  state"]
    for job, cost in zip(jobs, costs, strict=True):
        state, _ = files.state(job.work)
        if job.work.same_as and state == "waiting":
            state = f"copy of {job.work.same_as}"
        cells = [*_length(cost), _pflop(cost.flops)]
        cells += [_hours(cost.flops, flops_per_second)] if flops_per_second else []
        lines.append("  ".join([f"{job.work.name:<{width}}", *cells, state]))
    lines += ["", *_totals(jobs, costs, flops_per_second)]
    return [*lines, *_data(jobs), *_warnings(jobs, costs)]


def _length(cost: Cost) -> list[str]:
    if cost.plan is None:
        return [f"{'?':>9}", f"{'?':>7}", f"{'?':>13}"]
    return [f"{cost.plan.steps:>9,}", f"{cost.plan.warmup_share:>7.1%}", f"{cost.plan.examples:>13,}"]


def _pflop(flops: float | None) -> str:
    return f"{'?':>9}" if flops is None else f"{flops / 1e15:>9,.4g}"


def _hours(flops: float | None, flops_per_second: float) -> str:
    return f"{'?':>7}" if flops is None else f"{flops / flops_per_second / SECONDS_PER_HOUR:>7,.2f}"


def _totals(jobs: Sequence[Job], costs: Sequence[Cost], flops_per_second: float | None) -> list[str]:
    trained = [cost for job, cost in zip(jobs, costs, strict=True) if not job.work.same_as]
    known = [cost.flops for cost in trained if cost.flops is not None]
    names = {job.experiment for job in jobs}
    parts = {
        "of the list": len(names & LISTED.keys()),
        "of contributions 3 to 6": len(names & CONTRIBUTIONS.keys()),
        "twins": sum(bool(EXPERIMENTS[name].twin) for name in names & EXPERIMENTS.keys()),
        "baseline or presets": len({name for name in names if name == "baseline" or name not in EXPERIMENTS}),
    }
    counted = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
    seeds = len({job.seed for job in jobs})
    lines = [f"{len(jobs)} runs of {len(names)} experiments ({counted}), {seeds} seed{'s' * (seeds > 1)}"]
    if copies := len(jobs) - len(trained):
        lines.append(f"copied instead of trained, because another run has the same configuration: {copies}")
    groups = Counter(job.group for job in jobs)
    lines.append("runs per group: " + ", ".join(f"{group} {count}" for group, count in groups.items()))
    total = f"{sum(known):.3g} FLOP in matrix products of train steps, without evaluations"
    if flops_per_second:
        total += f": {sum(known) / flops_per_second / SECONDS_PER_HOUR:,.1f} hours at {flops_per_second:.3g} FLOP/s"
    lines.append(total + "; memory by `trm compile-pod ID`")
    return lines


def _data(jobs: Sequence[Job]) -> list[str]:
    commands = list(dict.fromkeys(itertools.chain.from_iterable(job.work.builds for job in jobs)))
    lines = ["", f"{len(commands)} data sets, each built before its first run unless it is there:"] if commands else []
    return [*lines, *(f"  trm {shlex.join(words)}" for words in commands)]


def _warnings(jobs: Sequence[Job], costs: Sequence[Cost]) -> list[str]:
    pairs = zip(jobs, costs, strict=True)
    long = {job.label for job, cost in pairs if cost.plan is not None and cost.plan.warmup_share > LONG_WARMUP}
    lines = (
        [f"warning: warm-up takes more than {LONG_WARMUP:.0%} of the steps of {len(long)} experiments"] if long else []
    )
    for group in CONFOUNDED:
        if any(job.group == group for job in jobs):
            twins = " and ".join(f"{group}_{twin}" for twin in TWINS)
            lines.append(f"note: in {group} {CONFOUNDED[group]}; {twins} answer the question")
    return ["", *lines] if lines else []
