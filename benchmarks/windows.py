"""Attention in a window beside full attention on large grids: what a train step of TRM costs.

    python -m benchmarks.windows [--sides 30 50] [--windows 0 7]

One block, one H-cycle of two L-cycles, float32. Arithmetic, memory accesses and the memory that a step takes beside its
arguments are counted by the compiler; milliseconds are medians, the windows of one grid take turns in one process.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import torch
import tyro

import bridge
from models_torch.registry import build, example_batch
from models_torch.trm import TRMConfig
from train_jax.core.objective import objective_of
from train_jax.core.state import new_learner
from train_jax.core.step import make_train_step
from train_jax.optim.optimizer import dense_optimizer
from train_jax.run.config import OptimConfig
from train_jax.runtime.devices import Devices


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure attention windows."""

    sides: tuple[int, ...] = (30, 50)
    """Cells on a side of the grids."""
    windows: tuple[int, ...] = (0, 7)
    """Cells on a side of what a cell sees; 0 for all."""
    batch_size: int = 2
    """Grids in a step."""
    hidden_size: int = 128
    """Channels; heads have 32 of them."""
    rounds: int = 5
    """Steps of each that are timed."""


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
        torch.manual_seed(0)
        objective = objective_of(bridge.export(build("trm", config)))
        optim, devices, size = OptimConfig(), Devices(1), options.batch_size
        optimizer = dense_optimizer(optim, 1000)
        step = make_train_step(objective, optimizer, optim, total_steps=1000, global_batch_size=size, device_count=1)
        batch = devices.split({k: v.numpy() for k, v in example_batch(config, size, seed=0).items()})
        learner = devices.replicate(new_learner(objective.params, objective.buffers, optimizer))
        carry = devices.for_each(objective.initial_carry)(learner.params, learner.buffers, batch)
        self._rest = devices.spread(batch), devices.key(0)
        self._state: tuple[Any, Any] = learner, devices.spread(carry)
        self._program: Any = devices.train(step).lower(*self._state, *self._rest).compile()

    def counted(self) -> tuple[float, float, float]:
        """GFLOP, gigabytes accessed, megabytes of memory beside the arguments."""
        cost, memory = self._program.cost_analysis(), self._program.memory_analysis()
        return cost["flops"] / 1e9, cost["bytes accessed"] / 1e9, memory.temp_size_in_bytes / 2**20

    def milliseconds(self) -> float:
        start = time.perf_counter()
        learner, carry, _ = self._program(*self._state, *self._rest)
        self._state = jax.block_until_ready((learner, carry))
        return 1e3 * (time.perf_counter() - start)


def main(options: Options) -> None:
    print("| grid | window | GFLOP | GB accessed | MiB beside arguments | ms a step |\n|---|---|---|---|---|---|")
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
