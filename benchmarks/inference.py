"""Counts the ACT steps a second of evaluation: to the limit, with early halting, and with halting and refill.

    python -m benchmarks.inference RUN [--halt-threshold 0.5] [--json FILE] [--compare FILE]   # the test set of a run
    python -m benchmarks.inference [--sizes sudoku9 attention]                               # untrained, random puzzles
    python -m benchmarks.inference --sizes baseline --batch-size 768                         # on a GPU

The evaluators compute the same puzzles on all devices of this process, after a call that compiles, in turns; seconds
are medians. `ACT steps/s` counts the steps that the devices computed, with those of rows that had halted or were
idle; `useful ACT steps/s` only the steps of a puzzle until it halts. Untrained models do not halt: there, refill
shows what its program costs. The published evaluation of EqR, 33.6 h on 8 GPUs, comes to about 3 600 ACT steps a
second and GPU, with another model (hidden 512) on other hardware.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks import tables
from benchmarks.example_puzzles import ExamplePuzzles, example_run
from benchmarks.step import SIZES, Size
from models_torch.trm import TRMConfig
from train_jax.puzzles.evaluation import Evaluator
from train_jax.puzzles.format import PuzzleSet
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.solving import puzzle_task
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start

EQR_STEPS_PER_SECOND = 3600
"""Published speed of another implementation, EqR, on one GPU."""
MODES = ("to the limit", "halting", "refill")
TITLES = ("model", "batch", "evaluation", "puzzles", "ACT steps of a puzzle", "seconds", "puzzles/s", "ACT steps/s",
          "useful ACT steps/s", f"useful / {EQR_STEPS_PER_SECOND:,} of EqR on a GPU")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(tables.Files):
    """Count the ACT steps per second of evaluation."""

    run_dir: Annotated[str, tyro.conf.Positional] = ""
    """A trained run; without one, untrained models of `--sizes`."""
    halt_threshold: float = 0.5
    """A puzzle halts above this halting probability."""
    sizes: tuple[Size, ...] = ("sudoku9", "attention")
    """Untrained models."""
    batch_size: int = 0
    """Examples per batch; 0 uses that of the run, or that of the size."""
    batches: int = 4
    """Batches of random puzzles."""
    puzzles: int = 0
    """Number of test puzzles of a run, the first ones; 0 uses all."""
    rounds: int = 3
    """Measured evaluations of each kind."""


def of_run(options: Options) -> dict[str, Any]:
    """Measures the test set of a run."""
    run = restore(options.run_dir)
    task, devices = puzzle_task(run), Devices()
    size = options.batch_size or run.config.eval_batch_size
    thresholds = {"to the limit": None, "halting": options.halt_threshold, "refill": options.halt_threshold}
    evaluators = {
        mode: task.evaluator(run.objective, devices, batch_size=size, halt_threshold=threshold, refill=mode == "refill")
        for mode, threshold in thresholds.items()
    }
    arch: Any = run.config.arch
    return measured(evaluators, run.state, arch.halt_max_steps, options) | {"model": options.run_dir, "batch": size}


def of_size(size: Size, options: Options) -> dict[str, Any]:
    """Measures an untrained model on random puzzles."""
    fields, batch = SIZES[size]
    devices, batch = Devices(), options.batch_size or batch
    arch = TRMConfig(**fields, batch_size=batch)
    config = example_run("trm", arch, steps=1, eval_batch_size=batch)
    training = start(config, ExamplePuzzles(config), devices)
    puzzles = random_puzzles(arch, batch * options.batches)
    limit = arch.halt_max_steps
    common: dict[str, Any] = {"max_steps": limit, "batch_size": batch}
    evaluators = {
        "to the limit": Evaluator(training.objective, puzzles, devices, **common),
        "halting": Evaluator(training.objective, puzzles, devices, halt_threshold=options.halt_threshold, **common),
        "refill": Evaluator(
            training.objective, puzzles, devices, halt_threshold=options.halt_threshold, refill=True, **common
        ),
    }
    result = measured(evaluators, training.initial_state(), limit, options)
    return result | {"model": f"{size}, untrained", "batch": batch}


def random_puzzles(arch: Any, count: int) -> PuzzleSet:
    metadata = Metadata(arch.seq_len, arch.vocab_size, 0, 0, 0, 1, count, 1.0, count, ("all",))
    tokens = np.random.default_rng(0).integers(1, arch.vocab_size, (count, arch.seq_len), dtype=np.uint8)
    ends = np.arange(count + 1, dtype=np.int32)
    return PuzzleSet(metadata, tokens, tokens, np.zeros(count, np.int32), ends, ends)


def measured(evaluators: Mapping[str, Any], state: Any, limit: int, options: Options) -> dict[str, Any]:
    """Returns puzzles, ACT steps and seconds of each evaluator; `limit` is the number of ACT steps without halting."""
    results = {mode: evaluator(state, limit=options.puzzles).metrics for mode, evaluator in evaluators.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in evaluators}
    for _ in range(options.rounds):
        for mode, evaluator in evaluators.items():
            begun = time.perf_counter()
            evaluator(state, limit=options.puzzles)
            seconds[mode].append(time.perf_counter() - begun)
    rows = {
        mode: {
            "puzzles": metrics["count"],
            "steps": metrics["steps"] if "computed_steps" in metrics else float(limit),
            "computed": metrics.get("computed_steps", float(limit)),
            "seconds": statistics.median(seconds[mode]),
        }
        for mode, metrics in results.items()
    }
    return {"rows": rows}


def cells(result: Mapping[str, Any], mode: str) -> list[str]:
    """Returns the row of an evaluation."""
    row = result["rows"][mode]
    per_second = row["puzzles"] / row["seconds"]
    useful = per_second * row["steps"]
    return [
        result["model"], str(result["batch"]), mode, f"{row['puzzles']:.0f}", f"{row['steps']:.2f}",
        f"{row['seconds']:.2f}", f"{per_second:,.1f}", f"{per_second * row['computed']:,.0f}", f"{useful:,.0f}",
        f"{useful / EQR_STEPS_PER_SECOND:.3f}",
    ]  # fmt: skip


def main(options: Options) -> int:
    before, figures, everything = tables.figures_before(options), {}, []
    print(tables.header(TITLES), flush=True)
    for size in [None] if options.run_dir else options.sizes:
        result = of_run(options) if size is None else of_size(size, options)
        everything.append(result)
        for mode in MODES:
            print(tables.row(cells(result, mode)), flush=True)
            figures[f"{result['model']}, {mode}, s"] = result["rows"][mode]["seconds"]
    return tables.finish(options, figures, before, Devices().kind, results=everything)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
