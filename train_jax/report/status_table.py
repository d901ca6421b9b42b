"""The state of runs as a table that fits a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from train_jax.run.status import RunStatus
from train_jax.run.tracking import duration

_BEFORE = ("run", "step", "loss")
_AFTER = ("examples/s", "left", "checkpoint", "goodput", "health")
"""Columns before and after the columns of the metrics of the runs."""
_OPTIONAL = ("goodput", "examples/s", "loss", "left")
"""Columns that are omitted, in this order, if the terminal is too narrow."""
_NARROWEST_RUN = 12


def status_table(runs: Sequence[RunStatus], *, width: int) -> str:
    """Returns one line for each run, and below them the problems. No line is longer than `width`, at least 72."""
    metrics = list(dict.fromkeys(run.metric.heading for run in runs if run.metric))
    columns = [*_BEFORE, *metrics, *_AFTER]
    rows = [dict.fromkeys(metrics, "-") | _cells(run) for run in runs]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    for name in _OPTIONAL:
        others = sum(widths[each] + 2 for each in columns[1:])
        if others + min(widths["run"], _NARROWEST_RUN) <= width:
            break
        columns.remove(name)
    others = sum(widths[each] + 2 for each in columns[1:])
    widths["run"] = max(1, min(widths["run"], width - others))
    lines = [_line(dict(zip(columns, columns, strict=True)), columns, widths)]
    lines += [_line(row, columns, widths) for row in rows]
    lines = [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
    for run in runs:
        for text in _remarks(run):
            lines += textwrap.wrap(f"{run.run}: {text}", width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _line(cells: dict[str, str], columns: Sequence[str], widths: dict[str, int]) -> str:
    run = cells["run"]
    if len(run) > widths["run"]:  # the end of a path says more than its beginning
        run = f"…{run[len(run) - widths['run'] + 1 :]}"
    others = [
        cells[name].ljust(widths[name]) if name == "health" else cells[name].rjust(widths[name]) for name in columns[1:]
    ]
    return "  ".join([run.ljust(widths["run"]), *others]).rstrip()


def _cells(run: RunStatus) -> dict[str, str]:
    goodput = run.goodput
    cells = {
        "run": run.run,
        "step": f"{run.step:,}/{run.steps:,}" if run.steps else f"{run.step:,}",
        "loss": _number(run.loss, "{:.4f}"),
        "examples/s": _number(run.examples_per_second, "{:,.0f}"),
        "left": "-" if run.seconds_left is None else duration(run.seconds_left),
        "checkpoint": _checkpoint(run),
        "goodput": "-" if goodput is None else f"{goodput['share']:.1%}",
        "health": run.health,
    }
    return cells | ({run.metric.heading: _number(run.figure, run.metric.format)} if run.metric else {})


def _checkpoint(run: RunStatus) -> str:
    if run.checkpoint_step is None or run.checkpoint_age_seconds is None:
        return "-"
    return f"{run.checkpoint_step:,}, {_age(run.checkpoint_age_seconds)} ago"


def _age(seconds: float) -> str:
    """Formats a duration in one unit: `12 s`, `3 min`, `5 h`, `2 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _remarks(run: RunStatus) -> list[str]:
    remarks = [run.why] if run.why else []
    if run.skipped_steps:
        remarks.append(f"{run.skipped_steps:,} steps skipped, whose loss or gradients were not finite")
    return remarks


def _number(value: float | None, shown: str) -> str:
    return "-" if value is None or math.isnan(value) else shown.format(value)
