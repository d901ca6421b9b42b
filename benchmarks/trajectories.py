"""Measures accuracy against trajectories, noise and ACT steps: chosen on some puzzles, reported on others.

    python -m benchmarks.trajectories RUN [RUN …] --validation data/validation --test data/test --results study

Every noise is evaluated once for each run, with the largest number of trajectories and ACT steps, on the first puzzles
of the test split of `--validation`; the results of fewer trajectories and steps are part of it. For each number of
trajectories, the noise and the depth with the best mean over the runs are then evaluated on the test split of
`--test`, a data set of another seed, again once for each noise.

With `--halting`, settings have a halting probability too, above which a puzzle is computed no further, and a cost in
mean ACT steps per puzzle; only the best and the cheapest one are evaluated on the test set.

Every evaluation is written to the folder `--results`, and is read from there when the command is run again, so it can
be interrupted. `--timed` measures the seconds of each setting on some puzzles, after compilation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from train_jax.analysis.answers import shown
from train_jax.analysis.statistics import estimate
from train_jax.run.restore import Restored, restore
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.choosing import STOPS, Chooser, interval
from train_jax.tasks.puzzles.evaluation import Evaluation
from train_jax.tasks.puzzles.mixture import load_mixture
from train_jax.tasks.puzzles.solving import puzzle_task
from train_jax.tasks.puzzles.trajectories import TrajectoryOptions


@dataclasses.dataclass(frozen=True)
class Options:
    """Choose noise and depth on a validation set, and report the accuracy on a test set."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Runs of the same preset with other seeds."""
    validation: str = "data/validation"
    test: str = "data/test"
    trajectories: int = 8
    depth: int = 16
    noises: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3)
    choose: Chooser = "halting"
    validation_puzzles: int = 1000
    test_puzzles: int = 4000
    halting: bool = False
    """Choose settings with early halting: a puzzle is computed until a halting probability exceeds a threshold."""
    target: float = 0.99
    """The cheapest setting with this mean accuracy on the validation set is reported too."""
    timed: int = 0
    """Puzzles on which the seconds of each setting are measured, with the first run; 0 measures none."""
    batch_size: int = 0
    """Examples per batch; 0 uses that of the run."""
    results: Path = Path("trajectories")
    """Folder of the evaluations, one JSON file each, and of the table, `table.json`."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is chosen: the result with so many trajectories and ACT steps and this noise."""

    trajectories: int
    noise: float
    depth: int
    threshold: float | None = None
    """Halting probability above which a puzzle is computed no further; None computes all trajectories."""


class Point(NamedTuple):
    """A mean over the runs on the validation set."""

    steps: float
    exact: float


class Study:
    """Evaluates each run with each noise once, and remembers the results on disk."""

    def __init__(self, options: Options):
        self._options = options
        self._restored: dict[str, Restored] = {}

    def run(self, path: str) -> Restored:
        """Returns a run, which is restored when an evaluation needs it."""
        if path not in self._restored:
            self._restored[path] = restore(path)
        return self._restored[path]

    def evaluated(self, path: str, settings: Setting, data_dir: str, limit: int) -> dict[str, Any]:
        """Returns the numbers of trajectories and depths of the curves, the shares by name, and the count."""
        files = [_digest(Path(path) / "FINISHED"), _digest(Path(data_dir) / "recipe.json")]
        key = [path, data_dir, *files, dataclasses.asdict(settings), limit, self._options.choose]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        file = self._options.results / f"{name}.json"
        if file.is_file():
            return json.loads(file.read_text())["result"]
        content = self._computed(path, settings, data_dir, limit)[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"key": key, "result": content}, indent=1))
        return content

    def seconds(self, setting: Setting) -> float:
        """Returns the seconds of an evaluation of the first puzzles of the test set after the one that compiles."""
        options = self._options
        return self._computed(options.runs[0], setting, options.test, options.timed)[1]

    @property
    def halt_limit(self) -> int:
        """ACT steps of an ordinary evaluation."""
        return puzzle_task(self.run(self._options.runs[0])).halt_max_steps

    def _computed(self, path: str, setting: Setting, data_dir: str, limit: int) -> tuple[dict[str, Any], float]:
        """Returns what is kept of an evaluation, and its seconds."""
        run, options = self.run(path), self._options
        settings = TrajectoryOptions(setting.trajectories, setting.noise, setting.depth, options.choose)
        task, puzzles = puzzle_task(run), load_mixture(data_dir, "test")
        if setting.threshold is not None:
            evaluator = task.evaluator(
                run.objective,
                Devices(),
                puzzles,
                batch_size=options.batch_size,
                halt_threshold=setting.threshold,
                trajectories=settings,
            )
        else:
            evaluator = task.trajectory_evaluator(
                run.objective, Devices(), puzzles, settings, batch_size=options.batch_size
            )
        if options.timed:
            evaluator(run.state, limit=1)
        start = time.perf_counter()
        result = evaluator(run.state, limit=limit)
        seconds = time.perf_counter() - start
        if isinstance(result, Evaluation):
            return result.metrics, seconds
        content = {
            "trajectories": result.trajectories,
            "depths": result.depths,
            "shares": {name: values.tolist() for name, values in result.shares.items()},
            "stops": {name: values.tolist() for name, values in result.stops.items()},
            "count": result.evaluation.metrics["count"],
        }
        return content, seconds


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file that changes with the run or the data set; "" without it."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


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
    """Returns the mean over the runs of steps and accuracy for every setting with early halting."""
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
    results: dict[float, list[dict[str, Any]]] = {}
    for noise in options.noises:
        setting = Setting(options.trajectories if noise else 1, noise, options.depth)
        results[noise] = [
            study.evaluated(path, setting, options.validation, options.validation_puzzles) for path in options.runs
        ]
        name = f"{options.choose}/best"
        values = ", ".join(f"{share(each, name, setting.trajectories, setting.depth):.4f}" for each in results[noise])
        print(f"validation, noise {noise:g}, {setting.trajectories} x {options.depth}: {values}", flush=True)
    ordinary = Setting(1, 0.0, study.halt_limit)
    if options.halting:
        points = stopped(results)
        chosen = choose_stopped(points, options.target)
        for setting in chosen:
            print(
                f"validation, {setting}: {points[setting].exact:.4f} in {points[setting].steps:.2f} steps", flush=True
            )
        rows = [*tested(study, options, [ordinary]), *(stopped_row(study, options, setting) for setting in chosen)]
    else:
        rows = tested(study, options, [ordinary, *choose(means(results, f"{options.choose}/best"), options.target)])
    (options.results / "table.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options))
