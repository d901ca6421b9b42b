"""The answer of a group in one sentence, with its evidence: means over seeds, intervals, tests, fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from train_jax.analysis.aims import Aim, aim_of, axis_value
from train_jax.analysis.records import Run, Study
from train_jax.analysis.statistics import Estimate, PowerLaw, estimate, first_step, holm, is_at_edge, power_law, welch
from train_jax.experiments.table import CONFOUNDED, TWINS
from train_jax.report.render import number, percent

ENOUGH = 0.85
"""The accuracy that groups 4a, 4b, 9 and contribution 1 ask for."""
SIGNIFICANT = 0.05


@dataclasses.dataclass(frozen=True)
class Point:
    """The finished runs of one experiment."""

    experiment: str
    x: float | None
    runs: tuple[Run, ...]
    final: Estimate
    peak: Estimate | None
    """Of the highest evaluation of each run; None without evaluations."""

    @property
    def values(self) -> list[float]:
        return [run.final for run in self.runs if run.final is not None]

    def mean(self, figure: Callable[[Run], float | None]) -> float | None:
        """Returns the mean of a figure over the seeds; None if a run does not have it."""
        values = [figure(run) for run in self.runs]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == len(values) else None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a group says."""

    group: str
    aim: Aim
    points: tuple[Point, ...]
    """In the order of the axis, or of the table."""
    sentence: str
    notes: tuple[str, ...]
    law: PowerLaw | None


def answer(study: Study, group: str) -> Answer:
    """Returns the answer of a group, from its finished runs."""
    runs = study.group(group)
    aim = aim_of(group, runs)
    points = _points(runs, aim)
    law = _error_law(points) if group == "exp01" else None
    sentence = _sentence(points, aim, _experiments(study, group))
    return Answer(group, aim, tuple(points), sentence, tuple(_notes(study, group, runs, points, law)), law)


def _points(runs: Sequence[Run], aim: Aim) -> list[Point]:
    points = []
    for experiment in dict.fromkeys(run.experiment for run in runs):
        finished = tuple(run for run in runs if run.experiment == experiment and run.final is not None)
        if finished:
            peaks = [run.peak[0] for run in finished if run.peak is not None]
            xs = {axis_value(run, aim) for run in finished}
            final = estimate([run.final for run in finished if run.final is not None])
            points.append(
                Point(
                    experiment,
                    xs.pop() if len(xs) == 1 else None,
                    finished,
                    final,
                    estimate(peaks) if len(peaks) == len(finished) else None,
                )
            )
    has_axis = bool(points) and all(point.x is not None for point in points)
    return sorted(points, key=lambda point: point.x or 0.0) if has_axis else points


def _sentence(points: Sequence[Point], aim: Aim, experiments: int) -> str:
    if len(points) == experiments == 1:
        return f"{points[0].experiment} has {shown(points[0].final)}."
    if len(points) < 2:
        return f"No answer yet: {len(points)} of {experiments} experiments have finished runs."
    if len({value for point in points for value in point.values}) == 1:
        return f"No difference: all {len(points)} experiments with finished runs have {percent(points[0].final.mean)}."
    return _best(points, aim)


def _best(points: Sequence[Point], aim: Aim) -> str:
    ranked = sorted(points, key=lambda point: -point.final.mean)
    best, second = ranked[0], ranked[1]
    xs = [point.x for point in points if point.x is not None]
    place = ""
    if best.x is not None and len(xs) == len(points):
        where = "at the edge of the grid" if is_at_edge(xs, best.x) else "inside the grid"
        place = f" ({aim.label} {number(best.x)}, {where})"
    return (
        f"{best.experiment}{place} is best with {shown(best.final)}; {second.experiment} follows with "
        f"{shown(second.final)}, {compared(best.values, second.values)}."
    )


def shown(value: Estimate) -> str:
    """Formats a mean with its interval and the number of seeds."""
    seeds = f"{value.count} seed{'s' * (value.count > 1)}"
    if value.low is None or value.high is None:
        return f"{percent(value.mean)} ({seeds})"
    return f"{percent(value.mean)} (95 % interval {percent(value.low)} to {percent(value.high)}, {seeds})"


def compared(first: Sequence[float], second: Sequence[float]) -> str:
    """Says whether two groups of seeds differ."""
    p = welch(first, second)
    if p is None:
        return "a difference that these seeds cannot test"
    verdict = "a significant difference" if p < SIGNIFICANT else "not a significant difference"
    return f"{verdict} (Welch's t-test, p = {p:.2g})"


def _notes(study: Study, group: str, runs: Sequence[Run], points: Sequence[Point], law: PowerLaw | None) -> list[str]:
    finished = sum(run.final is not None for run in runs)
    planned = len(study.planned.get(group, ()))
    notes = [f"{finished} of {max(planned, len(runs))} runs are finished."]
    notes += _comparisons(points)
    if group in CONFOUNDED:
        twins = " and ".join(f"{group}_{twin}" for twin in TWINS)
        notes.append(f"In this group {CONFOUNDED[group]}; {twins} answer the question.")
    if law is not None:
        notes.append(_law_note(law))
    if group.startswith("exp04"):
        enough = [point for point in points if point.final.mean >= ENOUGH]
        least = f"{enough[0].experiment} is the smallest" if enough else "No experiment"
        notes.append(f"{least} with at least {percent(ENOUGH)}.")
    if group in ("exp09", "contrib01") or group.startswith("contrib01_"):
        notes += [_first_note(point) for point in points]
    if group in ("exp05", "contrib02"):
        known = [(point.experiment, point.mean(lambda run: run.act_steps)) for point in points]
        steps = ", ".join(f"{name} {value:.2f}" for name, value in known if value is not None)
        notes.append(f"Mean ACT steps at the end of training: {steps or 'not logged'}.")
    return notes


def _comparisons(points: Sequence[Point]) -> list[str]:
    """Returns which experiments differ from the best one, adjusted for the number of comparisons."""
    ranked = sorted(points, key=lambda point: -point.final.mean)
    tested = [(point, p) for point in ranked[1:] if (p := welch(ranked[0].values, point.values)) is not None]
    if len(tested) < 2:
        return []
    adjusted = holm([p for _, p in tested])
    named = [f"{point.experiment} (p = {p:.2g})" for (point, _), p in zip(tested, adjusted, strict=True)]
    worse = [name for name, p in zip(named, adjusted, strict=True) if p < SIGNIFICANT]
    others = [name for name in named if name not in worse]
    return [
        f"Worse than {ranked[0].experiment} by Welch's t-test, adjusted for {len(tested)} comparisons (Holm): "
        f"{', '.join(worse) or 'none'}. Not significant: {', '.join(others) or 'none'}."
    ]


def _error_law(points: Sequence[Point]) -> PowerLaw | None:
    known = [point for point in points if point.x is not None]
    return power_law([point.x or 0.0 for point in known], [1 - point.final.mean for point in known])


def _law_note(law: PowerLaw) -> str:
    return (
        f"The error (1 - accuracy) is a power of the parameters with exponent {law.exponent:.3f} (95 % interval "
        f"{law.low:.3f} to {law.high:.3f}), "
        f"r² {law.r_squared:.3f}, over {law.count} sizes."
    )


def _first_note(point: Point) -> str:
    steps = [first_step(run.curve, ENOUGH) for run in point.runs]
    reached = [step for step in steps if step is not None]
    if not reached:
        return f"{point.experiment}: {percent(ENOUGH)} is not reached by any of {len(steps)} seeds."
    mean, who = sum(reached) / len(reached), f"{len(reached)} of {len(steps)} seeds"
    return f"{point.experiment}: {percent(ENOUGH)} is reached by {who}, on average at step {mean:,.0f}."


def _experiments(study: Study, group: str) -> int:
    """Returns the number of planned experiments, and of those that were trained without a plan."""
    planned = {name.partition("/")[0] for name in study.planned.get(group, ())}
    return len(planned | {run.experiment for run in study.group(group)})
