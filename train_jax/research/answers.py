"""The answer of a group of experiments in one sentence, with its evidence: means over seeds, intervals, tests, fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats

from train_jax.report.render import number, percent
from train_jax.research.records import RunResult, Study
from train_jax.research.table import CONFOUNDED, EXPERIMENTS, TWINS, twins_of

ENOUGH = 0.85
"""The accuracy that groups 4a, 4b, 9 and contribution 1 ask for."""
SIGNIFICANT = 0.05
CONFIDENCE = 0.95
OPERATIONAL = ("seed", "run_dir", "data_dir", "init_from", "platform", "resume")


# ---- questions


@dataclasses.dataclass(frozen=True)
class Aim:
    """A group's question; without an axis, its experiments are compared by name."""

    text: str
    axis: str = ""
    """A dotted field of the configuration, `parameters`, or `facts.NAME` of the data set."""
    label: str = ""
    """The label of the axis."""
    log: bool = False


AIMS = {
    "baseline": Aim("What does the baseline reach?"),
    "exp01": Aim("Where does accuracy saturate with parameters?", "parameters", "parameters", log=True),
    "exp02a": Aim("How many L-cycles are best?", "arch.L_cycles", "L-cycles"),
    "exp02b": Aim("How many H-cycles are best?", "arch.H_cycles", "H-cycles"),
    "exp03": Aim("Does recursion replace layers?", "arch.L_layers", "layers, with fewer L-cycles for more layers"),
    "exp04a": Aim("How many training puzzles are needed?", "facts.total_groups", "training puzzles", log=True),
    "exp04b": Aim("Do augmentations replace puzzles?", "facts.mean_puzzle_examples", "examples per puzzle", log=True),
    "exp05": Aim("How many supervision steps are worth their cost?", "arch.halt_max_steps", "ACT step limit"),
    "exp06": Aim("Which batch size is the largest without a loss?", "global_batch_size", "batch size", log=True),
    "exp07": Aim("Which number formats train as well as float32?"),
    "exp08": Aim("What does the average of the weights add?"),
    "exp09": Aim("Which optimizer is best, and which converges first?"),
    "exp10": Aim("Which learning rate is robust?"),
    "contrib01": Aim("Does a curriculum on the recursion depth save steps?"),
    "contrib02": Aim("Does less exploration over time save ACT steps at equal accuracy?"),
    "contrib03": Aim("Does recomputation give deeper recursion in the same memory?", "arch.L_cycles", "L-cycles"),
    "contrib04": Aim("Does a penalty on changes between H-cycles help?", "arch.cycle_penalty", "weight"),
    "contrib05": Aim("Does a local window do as well as full attention on large grids?"),
    "contrib06": Aim("Does one model for both puzzles, or a transferred recursion, do as well as one for each?"),
}


def aim_of(group: str, runs: Sequence[RunResult]) -> Aim:
    """Returns the question of a group; of a free sweep, which of its values is best."""
    listed = next((group.removesuffix(f"_{twin}") for twin in TWINS if group.endswith(f"_{twin}")), group)
    if listed in AIMS and not any("@" in run.experiment for run in runs):
        return AIMS[listed]
    names = differing_fields(runs)
    what = " and ".join(name.rpartition(".")[2] for name in names) or "experiment"
    numeric = len(names) == 1 and all(_is_number(run.config.get(names[0])) for run in runs)
    return Aim(f"Which {what} is best?", names[0] if numeric else "", names[0] if numeric else "")


def differing_fields(runs: Sequence[RunResult]) -> list[str]:
    """Returns the fields in which the runs differ and that change what is learned."""
    names = {name for run in runs for name in run.config}
    differing = {name for name in names if len({repr(run.config.get(name)) for run in runs}) > 1}
    return sorted(name for name in differing if name not in OPERATIONAL and not name.startswith("wandb"))


def axis_value(run: RunResult, aim: Aim) -> float | None:
    """Returns the place of a run on the axis; None without one."""
    facts = {f"facts.{name}": value for name, value in run.facts.items()}
    value: Any = {**run.config, **facts, "parameters": run.parameters}.get(aim.axis)
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- answers


@dataclasses.dataclass(frozen=True)
class Point:
    """The finished runs of one experiment."""

    experiment: str
    x: float | None
    runs: tuple[RunResult, ...]
    final: Estimate

    @property
    def values(self) -> list[float]:
        return [run.final for run in self.runs if run.final is not None]

    def mean(self, figure: Callable[[RunResult], float | None]) -> float | None:
        """Returns the mean of a figure over the seeds; None if a run does not have it."""
        values = [figure(run) for run in self.runs]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == len(values) else None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to the question of a group."""

    group: str
    aim: Aim
    points: tuple[Point, ...]
    """Points in the order of the axis, or of the table."""
    sentence: str
    notes: tuple[str, ...]
    law: PowerLaw | None


def answer(study: Study, group: str) -> Answer:
    """Returns the answer of a group, from its finished runs."""
    runs = study.group(group)
    aim = aim_of(group, runs)
    points = _points(runs, aim)
    law = None
    if group == "exp01":
        known = [(point.x, 1 - point.final.mean) for point in points if point.x is not None]
        law = power_law([x for x, _ in known], [error for _, error in known])
    experiments = {name for name, row in EXPERIMENTS.items() if row.group == group}
    experiments |= {run.experiment for run in runs}
    finished = sum(run.final is not None for run in runs)
    notes = [f"{finished} of {len(runs)} runs are finished.", *_comparisons(points), *_evidence(group, points, law)]
    sentence = _sentence(points, aim, len(experiments))
    return Answer(group, aim, tuple(points), sentence, tuple(notes), law)


def _points(runs: Sequence[RunResult], aim: Aim) -> list[Point]:
    points = []
    for experiment in dict.fromkeys(run.experiment for run in runs):
        finished = tuple(run for run in runs if run.experiment == experiment and run.final is not None)
        if finished:
            xs = {axis_value(run, aim) for run in finished}
            final = estimate([run.final for run in finished if run.final is not None])
            points.append(Point(experiment, xs.pop() if len(xs) == 1 else None, finished, final))
    has_axis = bool(points) and all(point.x is not None for point in points)
    return sorted(points, key=lambda point: point.x or 0.0) if has_axis else points


def _sentence(points: Sequence[Point], aim: Aim, experiments: int) -> str:
    if len(points) == experiments == 1:
        return f"{points[0].experiment} has {shown(points[0].final)}."
    if len(points) < 2:
        return f"No answer yet: {len(points)} of {experiments} experiments have finished runs."
    if len({value for point in points for value in point.values}) == 1:
        return f"No difference: all {len(points)} experiments with finished runs have {percent(points[0].final.mean)}."
    ranked = sorted(points, key=lambda point: -point.final.mean)
    best, second = ranked[:2]
    xs = [point.x for point in points if point.x is not None]
    place = ""
    if best.x is not None and len(xs) == len(points):
        where = "at the edge of the grid" if best.x in (min(xs), max(xs)) else "inside the grid"
        place = f" ({aim.label} {number(best.x)}, {where})"
    follows = f"{second.experiment} follows with {shown(second.final)}"
    return f"{best.experiment}{place} is best with {shown(best.final)}; {follows}."


def shown(value: Estimate) -> str:
    """Formats a mean with its interval and the number of seeds."""
    seeds = f"{value.count} seed{'s' * (value.count > 1)}"
    return f"{percent(value.mean)} ({f'95 % interval {value.interval}, ' * bool(value.interval)}{seeds})"


def _evidence(group: str, points: Sequence[Point], law: PowerLaw | None) -> Iterator[str]:
    """Yields what the question of the group asks for beyond the accuracies."""
    if group in CONFOUNDED:
        yield f"In this group {CONFOUNDED[group]}; {twins_of(group)} answer the question."
    if law is not None:
        yield (
            f"The error (1 - accuracy) is a power of the parameters with exponent {law.exponent:.3f} (95 % interval "
            f"{law.low:.3f} to {law.high:.3f}), r² {law.r_squared:.3f}, over {law.count} sizes."
        )
    if group.startswith("exp04"):
        enough = [point for point in points if point.final.mean >= ENOUGH]
        least = f"{enough[0].experiment} is the smallest" if enough else "No experiment"
        yield f"{least} with at least {percent(ENOUGH)}."
    if group in ("exp09", "contrib01") or group.startswith("contrib01_"):
        yield from map(_first_note, points)
    if group in ("exp05", "contrib02"):
        known = [(point.experiment, point.mean(lambda run: run.act_steps)) for point in points]
        steps = ", ".join(f"{name} {value:.2f}" for name, value in known if value is not None)
        yield f"Mean ACT steps at the end of training: {steps or 'not logged'}."


def _comparisons(points: Sequence[Point]) -> list[str]:
    """Returns which experiments differ from the best one, adjusted for the number of comparisons."""
    ranked = sorted(points, key=lambda point: -point.final.mean)
    tested = [(point, p) for point in ranked[1:] if (p := welch(ranked[0].values, point.values)) is not None]
    if not tested:
        return ["Without two seeds of each, nothing says whether they differ by chance."] if len(points) > 1 else []
    adjusted = holm([p for _, p in tested])
    named = [f"{point.experiment} (p = {p:.2g})" for (point, _), p in zip(tested, adjusted, strict=True)]
    worse = [name for name, p in zip(named, adjusted, strict=True) if p < SIGNIFICANT]
    others = [name for name in named if name not in worse]
    return [
        f"Worse than {ranked[0].experiment} by Welch's t-test, adjusted for {len(tested)} comparisons (Holm): "
        f"{', '.join(worse) or 'none'}. Not significant: {', '.join(others) or 'none'}."
    ]


def _first_note(point: Point) -> str:
    steps = [next((step for step, value in run.curve if value >= ENOUGH), None) for run in point.runs]
    reached = [step for step in steps if step is not None]
    if not reached:
        return f"{point.experiment}: {percent(ENOUGH)} is not reached by any of {len(steps)} seeds."
    mean = sum(reached) / len(reached)
    who = f"{len(reached)} of {len(steps)} seeds"
    return f"{point.experiment}: {percent(ENOUGH)} is reached by {who}, on average at step {mean:,.0f}."


# ---- statistics


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean of a figure over seeds."""

    mean: float
    low: float | None
    """The lower end of the 95 % interval by Student's t; None for fewer than two seeds."""
    high: float | None
    count: int
    """Number of seeds."""

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"{percent(self.low)} to {percent(self.high)}"


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """y = coefficient * x ** exponent, fitted to logarithms by least squares."""

    coefficient: float
    exponent: float
    low: float
    """The lower end of the 95 % interval of the exponent."""
    high: float
    r_squared: float
    count: int
    """Number of points."""

    def at(self, x: float) -> float:
        return self.coefficient * x**self.exponent


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of at least one value, with its interval."""
    count = len(values)
    mean = float(np.mean(values))
    if count < 2:
        return Estimate(mean, None, None, count)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * stats.sem(values))
    return Estimate(mean, mean - half, mean + half, count)


def power_law(xs: Sequence[float], ys: Sequence[float]) -> PowerLaw | None:
    """Fits the points whose coordinates are above 0; None for fewer than three, or without a change of x or y."""
    points = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True) if x > 0 and y > 0]
    if len(points) < 3 or len({x for x, _ in points}) < 2 or len({y for _, y in points}) < 2:
        return None
    fit: Any = stats.linregress([x for x, _ in points], [y for _, y in points])
    slope = float(fit.slope)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(points) - 2) * fit.stderr)
    return PowerLaw(math.exp(fit.intercept), slope, slope - half, slope + half, float(fit.rvalue) ** 2, len(points))


def welch(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns the p-value of Welch's t-test for equal means, two-sided.

    None for fewer than two values on a side, and for two sides without any variance, for which there is no test.
    """
    if min(len(first), len(second)) < 2 or (np.ptp(first) == 0 and np.ptp(second) == 0):
        return None
    test: Any = stats.ttest_ind(first, second, equal_var=False)
    return float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values adjusted for several comparisons by the method of Holm (1979), in the same order."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
