"""Measures views of puzzles against noise and both: chosen on some puzzles, reported on others.

    python -m campaigns.views RUN [RUN …] --validation data/validation --test data/test --results views

Runs are of one preset with different seeds. Every kind of trajectory (views, noise, both) is evaluated with early
halting at each of `--thresholds` on the validation puzzles. For each, the cheapest threshold whose mean accuracy over
the runs reaches a target is evaluated on the test puzzles; if none does, the most accurate one is. So is the first
answer that two views share (`--agree`). The solved puzzles of views and noise are compared by an exact sign test over
all runs, at the threshold of noise whose mean ACT steps are closest to those of the views.

Every evaluation is written to the folder `--results`, and is read from there when the command is run again, so it can
be interrupted. `evaluations.csv` has a row for each.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from train_jax.puzzles.batches import load_mixture, loss_labels
from train_jax.puzzles.metrics import score_answers
from train_jax.puzzles.scan import TrajectoryOptions
from train_jax.puzzles.solving import puzzle_task
from train_jax.puzzles.trajectories import interval
from train_jax.run.restore import Restored, restore
from train_jax.runtime.devices import Devices


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare views with noise, on puzzles of which a part chooses the threshold."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Runs of the same preset with different seeds."""
    validation: str = "data/validation"
    test: str = "data/test"
    trajectories: int = 4
    """Number of views, and of noisy trajectories."""
    depth: int = 6
    """Number of ACT steps of a trajectory."""
    noise: float = 0.3
    thresholds: tuple[float, ...] = (0.5, 0.9, 0.98, 0.995, 0.998)
    targets: tuple[float, ...] = (0.997, 0.999)
    """Mean accuracies on the validation puzzles, for each of which the cheapest threshold is reported."""
    validation_puzzles: int = 1000
    test_puzzles: int = 4000
    batch_size: int = 0
    """Examples per batch; 0 uses that of the run."""
    results: Path = Path("views")
    """Folder of the evaluations, one JSON file each, and of the table, `evaluations.csv`."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to evaluate."""

    name: str
    trajectories: int
    views: int
    noise: float
    depth: int
    threshold: float
    agree: bool = False


class Study:
    """Evaluates each run with each setting once, and remembers the results on disk."""

    def __init__(self, options: Options):
        self.options = options
        self._restored: dict[str, Restored] = {}

    def evaluated(self, path: str, setting: Setting, data_dir: str, limit: int) -> dict[str, Any]:
        """Returns the metrics, and `solved`, a 0 or 1 for each puzzle."""
        files = [_digest(Path(path) / "FINISHED"), _digest(Path(data_dir) / "recipe.json")]
        key = [path, data_dir, *files, dataclasses.asdict(setting), limit]
        file = self.options.results / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
        if not file.is_file():
            result = self._computed(path, setting, data_dir, limit)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"key": key, "result": result}))
        return json.loads(file.read_text())["result"]

    def over_runs(self, setting: Setting, data_dir: str, limit: int) -> list[dict[str, Any]]:
        return [self.evaluated(path, setting, data_dir, limit) for path in self.options.runs]

    def _computed(self, path: str, setting: Setting, data_dir: str, limit: int) -> dict[str, Any]:
        if path not in self._restored:
            self._restored[path] = restore(path)
        run = self._restored[path]
        puzzles = load_mixture(data_dir, "test")
        trajectories = TrajectoryOptions(
            setting.trajectories, setting.noise, setting.depth, views=setting.views, agree=setting.agree
        )
        evaluator = puzzle_task(run).evaluator(
            run.objective,
            Devices(),
            puzzles,
            batch_size=self.options.batch_size,
            halt_threshold=setting.threshold,
            trajectories=trajectories,
        )
        evaluation = evaluator(run.state, limit=limit)
        part = puzzles.parts[0]
        labels = loss_labels(np.asarray(part.labels[: len(evaluation.inputs)]), part.metadata.ignore_label_id)
        solved = score_answers(evaluation.predictions[-1], labels).exact
        return evaluation.metrics | {"solved": "".join("01"[int(exact)] for exact in solved)}


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file that changes with the run or the data set; "" without it."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def mean(results: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.mean(each[name] for each in results)


def pooled(results: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Returns the share of solved puzzles of all runs together, and its 95 % interval (Wilson)."""
    solved = sum(each["solved"].count("1") for each in results)
    count = sum(len(each["solved"]) for each in results)
    return solved / count, *interval(solved, count)


def sign_test(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> tuple[int, int, float]:
    """Returns the puzzles that only the first and only the second solve, and the two-sided p of equal chances."""
    solved = ["".join(each["solved"] for each in results) for results in (first, second)]
    pairs = list(zip(*solved, strict=True))
    only_first = pairs.count(("1", "0"))
    only_second = pairs.count(("0", "1"))
    count = only_first + only_second
    least = min(only_first, only_second)
    tail = sum(math.comb(count, number) for number in range(least + 1)) / 2**count
    return only_first, only_second, min(1.0, 2 * tail)


def kinds(options: Options) -> dict[str, Setting]:
    """Returns the kinds of trajectories by name, with any threshold."""
    count = options.trajectories
    depth = options.depth
    given = {"views": (count, 0.0), "noise": (1, options.noise), "both": (count, options.noise)}
    return {name: Setting(name, count, views, noise, depth, 0.5) for name, (views, noise) in given.items()}


def cheapest(points: dict[float, tuple[float, float]], target: float) -> float:
    """Returns the threshold of the fewest steps with this accuracy; without one, that of the highest accuracy."""
    enough = [threshold for threshold, (exact, _) in points.items() if exact >= target]
    if enough:
        return min(enough, key=lambda threshold: points[threshold][1])
    return max(points, key=lambda threshold: (points[threshold][0], -points[threshold][1]))


def line(name: str, setting: Setting, results: Sequence[dict[str, Any]]) -> str:
    share, low, high = pooled(results)
    runs = ", ".join(f"{each['exact_accuracy']:.4f}" for each in results)
    agreed = ""
    if setting.agree:
        agreed = f", {mean(results, 'agreed'):.4f} agreed, {wrong(results):.5f} of them wrong"
    return (
        f"{name}, P {setting.threshold:g}: {runs}; pooled {share:.4f} ({low:.4f}-{high:.4f}) in "
        f"{mean(results, 'steps'):.2f} ACT steps, {mean(results, 'solves'):.2f} solves{agreed}"
    )


def wrong(results: Sequence[dict[str, Any]]) -> float:
    """Returns the share of wrong answers among those on which two trajectories agreed."""
    agreed = sum(each["agreed"] * each["count"] for each in results)
    return 1 - sum(each["agreed_exact"] * each["count"] for each in results) / agreed if agreed else math.nan


def main(options: Options) -> None:
    study = Study(options)
    tested: dict[str, list[dict[str, Any]]] = {}
    points: dict[str, dict[float, tuple[float, float]]] = {}
    for name, kind in kinds(options).items():
        points[name] = {}
        for threshold in options.thresholds:
            setting = dataclasses.replace(kind, threshold=threshold)
            results = study.over_runs(setting, options.validation, options.validation_puzzles)
            points[name][threshold] = mean(results, "exact_accuracy"), mean(results, "steps")
            print(line(f"validation, {name}", setting, results), flush=True)
        for target in options.targets:
            setting = dataclasses.replace(kind, threshold=cheapest(points[name], target))
            tested[f"{name} {target:g}"] = study.over_runs(setting, options.test, options.test_puzzles)
            print(line(f"test, {name} for {target:g}", setting, tested[f"{name} {target:g}"]), flush=True)
    agree = dataclasses.replace(kinds(options)["views"], name="agree", agree=True)
    agree = dataclasses.replace(agree, threshold=cheapest(points["views"], options.targets[0]))
    print(line("test, agree", agree, study.over_runs(agree, options.test, options.test_puzzles)), flush=True)
    compare(study, options, points, tested)
    write_csv(options.results)


def compare(
    study: Study,
    options: Options,
    points: dict[str, dict[float, tuple[float, float]]],
    tested: dict[str, list[dict[str, Any]]],
) -> None:
    """Prints the sign test of views against noise with about the same ACT steps on the validation puzzles."""
    for target in options.targets:
        _, steps = points["views"][cheapest(points["views"], target)]
        threshold = min(points["noise"], key=lambda each: abs(points["noise"][each][1] - steps))
        noise = dataclasses.replace(kinds(options)["noise"], threshold=threshold)
        results = study.over_runs(noise, options.test, options.test_puzzles)
        only_views, only_noise, p = sign_test(tested[f"views {target:g}"], results)
        print(line("test, noise of equal steps", noise, results))
        print(f"  only views {only_views}, only noise {only_noise}, p {p:.2g}", flush=True)


COLUMNS = ("data", "run", "kind", "trajectories", "views", "noise", "depth", "threshold", "agree")
FIGURES = ("steps", "solves", "exact_accuracy", "agreed", "agreed_exact", "count")


def write_csv(results: Path) -> None:
    rows = []
    for file in results.glob("*.json"):
        stored = json.loads(file.read_text())
        (path, data_dir, _, _, setting, _), figures = stored["key"], stored["result"]
        shown = [f"{figures[name]:.6g}" if name in figures else "" for name in FIGURES]
        rows.append([Path(data_dir).name, Path(path).name, *map(str, setting.values()), *shown])
    with (results / "evaluations.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *FIGURES])
        writer.writerows(sorted(rows))


if __name__ == "__main__":
    main(tyro.cli(Options))
