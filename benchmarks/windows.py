"""Measures a TRM train step on large grids, with attention in a window and with full attention.

    python -m benchmarks.windows [--sides 30 50] [--windows 0 7]

The model has one block and one H-cycle of two L-cycles, in float32. FLOPs, memory accesses and temporary memory are
estimates of the compiler. Milliseconds are medians; the windows of one grid alternate in one process.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import tyro

from benchmarks.example_puzzles import ExamplePuzzles, example_run
from models_torch.trm import TRMConfig
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure attention windows."""

    sides: tuple[int, ...] = (30, 50)
    """Numbers of rows of the grids."""
    windows: tuple[int, ...] = (0, 7)
    """Width of the attention window in cells; 0 for full attention."""
    batch_size: int = 2
    """Grids in a batch."""
    hidden_size: int = 128
    """Number of channels; heads have 32 channels."""
    rounds: int = 5
    """Number of timed steps of each variant."""


class Step:
    """A train step on one grid size with one window, on one device."""

    def __init__(self, options: Options, side: int, window: int):
        config = TRMConfig(
            batch_size=options.batch_size,
            seq_len=side**2,
            vocab_size=6,
            num_puzzle_identifiers=2,
            hidden_size=options.hidden_size,
            num_heads=options.hidden_size // 32,
            mlp_multiple_of=32,
            attention_window=window,
            L_layers=1,
            H_cycles=1,
            L_cycles=2,
            puzzle_emb_ndim=options.hidden_size,
            forward_dtype="float32",
        )
        run, devices = example_run("trm", config, steps=1000), Devices(1)
        training = start(run, ExamplePuzzles(run), devices)
        batch, state = training.batches.at(0), training.initial_state()
        carry = training.initial_carry(state, batch)
        self._rest = devices.shard(batch), devices.random_key(0)
        self._state: tuple[Any, Any] = devices.replicate(state), devices.shard(carry)
        self._program: Any = training.parallel_step().lower(*self._state, *self._rest).compile()

    def counted(self) -> tuple[float, float, float]:
        """Returns GFLOP, gigabytes accessed and MiB of temporary memory."""
        cost, memory = self._program.cost_analysis(), self._program.memory_analysis()
        return cost["flops"] / 1e9, cost["bytes accessed"] / 1e9, memory.temp_size_in_bytes / 2**20

    def milliseconds(self) -> float:
        start = time.perf_counter()
        state, carry, _ = self._program(*self._state, *self._rest)
        self._state = jax.block_until_ready((state, carry))
        return 1e3 * (time.perf_counter() - start)


def main(options: Options) -> None:
    print("| grid | window | GFLOP | GB accessed | MiB temporary | ms per step |\n|---|---|---|---|---|---|")
    for side in options.sides:
        steps = [Step(options, side, window) for window in options.windows]
        times = [[step.milliseconds() for step in steps] for _ in range(options.rounds + 1)][1:]
        for window, step, column in zip(options.windows, steps, zip(*times, strict=True), strict=True):
            flops, accessed, memory = step.counted()
            name = f"{window}x{window}" if window else "all"
            print(
                f"| {side}x{side} | {name} | {flops:.1f} | {accessed:.2f} | {memory:.0f} | "
                f"{statistics.median(column):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
