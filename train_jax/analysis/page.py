"""The report of a study: one self-contained HTML page, the same sentences and tables as Markdown, and the tables of all
runs as CSV and Parquet, with the SHA-256 of the log that each row comes from."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from train_jax.analysis.answers import Answer, Point, answer, band, differing_fields, pareto
from train_jax.analysis.records import Run, Study
from train_jax.errors import UserError
from train_jax.experiments.table import GROUPS
from train_jax.report.plots import Band, Series, plot
from train_jax.report.render import number, percent, render_document, spelled
from train_jax.run.files import write_bytes

HEADINGS = ("experiment", "seeds", "final", "95 % interval", "peak", "steps", "time", "parameters", "PFLOP",
            "ACT steps")  # fmt: skip
COSTS: dict[str, Callable[[Run], float | None]] = {
    "PFLOP of training": lambda run: None if run.flops is None else run.flops / 1e15,
    "seconds of training": lambda run: run.train_seconds,
    "GB of device memory": lambda run: None if run.hbm_peak is None else run.hbm_peak / 1e9,
}
MOST_CURVES = 12
"""Plots of curves in a group."""


@dataclasses.dataclass(frozen=True)
class Section:
    """One group in the report."""

    title: str
    answer: Answer
    rows: tuple[tuple[str, ...], ...]
    plot: Markup
    curves: tuple[Markup, ...]


@dataclasses.dataclass(frozen=True)
class Front:
    """The experiments that no other one beats at the same cost or less."""

    cost: str
    plot: Markup
    rows: tuple[tuple[str, ...], ...]


def sections_of(study: Study, groups: Sequence[str] = ()) -> list[Section]:
    """Returns the sections of the groups, by default of all groups of the study."""
    return [_section(study, group) for group in groups or study.groups]


def fronts_of(sections: Sequence[Section]) -> list[Front]:
    """Returns the Pareto front of accuracy against each cost that the runs know."""
    points = [point for section in sections for point in section.answer.points]
    fronts = []
    for name, cost in COSTS.items():
        known = [(value, point) for point in points if (value := point.mean(cost)) is not None]
        if len(known) > 1:
            fronts.append(_front(name, known))
    return fronts


def html(study: Study, sections: Sequence[Section], fronts: Sequence[Front]) -> str:
    return render_document(
        "analysis.html.j2",
        title=f"{study.root.name or study.root}: {len(study.runs)} runs",
        study=study,
        sections=sections,
        fronts=fronts,
        headings=HEADINGS,
        states=_states(study),
    )


def markdown(study: Study, sections: Sequence[Section], fronts: Sequence[Front]) -> str:
    lines = [f"# {study.root.name or study.root}", ""]
    lines += [f"{len(study.runs)} runs: {_states(study)}. Metric: {study.metric}.", ""]
    for section in sections:
        lines += [f"## {section.title}", "", f"{section.answer.aim.text} {section.answer.sentence}", ""]
        lines += [f"- {note}" for note in section.answer.notes]
        lines += ["", *_markdown_table(HEADINGS, section.rows)]
    for front in fronts:
        lines += [f"## Accuracy against {front.cost}", ""]
        lines += _markdown_table(("experiment", front.cost, "final"), front.rows)
    if study.problems:
        lines += ["## Not analysed", "", *(f"- {problem}" for problem in study.problems), ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [headings, ["---"] * len(headings), *rows]
    return [*(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines), ""]


def _states(study: Study) -> str:
    counts = Counter(run.state for run in study.runs)
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "none"


def _section(study: Study, group: str) -> Section:
    answered = answer(study, group)
    title = f"{group}: {GROUPS[group]}" if group in GROUPS else group
    rows = tuple(_row(point) for point in answered.points)
    curves = [_curves(point) for point in answered.points[:MOST_CURVES]]
    return Section(title, answered, rows, _group_plot(answered), tuple(curve for curve in curves if curve))


def _row(point: Point) -> tuple[str, ...]:
    first, final = point.runs[0], point.final
    interval = "-" if final.low is None or final.high is None else f"{percent(final.low)} to {percent(final.high)}"
    seconds, flops = point.mean(lambda run: run.train_seconds), point.mean(lambda run: run.flops)
    act_steps = point.mean(lambda run: run.act_steps)
    return (
        point.experiment,
        str(final.count),
        percent(final.mean),
        interval,
        "-" if point.peak is None else percent(point.peak.mean),
        f"{first.train_steps:,}",
        "-" if seconds is None else spelled(seconds),
        "-" if first.parameters is None else f"{first.parameters:,}",
        "-" if flops is None else number(float(f"{flops / 1e15:.3g}")),
        "-" if act_steps is None else f"{act_steps:.2f}",
    )


def _group_plot(answered: Answer) -> Markup:
    """Plots the means against the axis, or side by side, with the range over seeds as a band."""
    points = answered.points
    if not points:
        return Markup("")
    numeric = all(point.x is not None for point in points)
    xs = [point.x if numeric and point.x is not None else float(i) for i, point in enumerate(points, 1)]
    means = [(x, 100 * point.final.mean) for x, point in zip(xs, points, strict=True)]
    labels = () if numeric else [point.experiment.removeprefix(f"{answered.group}_") for point in points]
    series = [Series("mean over seeds", means, marks=True, labels=labels, line=numeric)]
    log_x = answered.aim.log and numeric and min(xs) > 0
    if answered.law is not None:
        fitted = [(x, 100 * (1 - answered.law.at(x))) for x in xs]
        series.append(Series("power law of the error", fitted, 2))
    several = any(len(point.runs) > 1 for point in points)
    edges = [(x, 100 * min(point.values), 100 * max(point.values)) for x, point in zip(xs, points, strict=True)]
    return plot(
        series,
        band=Band("lowest to highest seed", edges) if several and numeric else None,
        title="final accuracy, %",
        x_label=answered.aim.label if numeric else "experiments",
        log_x=log_x,
    )


def _curves(point: Point) -> Markup:
    rows = band([run.curve for run in point.runs if run.curve])
    mean = Series(f"mean of {len(point.runs)}", [(step, 100 * value) for step, value, _, _ in rows], marks=True)
    edges = [(step, 100 * low, 100 * high) for step, _, low, high in rows]
    shade = Band("lowest to highest seed", edges) if len(point.runs) > 1 and rows else None
    return plot(
        [mean], band=shade, title=f"{point.experiment}, %", x_label="steps", y_range=(0, 100), width=320, height=200
    )


def _front(name: str, known: Sequence[tuple[float, Point]]) -> Front:
    costs = [(cost, 100 * point.final.mean) for cost, point in known]
    best = pareto(costs)
    series = [
        Series("experiments", costs, 2, marks=True, line=False),
        Series("Pareto front", [costs[index] for index in best], 1),
    ]
    log_x = min(cost for cost, _ in costs) > 0
    drawing = plot(series, title="final accuracy, %", x_label=name, log_x=log_x)
    rows = tuple(
        (known[i][1].experiment, number(float(f"{known[i][0]:.3g}")), percent(known[i][1].final.mean)) for i in best
    )
    return Front(name, drawing, rows)


# ---- tables


def write_tables(study: Study, folder: Path) -> list[Path]:
    """Writes results and curves, each as .csv and .parquet; returns the files. Raises `UserError` without polars."""
    try:
        import polars as pl
    except ImportError:
        raise UserError(
            "the tables need the package polars; install it with `pip install 'trm-bridge[analysis]'`"
        ) from None
    fields = differing_fields(study.runs)
    curves = [
        {"group": run.group, "experiment": run.experiment, "seed": run.seed, "step": int(step), study.metric: value,
         "metrics_sha256": run.metrics_sha256}
        for run in study.runs
        for step, value in run.curve
    ]  # fmt: skip
    written = []
    for name, rows in (("results", [_result(study.metric, run, fields) for run in study.runs]), ("curves", curves)):
        frame = pl.DataFrame(rows, infer_schema_length=None, strict=False)
        for suffix, write in ((".csv", frame.write_csv), (".parquet", frame.write_parquet)):
            buffer = io.BytesIO()
            write(buffer)
            written.append(folder / f"{name}{suffix}")
            write_bytes(written[-1], buffer.getvalue())
    return written


def _result(metric: str, run: Run, fields: Sequence[str]) -> dict[str, Any]:
    """Returns the row of a run, with the fields in which the runs of the study differ."""
    peak, step = run.peak or (None, None)
    values = {name: run.config.get(name) for name in fields}
    return {
        "group": run.group,
        "experiment": run.experiment,
        "seed": run.seed,
        "state": run.state,
        f"final_{metric}": run.final,
        f"peak_{metric}": peak,
        "peak_step": step,
        "train_steps": run.train_steps,
        "examples": run.examples,
        "train_seconds": run.train_seconds,
        "parameters": run.parameters,
        "train_flops": run.flops,
        "hbm_peak_bytes": run.hbm_peak,
        "act_steps": run.act_steps,
        **{
            name: value if isinstance(value, int | float | str | None) else str(value) for name, value in values.items()
        },
        "run_dir": run.run_dir,
        "metrics_sha256": run.metrics_sha256,
    }
