"""The part of a report about halting: accuracy against mean ACT steps, as a curve, as a table and in words."""

from __future__ import annotations

from train_jax.report.curves import Series, plot
from train_jax.report.figures import percent
from train_jax.report.measured import Measured
from train_jax.tasks.puzzles.halting import HaltingCurve, Point, select_points


def halting_section(measured: Measured) -> str:
    """ "" for a model that answers once."""
    curve = measured.halting_curve
    if measured.halt_max_steps == 1:
        return ""
    title = "<h2>Halting earlier</h2>\n"
    if curve is None:
        reason = "it comes of an evaluation on the whole test set, which `trm evaluate` makes"
        return f'{title}<p class="note">Not shown: {reason}.</p>\n'
    return f"{title}<p>{_told(curve)}</p>\n{_drawn(curve)}{_measured_early(measured)}"


def _told(curve: HaltingCurve) -> str:
    limit = curve.by_steps[-1]
    trained = next((point for point in curve.by_threshold if point.threshold == 0.5), None)
    told = [
        "The figures above let every sequence run to the limit of "
        f"{limit.mean_steps:.0f} ACT steps. A sequence can also stop at the first step where the model itself holds "
        "its answer to be right with more than some probability."
    ]
    if trained is not None:
        told.append(f"At 0.5, where training halts, {_costs(trained)}.")
    surer = [p for p in curve.by_threshold if p.threshold and p.threshold > 0.5]
    as_good = next((p for p in surer if p.exact_accuracy >= limit.exact_accuracy), None)
    if as_good is not None and as_good.mean_steps < limit.mean_steps - 0.005:
        told.append(f"At {as_good.threshold:g} halting loses nothing: {_costs(as_good)}.")
    return " ".join(told)


def _costs(point: Point) -> str:
    return f"{percent(point.exact_accuracy)} are solved after {point.mean_steps:.2f} steps on average"


def _drawn(curve: HaltingCurve) -> str:
    named = select_points(curve)
    points, labels = [], []
    for point in curve.by_threshold:
        place = (point.mean_steps, 100 * point.exact_accuracy)
        if point in named or not points or place != points[-1]:
            points.append(place)
            labels.append(f"{point.threshold:g}" if point in named else "")
    drawing = plot(
        [
            Series("halting, with the probability", points, 1, marks=True, labels=labels),
            Series("as many steps for all", [(p.mean_steps, 100 * p.exact_accuracy) for p in curve.by_steps], 2, True),
        ],
        title="puzzles solved, %",
        x_label="mean ACT steps",
    )
    rows = "".join(
        f"<tr><td>{name}</td><td>{point.mean_steps:.2f}</td><td>{percent(point.exact_accuracy)}</td>"
        f"<td>{percent(point.accuracy)}</td></tr>"
        for name, point in [
            *((f"surer than {point.threshold:g}", point) for point in named),
            *((f"all after {point.mean_steps:.0f}", point) for point in curve.by_steps),
        ]
    )
    return (
        f'<div class="beside">{drawing}<table class="numbers"><thead><tr><th>halts</th><th>mean steps</th>'
        f"<th>exact</th><th>token</th></tr></thead><tbody>{rows}</tbody></table></div>\n"
    )


def _measured_early(measured: Measured) -> str:
    found = measured.halted_early
    wanted = ("threshold", "steps", "computed_steps", "exact_accuracy", "step")
    if found is None or not all(name in found for name in wanted):
        return ""
    return (
        f'<p class="note">Computed that way (<code>trm evaluate --halt-early</code>) at step {found["step"]:,.0f} of '
        f"training, threshold {found['threshold']:g}: {percent(found['exact_accuracy'])} exact after "
        f"{found['steps']:.2f} steps on average; {found['computed_steps']:.2f} were computed, because a batch on a "
        "device goes on until its last sequence has halted.</p>\n"
    )
