"""Measures early halting with and without refill: seconds and ACT steps for the test set of a trained run.

    python -m benchmarks.refill RUN [--halt-threshold 0.5] [--rounds 3] [--json FILE]

Both evaluators compute the same puzzles in one process and alternate. Compilation is not measured. Seconds are medians
over the rounds; the command fails if the answers differ.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from train_jax.puzzles.solving import puzzle_task
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure early halting with and without refill."""

    run_dir: Annotated[str, tyro.conf.Positional]
    halt_threshold: float = 0.5
    batch_size: int = 0
    """Examples per batch; 0 uses that of the run."""
    rounds: int = 3
    json: Path | None = None
    """Write the results to this file too."""


def measure(options: Options) -> dict[str, Any]:
    run = restore(options.run_dir)
    task, devices = puzzle_task(run), Devices()
    evaluators = {
        name: task.evaluator(
            run.objective,
            devices,
            batch_size=options.batch_size,
            halt_threshold=options.halt_threshold,
            refill=name == "refill",
        )
        for name in ("halting", "refill")
    }
    results = {name: evaluator(run.state) for name, evaluator in evaluators.items()}
    different = int((results["halting"].predictions != results["refill"].predictions).any(axis=(0, 2)).sum())
    seconds: dict[str, list[float]] = {name: [] for name in evaluators}
    for _ in range(options.rounds):
        for name, evaluator in evaluators.items():
            start = time.perf_counter()
            evaluator(run.state)
            seconds[name].append(time.perf_counter() - start)
    names = ("count", "exact_accuracy", "steps", "computed_steps")
    rows = {
        name: {metric: result.metrics[metric] for metric in names} | {"seconds": statistics.median(seconds[name])}
        for name, result in results.items()
    }
    ratios = {metric: rows["refill"][metric] / rows["halting"][metric] for metric in ("seconds", "computed_steps")}
    return {"devices": devices.kind, "rows": rows, "ratios": ratios, "different_answers": different}


def main(options: Options) -> None:
    result = measure(options)
    print(f"{options.run_dir}, {result['devices']}, halting at a probability above {options.halt_threshold:g}")
    print(f"{'':<10}{'puzzles':>8}{'exact':>9}{'ACT steps':>11}{'computed':>10}{'seconds':>9}")
    for name, row in result["rows"].items():
        print(
            f"{name:<10}{row['count']:>8.0f}{row['exact_accuracy']:>9.4f}{row['steps']:>11.2f}"
            f"{row['computed_steps']:>10.2f}{row['seconds']:>9.2f}"
        )
    print(f"{'ratio':<10}{'':>28}{result['ratios']['computed_steps']:>10.3f}{result['ratios']['seconds']:>9.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    if result["different_answers"]:
        raise SystemExit(f"the answers to {result['different_answers']} puzzles differ")


if __name__ == "__main__":
    main(tyro.cli(Options))
