"""Trains a finished language run again in plain PyTorch, from the same weights and on the same batches, and compares.

    trm train chat-tiny                       # data/text-1024, as in docs/language.md
    python -m benchmarks.language runs/chat-tiny [--json FILE]

PyTorch trains eagerly, in a process of its own, for as many steps as the run, and evaluates all held-out tokens. The
run has to have the groups, rules and schedule of `chat-tiny` and `chat-small`; sizes and rates are free.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks import tables
from benchmarks.trajectory_runs import environment
from train_jax.run.folder import find_run

TITLES = ("side", "bits per byte", "loss per token", "held-out tokens", "training, s")
CLOSE = 0.01
"""Largest expected difference in bits per byte."""


@dataclasses.dataclass(frozen=True)
class Options(tables.Files):
    """Train a finished language run again in plain PyTorch and compare."""

    run_dir: Annotated[str, tyro.conf.Positional] = "runs/chat-tiny"
    """A finished run."""


def in_pytorch(run_dir: str) -> dict[str, Any]:
    """Returns `figures`, `losses` and `seconds` of PyTorch, and prints its progress."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "torch.json"
        command = [sys.executable, "-m", "benchmarks.torch_language", run_dir, str(out)]
        subprocess.run(command, env=environment(), check=True)
        return json.loads(out.read_text())


def main(options: Options) -> int:
    before = tables.figures_before(options)
    folder = find_run(options.run_dir)
    ours = json.loads(folder.evaluation("test").read_text())
    theirs = in_pytorch(options.run_dir)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    seconds = json.loads(folder.finished.read_text()).get("train_seconds")
    print(tables.header(TITLES))
    for side, figures, taken in (("JAX", ours, seconds), ("PyTorch", theirs["figures"], theirs["seconds"])):
        cells = [f"{figures['bits_per_byte']:.4f}", f"{figures['loss']:.4f}", f"{figures['tokens']:,.0f}"]
        print(tables.row([side, *cells, f"{taken:.0f}" if taken else ""]))
    for name, value in ours.get("compressed", {}).items():
        print(tables.row([name, f"{value:.4f}", "", "", ""]))
    difference = ours["bits_per_byte"] - theirs["figures"]["bits_per_byte"]
    print(f"\nJAX minus PyTorch: {difference:+.4f} bits per byte, expected within {CLOSE}")
    figures = {"JAX, bits per byte": ours["bits_per_byte"]}
    status = tables.finish(options, figures, before, "host", ours=ours, theirs=theirs, metrics=lines)
    return status or int(abs(difference) > CLOSE)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
