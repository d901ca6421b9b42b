"""Times the train step and the evaluation step of TRM: PyTorch eager, `torch.compile`, hand-written JAX, the bridge.

    python -m benchmarks.step [--sizes sudoku9 attention mixer] [--phases train evaluate] [--json FILE]
    python -m benchmarks.step --sizes baseline --batch-size 768       # on a GPU

All sides have the same weights, batch and optimizer, and each runs in a process of its own. They take turns, a few
steps at a time, so that other load affects all of them; only one computes at a time. The hand-written JAX only trains.
Milliseconds are medians over the rounds, ratios are medians of the ratios within a round. The losses of all sides have
to agree. `torch.compile` needs a C++ compiler. FLOPs are those of the matrix products, and MFU is the share of the
device's bfloat16 peak that they reach. On a CPU, use a quiet machine: the threads of PyTorch wait for each other.

With `--compare FILE`, the JSON of an earlier run on the same machine, every step that became slower is named, and the
exit status is 1; so it is in the other benchmarks that have it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from benchmarks import tables
from benchmarks.step_sides import START, Case, Compiled, Phase, Side
from models_torch.registry import build
from models_torch.trm import TRMConfig

Size = Literal["sudoku9", "attention", "mixer", "baseline"]
SUDOKU = {"seq_len": 81, "vocab_size": 11, "num_puzzle_identifiers": 1, "halt_exploration_prob": 0.0}
"""Configuration of the data; without exploration, no random number changes a result."""
SMALL = SUDOKU | {"hidden_size": 128, "puzzle_emb_ndim": 128, "forward_dtype": "float32"}
ATTENTION = {"mlp_t": False, "pos_encodings": "rope"}
MIXER = {"mlp_t": True, "pos_encodings": "none"}
SPEEDRUN = {"L_layers": 1, "H_cycles": 2, "L_cycles": 2, "mlp_multiple_of": 16, "puzzle_emb_len": 1,
            "halt_max_steps": 5, "loss_type": "softmax_cross_entropy"}  # fmt: skip
SIZES: dict[Size, tuple[dict[str, Any], int]] = {
    "sudoku9": (SMALL | MIXER | SPEEDRUN, 32),
    "attention": (SMALL | ATTENTION, 64),
    "mixer": (SMALL | MIXER, 64),
    "baseline": (SUDOKU | ATTENTION | {"forward_dtype": "bfloat16"}, 768),
}
"""Fields of the architecture and the batch size: the preset of the speedrun; hidden size 128 with the depth of the
published model, with attention and with the mixer; the published size."""
SIDES: tuple[Side, ...] = ("eager", "compiled", "by hand", "bridge")
TITLES = {"eager": "PyTorch", "compiled": "torch.compile", "by hand": "jax.numpy by hand", "bridge": "bridge"}
RIVALS = ("eager", "compiled")
"""Sides whose times are compared with the others in columns of ratios."""


@dataclasses.dataclass(frozen=True)
class Options(tables.Files):
    """Time train and evaluation steps side by side."""

    sizes: tuple[Size, ...] = ("sudoku9", "attention", "mixer")
    """Models to time."""
    phases: tuple[Phase, ...] = ("train", "evaluate")
    """Steps to time."""
    sides: tuple[Side, ...] = SIDES
    """Implementations to time."""
    rounds: int = 7
    """Number of rounds of every side."""
    round_seconds: float = 2.0
    """Approximate length of a round in seconds; at least one step."""
    batch_size: int = 0
    """Examples in a step; 0 uses that of the size."""
    cpu_examples: int = 4
    """`--compute.cpu-examples` of the JAX sides, on a CPU."""
    cpu_devices: int = 0
    """Virtual devices of the JAX sides on a CPU; 0 for one, or with `--cpu-examples` one for each core."""
    mlp: Literal["plain", "fused"] = "fused"
    """`--compute.mlp` of the bridge."""
    torch_compile: Compiled = "module"
    """Scope of `torch.compile`: the module, or the stack of blocks that it calls again and again."""


@dataclasses.dataclass
class Result:
    """The measurements of one side."""

    size: str
    phase: str
    side: str
    facts: dict[str, Any]
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Seconds of a step in each round."""
    losses: list[float] = dataclasses.field(default_factory=list)
    memory: int = 0

    @property
    def name(self) -> str:
        return f"{self.size} {self.phase} {self.side}"

    @property
    def milliseconds(self) -> float:
        return 1000 * statistics.median(self.seconds)


class SideProcess:
    """The process of a side."""

    def __init__(self, side: Side, phase: Phase, folder: Path):
        command = [sys.executable, "-m", "benchmarks.step_sides", side, phase, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with status {self._process.wait()}")
        return json.loads(line)

    def run(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        self._process.communicate()


def measure(size: Size, phase: Phase, options: Options) -> list[Result]:
    """Measures all sides of one step."""
    fields, batch_size = SIZES[size]
    batch_size = options.batch_size or batch_size
    case = Case(
        arch=fields | {"batch_size": batch_size},
        optim={"lr": 1e-4, "warmup_steps": 0},
        batch_size=batch_size,
        cpu_examples=options.cpu_examples,
        cpu_devices=options.cpu_devices,
        mlp=options.mlp,
        torch_compile=options.torch_compile,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case)))
        torch.manual_seed(0)
        torch.save(build("trm", TRMConfig(**case.arch)).state_dict(), folder / START)
        sides: list[Side] = [side for side in options.sides if phase == "train" or side != "by hand"]
        processes = [SideProcess(side, phase, folder) for side in sides]
        results = [Result(size, phase, side, process.facts) for side, process in zip(sides, processes, strict=True)]
        slowest = max(process.run(1)["seconds"] for process in processes)
        steps = max(1, round(options.round_seconds / slowest))
        for _ in range(options.rounds):
            for result, process in zip(results, processes, strict=True):
                turn = process.run(steps)
                result.seconds.append(turn["seconds"])
                result.losses.append(turn["loss"])
                result.memory = turn["memory"]
        for process in processes:
            process.end()
    rounded = case.arch["forward_dtype"] == "bfloat16"
    amplified = size == "mixer"
    check_losses(
        results,
        2e-2 if rounded or (amplified and phase == "evaluate") else 1e-3,
        2e-2 if rounded or amplified else 1e-3,
    )
    return results


def check_losses(results: Sequence[Result], of_first_step: float, of_others: float) -> None:
    """Raises SystemExit if a side does not compute what the first one does, to these relative differences.

    The deep MLP mixer makes rounding differences ten times as large in two steps. So its later losses agree less, and
    so does that of an evaluation, which is many ACT steps.
    """
    first = results[0]
    for result in results[1:]:
        ours, theirs = ([each.facts["first_loss"], *each.losses] for each in (first, result))
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not abs(one - other) <= (of_others if index else of_first_step) * abs(one):
                raise SystemExit(f"{result.name}: loss {other:.6g}, {first.side} has {one:.6g}")


def cells(result: Result, results: Sequence[Result]) -> list[str]:
    """Returns the row of a side in the table of all `results` of a step."""
    seconds = statistics.median(result.seconds)
    facts = result.facts
    ratios = [
        f"{statistics.median(a / b for a, b in zip(result.seconds, other.seconds, strict=True)):.2f}"
        for other in results
        if other.side in RIVALS
    ]
    flops = max(other.facts["flops"] for other in results)
    share = f"{100 * flops / seconds / facts['peak_flops']:.0f} %" if facts["peak_flops"] else "-"
    span = f"{1000 * min(result.seconds):.1f} to {1000 * max(result.seconds):.1f}"
    return [
        result.size, result.phase, TITLES[result.side], f"{result.milliseconds:.1f}", span, *ratios,
        f"{flops / 1e9:.1f}", f"{flops / seconds / 1e9:.0f}", share, f"{result.memory / 1e9:.2f}",
        f"{facts['first_step_s']:.1f}",
    ]  # fmt: skip


def titles(sides: Sequence[Side]) -> list[str]:
    ratios = [f"x {TITLES[side]}" for side in sides if side in RIVALS]
    return ["size", "step", "side", "ms", "range", *ratios, "GFLOP", "GFLOP/s", "MFU", "GB", "first step, s"]


def main(options: Options) -> int:
    before = tables.figures_before(options)
    print(tables.header(titles(options.sides)), flush=True)
    everything: list[Result] = []
    for size in options.sizes:
        for phase in options.phases:
            results = measure(size, phase, options)
            for result in results:
                print(tables.row(cells(result, results)), flush=True)
            everything += results
    figures = {f"{result.name}, ms": result.milliseconds for result in everything}
    details = [dataclasses.asdict(result) for result in everything]
    return tables.finish(options, figures, before, everything[-1].facts["device"], results=details)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
