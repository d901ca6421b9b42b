"""Measures accuracy against trajectories, noise and ACT steps: chosen on some puzzles, reported on others.

    python -m benchmarks.trajectories RUN [RUN …] --validation data/validation --test data/test --json study.json

Every noise is evaluated with the largest number of trajectories and ACT steps on the first puzzles of the test split of
`--validation`; the results of fewer trajectories and steps are part of it. For each number of trajectories, the noise
and the depth with the best mean over the runs are then evaluated on the test split of `--test`, a data set of another
seed. Seconds are those of an evaluation after compilation.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from train_jax.run.restore import Restored, restore
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.choosing import Chooser, interval
from train_jax.tasks.puzzles.mixture import load_mixture
from train_jax.tasks.puzzles.solving import puzzle_task
from train_jax.tasks.puzzles.trajectory_evaluation import TrajectoryEvaluation, TrajectoryOptions


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
    batch_size: int = 0
    """Examples per batch; 0 uses that of the run."""
    json: Path | None = None
    """Write all results to this file too."""


def evaluate(
    run: Restored, options: Options, settings: TrajectoryOptions, data_dir: str, limit: int
) -> tuple[TrajectoryEvaluation, float]:
    """Returns the result and the seconds of an evaluation after the one that compiles."""
    task, puzzles = puzzle_task(run), load_mixture(data_dir, "test")
    evaluator = task.trajectory_evaluator(run.objective, Devices(), puzzles, settings, batch_size=options.batch_size)
    evaluator(run.state, limit=1)
    start = time.perf_counter()
    result = evaluator(run.state, limit=limit)
    return result, time.perf_counter() - start


def best_settings(options: Options, results: dict[float, list[TrajectoryEvaluation]]) -> list[TrajectoryOptions]:
    """Returns, for each number of trajectories, the best noise and depth; of equal ones the cheapest."""
    name, first = f"{options.choose}/best", next(iter(results.values()))[0]
    chosen = []
    for place, count in enumerate(first.trajectories):
        means = {
            (noise, depth): statistics.mean(float(each.shares[name][place, number]) for each in of_noise)
            for noise, of_noise in results.items()
            for number, depth in enumerate(first.depths)
        }
        noise, depth = max(means, key=lambda key: (means[key], -key[1]))
        chosen.append(TrajectoryOptions(count, noise, depth, options.choose))
    return chosen


def main(options: Options) -> None:
    runs = [restore(path) for path in options.runs]
    results: dict[float, list[TrajectoryEvaluation]] = {}
    for noise in options.noises:
        settings = TrajectoryOptions(options.trajectories, noise, options.depth, options.choose)
        results[noise] = [
            evaluate(run, options, settings, options.validation, options.validation_puzzles)[0] for run in runs
        ]
        shown = ", ".join(f"{each.evaluation.metrics['exact_accuracy']:.4f}" for each in results[noise])
        print(f"validation, noise {noise:g}, {options.trajectories} x {options.depth}: {shown}", flush=True)
    rows: list[dict[str, Any]] = []
    limit = puzzle_task(runs[0]).halt_max_steps
    tested = [TrajectoryOptions(1, 0.0, limit, options.choose), *best_settings(options, results)]
    print("\ntrajectories  noise  depth  ACT steps   exact (95 %)             last step   pass@K  seconds")
    for settings in tested:
        for path, run in zip(options.runs, runs, strict=True):
            result, seconds = evaluate(run, options, settings, options.test, options.test_puzzles)
            metrics = result.evaluation.metrics
            last = result.exact_accuracy(f"{options.choose}/last")
            passed = result.exact_accuracy("pass/best")
            low, high = interval(round(metrics["exact_accuracy"] * metrics["count"]), round(metrics["count"]))
            print(
                f"{settings.trajectories:>12}  {settings.noise:>5g}  {settings.depth:>5}  {settings.act_steps:>9}   "
                f"{metrics['exact_accuracy']:.4f} ({low:.4f}-{high:.4f})  {last:>10.4f}  {passed:>7.4f}  "
                f"{seconds:>7.1f}  {path}",
                flush=True,
            )
            rows.append({"run": path, **dataclasses.asdict(settings), **metrics, "last": last, "seconds": seconds})
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options))
