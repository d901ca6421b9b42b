"""Measures accuracy against trajectories, noise and ACT steps: chosen on some puzzles, reported on others.

    python -m campaigns.trajectories RUN [RUN …] --validation data/validation --test data/test --results study

Every noise is evaluated once for each run, with the largest number of trajectories and ACT steps, on the first puzzles
of the test split of `--validation`; the results of fewer trajectories and steps are part of it. For each number of
trajectories, the noise and the depth with the best mean over the runs are then evaluated on the test split of
`--test`, a data set of another seed, again once for each noise.

With `--halting`, settings have a halting probability too, above which a puzzle is computed no further, and a cost in
mean ACT steps per puzzle; only the best and the cheapest one are evaluated on the test set. `--thresholds P …` does so
too, but evaluates every setting with early halting instead of all trajectories to their end: sooner where most puzzles
halt soon.

Every evaluation is written to the folder `--results`, and is read from there when the command is run again, so it can
be interrupted. `--timed` measures the seconds of each setting on some puzzles, after compilation.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import tyro

from campaigns.trajectory_settings import Options, Setting, Study, write_evaluations
from train_jax.puzzles.trajectories import STOPS, interval
from train_jax.research.answers import estimate, shown


class Point(NamedTuple):
    """A mean over the runs on the validation set."""

    steps: float
    exact: float


def share(result: dict[str, Any], name: str, trajectories: int, depth: int) -> float:
    """Returns the share of solved puzzles with the first trajectories and the first ACT steps."""
    place = result["trajectories"].index(trajectories), result["depths"].index(depth)
    return float(result["shares"][name][place[0]][place[1]])


def means(results: dict[float, list[dict[str, Any]]], name: str) -> dict[Setting, float]:
    """Returns the mean over the runs for every noise and every number of trajectories and depth of the curves."""
    return {
        Setting(count, noise, depth): statistics.mean(share(each, name, count, depth) for each in of_noise)
        for noise, of_noise in results.items()
        for count in of_noise[0]["trajectories"]
        for depth in of_noise[0]["depths"]
    }


def stopped(results: dict[float, list[dict[str, Any]]]) -> dict[Setting, Point]:
    """Returns the mean steps and accuracy over the runs for every setting with early halting."""
    points = {}
    for noise, of_noise in results.items():
        for i, count in enumerate(of_noise[0]["trajectories"]):
            for j, depth in enumerate(of_noise[0]["depths"]):
                for k, stop in enumerate(STOPS):
                    steps, exact = (
                        statistics.mean(each["stops"][name][k][i][j] for each in of_noise) for name in Point._fields
                    )
                    points[Setting(count, noise, depth, stop)] = Point(steps, exact)
    return points


def halted(study: Study, options: Options) -> dict[Setting, Point]:
    """Evaluates every setting with early halting on the validation set; returns the mean over the runs of each."""
    points = {}
    grid = itertools.product(options.noises, options.trajectories, options.depth, options.thresholds)
    for noise, count, depth, threshold in grid:
        setting = Setting(count, noise, depth, threshold)
        results = [
            study.evaluated(path, setting, options.validation, options.validation_puzzles) for path in options.runs
        ]
        point = Point(*(statistics.mean(each[name] for each in results) for name in ("steps", "exact_accuracy")))
        points[setting] = point
        values = ", ".join(f"{each['exact_accuracy']:.4f} ({each['steps']:.2f} steps)" for each in results)
        print(
            f"validation, {count} x {depth}, noise {noise:g}, halting above {threshold:g}: {values}; "
            f"{point.exact:.4f} in {point.steps:.2f} steps",
            flush=True,
        )
    return points


def choose_stopped(points: dict[Setting, Point], target: float) -> list[Setting]:
    """Returns the best setting (of equally good ones the cheapest), and the cheapest one that reaches the target."""
    best = max(points, key=lambda each: (points[each].exact, -points[each].steps))
    enough = [setting for setting, point in points.items() if point.exact >= target]
    cheapest = min(enough, key=lambda each: (points[each].steps, -points[each].exact), default=None)
    return [best] if cheapest in (None, best) else [cheapest, best]


def choose(validated: dict[Setting, float], target: float) -> list[Setting]:
    """Returns the best setting for each number of trajectories, and the cheapest one that reaches the target.

    Of equally good settings the one with fewer ACT steps is chosen.
    """
    counts = sorted({setting.trajectories for setting in validated})

    def quality(setting: Setting) -> tuple[float, int]:
        return validated[setting], -setting.depth

    chosen = [max((each for each in validated if each.trajectories == count), key=quality) for count in counts]
    enough = [setting for setting, mean in validated.items() if mean >= target]
    cheapest = min(enough, key=lambda each: (each.trajectories * each.depth, -validated[each]), default=None)
    return chosen if cheapest is None or cheapest in chosen else [*chosen, cheapest]


def row(study: Study, options: Options, setting: Setting, widest: Setting) -> dict[str, Any]:
    """Returns the figures of a setting on the test set; they are part of an evaluation of `widest`."""
    results = [study.evaluated(path, widest, options.test, options.test_puzzles) for path in options.runs]
    figures: dict[str, Any] = {**dataclasses.asdict(setting), "act_steps": setting.trajectories * setting.depth}
    names = {"exact": f"{options.choose}/best", "last": f"{options.choose}/last", "pass": "pass/best"}
    for figure, name in names.items():
        figures[figure] = [share(each, name, setting.trajectories, setting.depth) for each in results]
    counts = [round(each["count"]) for each in results]
    figures["intervals"] = [interval(round(x * n), n) for x, n in zip(figures["exact"], counts, strict=True)]
    figures["puzzles"] = counts
    figures["seconds"] = study.seconds(setting) if options.timed else None
    return figures


def stopped_row(study: Study, options: Options, setting: Setting) -> dict[str, Any]:
    """Evaluates a setting with early halting on the test set, and returns its figures."""
    results = [study.evaluated(path, setting, options.test, options.test_puzzles) for path in options.runs]
    figures: dict[str, Any] = {**dataclasses.asdict(setting)}
    figures |= {"act_steps": [each["steps"] for each in results], "exact": [each["exact_accuracy"] for each in results]}
    counts = [round(each["count"]) for each in results]
    figures["intervals"] = [interval(round(x * n), n) for x, n in zip(figures["exact"], counts, strict=True)]
    figures["puzzles"] = counts
    figures["seconds"] = study.seconds(setting) if options.timed else None
    runs = zip(figures["exact"], figures["intervals"], figures["act_steps"], strict=True)
    texts = [f"{x:.4f} [{low:.4f}, {high:.4f}] ({steps:.2f} steps)" for x, (low, high), steps in runs]
    seconds = f", {figures['seconds']:.1f} s for {options.timed} puzzles" if options.timed else ""
    print(
        f"{setting.trajectories} x {setting.depth}, noise {setting.noise:g}, halting above {setting.threshold:g}: "
        f"{', '.join(texts)}; {shown(estimate(figures['exact']))} in {statistics.mean(figures['act_steps']):.2f} "
        f"steps{seconds}",
        flush=True,
    )
    return figures


def tested(study: Study, options: Options, chosen: Sequence[Setting]) -> list[dict[str, Any]]:
    """Evaluates the settings on the test set, once for each noise, and prints a line for each."""
    print("\ntrajectories  noise  depth  ACT steps  exact of each run (last step; pass@K), mean", flush=True)
    rows = []
    for setting in chosen:
        alike = [each for each in chosen if each.noise == setting.noise]
        widest = Setting(max(each.trajectories for each in alike), setting.noise, max(each.depth for each in alike))
        rows.append(row(study, options, setting, widest))
        figures = rows[-1]
        runs = zip(figures["exact"], figures["intervals"], figures["last"], figures["pass"], strict=True)
        texts = [
            f"{x:.4f} [{max(low, 0):.4f}, {high:.4f}] ({last:.4f}; {some:.4f})" for x, (low, high), last, some in runs
        ]
        seconds = "" if figures["seconds"] is None else f", {figures['seconds']:.1f} s for {options.timed} puzzles"
        print(
            f"{setting.trajectories:>12}  {setting.noise:>5g}  {setting.depth:>5}  {figures['act_steps']:>9}  "
            f"{', '.join(texts)}; {shown(estimate(figures['exact']))}{seconds}",
            flush=True,
        )
    return rows


def main(options: Options) -> None:
    study = Study(options)
    rows = halting_rows(study, options) if options.halting or options.thresholds else trajectory_rows(study, options)
    (options.results / "table.json").write_text(json.dumps(rows, indent=1))
    write_evaluations(options.results)


def halting_rows(study: Study, options: Options) -> list[dict[str, Any]]:
    """Returns the ordinary evaluation on the test set, and that of the chosen settings with early halting."""
    points = halted(study, options) if options.thresholds else stopped(validated(study, options))
    chosen = choose_stopped(points, options.target)
    for setting in chosen:
        print(f"validation, {setting}: {points[setting].exact:.4f} in {points[setting].steps:.2f} steps", flush=True)
    ordinary = Setting(1, 0.0, study.halt_limit)
    return [*tested(study, options, [ordinary]), *(stopped_row(study, options, setting) for setting in chosen)]


def trajectory_rows(study: Study, options: Options) -> list[dict[str, Any]]:
    """Returns the ordinary evaluation on the test set, and that of the chosen settings."""
    means_of = means(validated(study, options), f"{options.choose}/best")
    return tested(study, options, [Setting(1, 0.0, study.halt_limit), *choose(means_of, options.target)])


def validated(study: Study, options: Options) -> dict[float, list[dict[str, Any]]]:
    """Evaluates every noise once for each run on the validation set, with all trajectories and ACT steps."""
    results: dict[float, list[dict[str, Any]]] = {}
    count = max(options.trajectories)
    depth = max(options.depth)
    for noise in options.noises:
        setting = Setting(count if noise else 1, noise, depth)
        results[noise] = [
            study.evaluated(path, setting, options.validation, options.validation_puzzles) for path in options.runs
        ]
        name = f"{options.choose}/best"
        values = ", ".join(f"{share(each, name, setting.trajectories, setting.depth):.4f}" for each in results[noise])
        print(f"validation, noise {noise:g}, {setting.trajectories} x {depth}: {values}", flush=True)
    return results


if __name__ == "__main__":
    main(tyro.cli(Options))
