"""Exact accuracy of every architecture after equal numbers of steps on the same small Sudokus, as a table.

    python -m benchmarks.architectures [--steps N] [--seed N] [--only NAME …] [--markdown FILE]

4x4 Sudokus, half the cells empty: 500 for training with 30 symmetries each, 250 for the test, none of them a symmetry
of a training puzzle. All models have 128 channels, four ACT steps and one block per level (the transformer, with one
level, has two blocks); recursion and halting are those of the architecture. `exact` is the share of test puzzles solved
with EMA weights. Attention has learned positions; rows with "MLP mixer" mix positions by an MLP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from train_jax.puzzles.sudoku.data import SudokuData
from train_jax.run.config import RunConfig, with_model
from train_jax.run.presets import preset
from train_jax.trainer.loop import train

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "trm, MLP mixer": ("trm", {"mlp_t": True, "pos_encodings": "none"}),
    "trm": ("trm", {}),
    "trm_singlez": ("trm_singlez", {}),
    "trm_hier6, MLP mixer": ("trm_hier6", {"mlp_t": True, "pos_encodings": "none", "L_cycles": 6}),
    "hrm": ("hrm", {"H_layers": 1}),
    "transformer": ("transformer", {"H_layers": 2}),
}
"""Maps a row of the table to its architecture and the fields in which it differs from the other rows."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Train every architecture for equal steps and print the table."""

    steps: int = 1000
    """Optimizer steps; the learning rate follows a cosine to the last of them."""
    seed: int = 0
    """Seed of weights, batches and exploration; the puzzles do not change."""
    only: tuple[str, ...] = ()
    """Rows to compute, by name; all by default."""
    markdown: Path | None = None
    """Also write the table to this file, with date, machine and command."""


class Row(NamedTuple):
    """The result of one run."""

    name: str
    parameters: int
    exact: dict[int, float]
    """Exact accuracy by optimizer step."""
    step_milliseconds: float
    """Median time of a step in milliseconds, without compilation and evaluation."""
    train_seconds: float
    """Seconds of training, with compilation and without evaluation."""
    machine: dict[str, Any]
    """Processor, cores and versions."""


def run_config(name: str, folder: Path, options: Benchmark) -> RunConfig:
    """Returns the configuration of the run of one row."""
    model, own = ARCHITECTURES[name]
    base = preset("sudoku6")
    arch = {
        "mlp_t": False,
        "pos_encodings": "learned",
        "num_heads": 4,
        "halt_max_steps": 4,
        "halt_exploration_prob": 0.3,
    }
    shared = dataclasses.replace(
        base,
        arch=dataclasses.replace(base.arch, **arch),
        optim=dataclasses.replace(base.optim, lr=1e-3, weight_decay=0.1),
    )
    config = with_model(shared, model)
    return dataclasses.replace(
        config,
        arch=dataclasses.replace(config.arch, **own),
        data_dir=str(folder / "data"),
        run_dir=str(folder / name.replace(", ", "-").replace(" ", "-")),
        steps=options.steps,
        seed=options.seed,
        eval_every_steps=max(options.steps // 4, 1),
        eval_examples=0,
        checkpoint_every_steps=options.steps,
        wandb="disabled",
    )


def measure(name: str, folder: Path, options: Benchmark) -> Row:
    config = run_config(name, folder, options)
    figures = train(config)
    run = Path(config.run_dir)
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    machine = json.loads((run / "machine.json").read_text())
    return Row(
        name,
        machine["parameters"],
        {r["step"]: r["eval/exact_accuracy"] for r in records if "eval/exact_accuracy" in r},
        1000 * statistics.median(r["step_seconds"] for r in records if r.get("step_seconds", 0) > 0),
        figures["train_seconds"],
        machine,
    )


def table(rows: list[Row]) -> str:
    steps = sorted(rows[0].exact)
    head = ["architecture", "parameters", *(f"exact at {step}" for step in steps), "ms/step", "seconds"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for row in rows:
        exact = [f"{row.exact[step]:.3f}" for step in steps]
        cells = [row.name, f"{row.parameters:,}", *exact, f"{row.step_milliseconds:.0f}", f"{row.train_seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def heading(options: Benchmark, machine: dict[str, Any]) -> str:
    arguments = f"--steps {options.steps} --seed {options.seed}"
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "jax"))
    return (
        f"`python -m benchmarks.architectures {arguments}`; {datetime.date.today()}, {machine['cores']} cores of "
        f"{machine['processor']}, {versions}"
    )


def main(options: Benchmark) -> None:
    if unknown := set(options.only) - set(ARCHITECTURES):
        raise SystemExit(f"no row {', '.join(unknown)}; use one of {', '.join(map(repr, ARCHITECTURES))}")
    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        SudokuData(output_dir=Path(folder) / "data", size=4, num_aug=30).build()
        for name in options.only or ARCHITECTURES:
            rows.append(measure(name, Path(folder), options))
            print(table(rows))
    text = f"{heading(options, rows[-1].machine)}\n\n{table(rows)}\n"
    print(text, end="")
    if options.markdown is not None:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
