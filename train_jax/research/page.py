"""The report of a study: one self-contained HTML page, the same sentences and tables as Markdown, and the tables of all
runs as CSV, with the SHA-256 of the log that each row comes from."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from train_jax.report.plots import Band, Series, plot
from train_jax.report.render import number, percent, render_document, spelled
from train_jax.research.answers import Answer, Point, answer, differing_fields
from train_jax.research.records import Study
from train_jax.research.table import GROUPS
from train_jax.storage.files import write_text

HEADINGS = ("experiment", "seeds", "final", "95 % interval", "steps", "time", "parameters", "PFLOP",
            "GFLOP to evaluate", "GB of memory", "ACT steps")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Section:
    """One group in the report."""

    title: str
    answer: Answer
    rows: tuple[tuple[str, ...], ...]
    plot: Markup


def sections_of(study: Study, groups: Sequence[str] = ()) -> list[Section]:
    """Returns the sections of the groups, by default of all groups of the study."""
    sections = []
    for answered in (answer(study, group) for group in groups or study.groups):
        title = f"{answered.group}: {GROUPS[answered.group]}" if answered.group in GROUPS else answered.group
        rows = tuple(_row(point) for point in answered.points)
        sections.append(Section(title, answered, rows, _group_plot(answered)))
    return sections


def write_report(study: Study, sections: Sequence[Section], folder: Path) -> None:
    """Writes `index.html`, `analysis.md` and the tables."""
    states = Counter(run.state for run in study.runs)
    title = study.root.name or str(study.root)
    shown = ", ".join(f"{count} {state}" for state, count in states.items())
    page = render_document(
        "analysis.html.j2",
        title=f"{title}: {len(study.runs)} runs",
        study=study,
        sections=sections,
        headings=HEADINGS,
        states=shown,
    )
    write_text(folder / "index.html", page)
    lines = [f"# {title}", "", f"{len(study.runs)} runs: {shown}. Metric: {study.metric}.", ""]
    lines += [line for section in sections for line in _markdown(section)]
    if study.problems:
        lines += ["## Not analysed", "", *(f"- {problem}" for problem in study.problems)]
    write_text(folder / "analysis.md", "\n".join(lines).rstrip() + "\n")
    write_tables(study, folder)


def write_tables(study: Study, folder: Path) -> None:
    """Writes `results.csv`, a row for each run, and `curves.csv`, one for each evaluation."""
    write_text(folder / "results.csv", _csv(_results(study)))
    write_text(folder / "curves.csv", _csv(_evaluations(study)))


def _markdown(section: Section) -> Iterator[str]:
    yield from (f"## {section.title}", "", f"{section.answer.aim.text} {section.answer.sentence}", "")
    yield from (f"- {note}" for note in section.answer.notes)
    yield ""
    if section.rows:
        for cells in (HEADINGS, ["---"] * len(HEADINGS), *section.rows):
            yield f"| {' | '.join(cells)} |"
        yield ""


def _row(point: Point) -> tuple[str, ...]:
    first = point.runs[0]
    final = point.final
    seconds = point.mean(lambda run: run.train_seconds)
    flops = point.mean(lambda run: run.train_flops)
    evaluation = point.mean(lambda run: run.evaluation_flops)
    memory = point.mean(lambda run: run.hbm_peak_bytes)
    act_steps = point.mean(lambda run: run.act_steps)
    return (
        point.experiment,
        str(final.count),
        percent(final.mean),
        final.interval or "-",
        f"{first.train_steps:,}",
        "-" if seconds is None else spelled(seconds),
        "-" if first.parameters is None else f"{first.parameters:,}",
        "-" if flops is None else number(float(f"{flops / 1e15:.3g}")),
        "-" if evaluation is None else number(float(f"{evaluation / 1e9:.3g}")),
        "-" if memory is None else f"{memory / 1e9:.3g}",
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


# ---- tables


def _results(study: Study) -> Iterator[dict[str, Any]]:
    """Yields the row of each run, with the fields in which the runs of the study differ."""
    fields = differing_fields(study.runs)
    for run in study.runs:
        peak, peak_step = run.peak or (None, None)
        row = {name: value for name, value in vars(run).items() if name not in ("final", "curve", "config", "facts")}
        last = {name: row.pop(name) for name in ("run_dir", "metrics_sha256")}
        accuracy = {f"final_{study.metric}": run.final, f"peak_{study.metric}": peak, "peak_step": peak_step}
        examples = run.train_steps * run.config["global_batch_size"]
        yield {**row, **accuracy, "examples": examples, **{name: run.config.get(name) for name in fields}, **last}


def _evaluations(study: Study) -> Iterator[dict[str, Any]]:
    for run in study.runs:
        place = {"group": run.group, "experiment": run.experiment, "seed": run.seed}
        for step, value in run.curve:
            yield {**place, "step": int(step), study.metric: value, "metrics_sha256": run.metrics_sha256}


def _csv(rows: Iterator[dict[str, Any]]) -> str:
    table = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, table[0] if table else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
