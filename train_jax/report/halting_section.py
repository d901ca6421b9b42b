"""The report section about halting: accuracy against mean ACT steps, as a plot, a table and text."""

from __future__ import annotations

from markupsafe import Markup

from train_jax.report.figures import percent
from train_jax.report.measured import Measured
from train_jax.report.plots import Series, plot
from train_jax.report.render import render
from train_jax.tasks.puzzles.metrics import HaltingCurve, Point, select_points


def halting_section(measured: Measured) -> Markup | None:
    """Renders the section; None if no curve was measured."""
    curve, early = measured.halting_curve, measured.halted_early or {}
    if curve is None:
        return None
    limit, points = curve.by_steps[-1], curve.by_threshold
    stricter = [point for point in points if point.threshold and point.threshold > 0.5]
    lossless = next((point for point in stricter if point.exact_accuracy >= limit.exact_accuracy), None)
    if lossless is not None and lossless.mean_steps >= limit.mean_steps - 0.005:
        lossless = None
    named = [(f"halt probability above {point.threshold:g}", point) for point in select_points(curve)]
    named += [(f"all after {point.mean_steps:.0f}", point) for point in curve.by_steps]
    return render(
        "halting.html.j2",
        limit=limit,
        trained=next((point for point in points if point.threshold == 0.5), None),
        lossless=lossless,
        plot=_plot(curve),
        rows=[(name, f"{p.mean_steps:.2f}", percent(p.exact_accuracy), percent(p.accuracy)) for name, p in named],
        early=early if {"threshold", "steps", "computed_steps", "exact_accuracy", "step"} <= early.keys() else None,
    )


def _plot(curve: HaltingCurve) -> Markup:
    def place(point: Point) -> tuple[float, float]:
        return point.mean_steps, 100 * point.exact_accuracy

    named = select_points(curve)
    points, labels = [], []
    for point in curve.by_threshold:
        if point in named or not points or place(point) != points[-1]:
            points.append(place(point))
            labels.append(f"{point.threshold:g}" if point in named else "")
    series = [
        Series("halting above a probability", points, 1, marks=True, labels=labels),
        Series("the same number of steps for all", [place(point) for point in curve.by_steps], 2, marks=True),
    ]
    return plot(series, title="puzzles solved, %", x_label="mean ACT steps")
