"""The statistics of experiments: intervals over seeds, power laws, tests, Pareto fronts. Pure functions, with SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
Curve = Sequence[tuple[float, float]]
"""(step, value), in the order of steps."""


@dataclass(frozen=True)
class Estimate:
    """The mean of a figure over seeds."""

    mean: float
    low: float | None
    """Of the 95 % interval by Student's t; None for fewer than two seeds."""
    high: float | None
    count: int
    """Number of seeds."""


@dataclass(frozen=True)
class PowerLaw:
    """y = coefficient * x ** exponent, fitted to logarithms by least squares."""

    coefficient: float
    exponent: float
    low: float
    """Of the 95 % interval of the exponent."""
    high: float
    r_squared: float
    count: int
    """Number of points."""

    def at(self, x: float) -> float:
        return self.coefficient * x**self.exponent


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of at least one value, with its interval."""
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return Estimate(mean, None, None, count)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return Estimate(mean, mean - half, mean + half, count)


def power_law(xs: Sequence[float], ys: Sequence[float]) -> PowerLaw | None:
    """Fits the points whose coordinates are above 0; None for fewer than three, or without a change of x or y."""
    points = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True) if x > 0 and y > 0]
    if len(points) < 3 or len({x for x, _ in points}) < 2 or len({y for _, y in points}) < 2:
        return None
    fit: Any = stats.linregress([x for x, _ in points], [y for _, y in points])
    slope, half = float(fit.slope), float(stats.t.ppf((1 + CONFIDENCE) / 2, len(points) - 2) * fit.stderr)
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
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the (cost, value) for which no other costs at most as much and has at least the value.

    In the order of cost; of equal points the first one.
    """
    front: list[int] = []
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1], index))
    for index in order:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def is_at_edge(xs: Sequence[float], best: float) -> bool:
    """Whether the best value is the smallest or the largest of a grid."""
    return best in (min(xs), max(xs))


def first_step(curve: Curve, threshold: float) -> float | None:
    """Returns the first step at which a value reaches the threshold; None if none does."""
    return next((step for step, value in curve if value >= threshold), None)


def band(curves: Sequence[Curve]) -> list[tuple[float, float, float, float]]:
    """Returns (step, mean, lowest, highest) at the steps that all curves have."""
    by_step = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(each) for each in by_step))) if by_step else []
    rows = ((step, [each[step] for each in by_step]) for step in steps)
    return [(step, float(np.mean(values)), min(values), max(values)) for step, values in rows]
