"""The report section about several trajectories: accuracy against ACT steps per puzzle, for all and by difficulty."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from train_jax.report.failures import RATED, shares
from train_jax.report.figures import percent
from train_jax.report.measured import Answers, Measured, counted_labels
from train_jax.report.plots import Series, plot
from train_jax.report.render import render
from train_jax.tasks.puzzles.kinds import kind_of
from train_jax.tasks.puzzles.trajectories import Results, settings

GROUPS = 3
"""Number of ranges of difficulty that are drawn."""


def trajectory_section(measured: Measured) -> Markup | None:
    """Renders the section; None if the run was not evaluated with trajectories."""
    results = measured.trajectories
    if results is None:
        return None
    values, chooser = results.values, results.values["chooser"]
    points = {(point["trajectories"], point["depth"]): point for point in values["points"]}
    last = points[max(points)]
    rows = [
        (
            f"{count} x {depth}",
            f"{point['act_steps']:,}",
            *(percent(point["exact_accuracy"][name]) for name in (f"{chooser}/best", f"{chooser}/last", "pass/best")),
        )
        for (count, depth), point in sorted(points.items())
        if count == 1 or depth == last["depth"]
    ]
    return render(
        "trajectories.html.j2",
        settings=settings(values),
        step=values["step"],
        chosen=last["exact_accuracy"][f"{chooser}/best"],
        passed=last["exact_accuracy"]["pass/best"],
        any_step=last["exact_accuracy"]["any_step"],
        count=last["trajectories"],
        plot=_plot(values),
        rows=rows,
        by_difficulty=_by_difficulty(measured.answers, results),
    )


def _plot(values: dict) -> Markup:
    chooser, points = values["chooser"], values["points"]
    most, depth = points[-1]["trajectories"], points[-1]["depth"]

    def line(name: str, count: int) -> list[tuple[float, float]]:
        return [(p["act_steps"], 100 * p["exact_accuracy"][name]) for p in points if p["trajectories"] == count]

    series = [Series("one trajectory, last step", line(f"{chooser}/last", 1), 2, marks=True)]
    series.append(Series("one, best step", line(f"{chooser}/best", 1), 3, marks=True))
    if most > 1:
        more = [p for p in points if p["depth"] == depth]
        whole = [(p["act_steps"], 100 * p["exact_accuracy"][f"{chooser}/best"]) for p in more]
        labels = [f"{p['trajectories']}" for p in more]
        series.insert(0, Series(f"1 to {most} of {depth} steps", whole, 1, marks=True, labels=labels))
    return plot(series, title="puzzles solved, %", x_label="ACT steps per puzzle")


def _by_difficulty(answers: Answers | None, results: Results) -> list[tuple[str, Markup, list[tuple[str, ...]]]]:
    """Returns for each measure of difficulty its name, a plot, and the rows of a table."""
    solved, kind = results.solved, None if answers is None else kind_of(answers.data)
    if answers is None or solved is None or kind is None or solved.shape[2] != len(answers.inputs):
        return []
    labelled = np.any(counted_labels(answers.labels, answers.data.ignore_label_id), axis=1)
    inputs, solutions = (kind.values(np.asarray(tokens)[labelled]) for tokens in (answers.inputs, answers.labels))
    hard = kind.checking.difficulties(inputs, solutions, thorough=len(inputs) <= RATED)
    points = results.values["points"]
    steps = np.array([point["act_steps"] for point in points]).reshape(solved.shape[:2])
    own, tables = solved[:, :, labelled], []
    for name, difficulty in hard.items():
        ranges = shares(difficulty, ~own[-1, -1], most=GROUPS)
        if len(ranges) < 2:
            continue
        first = np.array([int(each.name.split(" ")[0].replace(",", "")) for each in ranges])
        group = np.searchsorted(first, difficulty, side="right") - 1
        curves = [own[:, :, group == number].mean(axis=2) for number in range(len(ranges))]
        series = [
            Series(each.name, list(zip(steps[0].tolist(), (100 * curve[0]).tolist(), strict=True)), colour, marks=True)
            for colour, (each, curve) in enumerate(zip(ranges, curves, strict=True), 1)
        ]
        if len(steps) > 1:
            for number, curve in enumerate(curves):
                more = zip(steps[1:, -1].tolist(), (100 * curve[1:, -1]).tolist(), strict=True)
                points_of = [*series[number].points, *more]
                series[number] = Series(series[number].name, points_of, number + 1, marks=True)
        rows = [
            (each.name, f"{each.count:,}", percent(float(curve[0, -1])), percent(float(curve[-1, -1])))
            for each, curve in zip(ranges, curves, strict=True)
        ]
        tables.append((name, plot(series, title=f"solved by {name}, %", x_label="ACT steps per puzzle"), rows))
    return tables
