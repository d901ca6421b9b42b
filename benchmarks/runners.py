"""Measures `pmap` and `jit(shard_map)` with one and with eight steps per dispatch: milliseconds per step of a tiny TRM.

    python -m benchmarks.runners [--devices 1 8] [--steps 64]

The model is so small that nearly all of the time is overhead. For each number of devices (virtual devices on a CPU),
the variants alternate in one process; the results are medians over the rounds.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import tyro


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure the runners."""

    devices: tuple[int, ...] = (1, 8)
    """Numbers of devices, each in a separate process; virtual devices on a CPU."""
    steps: int = 64
    """Number of steps in a round."""
    rounds: int = 7
    """Number of rounds of every variant."""
    here: bool = False
    """Measure in this process, on its devices."""


VARIANTS = [(runner, dispatch) for dispatch in (1, 8) for runner in ("pmap", "shard_map")]


def make_round(runner: Any, dispatch: int, steps: int) -> Callable[[], float]:
    """Returns a function that runs `steps` steps, `dispatch` per dispatch, and returns the milliseconds per step."""
    import jax

    from benchmarks.example_puzzles import ExamplePuzzles, example_run
    from train_jax.run.config import ComputeConfig
    from train_jax.run.presets import preset
    from train_jax.runtime.devices import Devices
    from train_jax.trainer.start import start

    devices, config = Devices(runner=runner), preset("tiny")
    size = 2 * devices.count
    arch = dataclasses.replace(config.arch, batch_size=size, seq_len=16, vocab_size=6, num_puzzle_identifiers=5)
    every = {name: 8 for name in ("eval_every_steps", "checkpoint_every_steps", "log_every_steps")}
    compute = ComputeConfig(runner=runner, steps_per_dispatch=dispatch)
    run = example_run("trm", arch, optim=config.optim, compute=compute, steps=1000, **every)
    training = start(run, ExamplePuzzles(run), devices)
    program, batches = training.parallel_step(), training.batches
    initial = training.initial_state()
    carry = training.initial_carry(initial, batches.at(0))
    state = devices.replicate(initial), devices.shard(carry)
    batch, key = devices.shard(batches.from_step(0)), devices.random_key(0)

    def run_round() -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(steps // dispatch):
            *after, metrics = program(*state, batch, key)
            state = tuple(after)
            devices.limit_dispatch([metrics])
        jax.block_until_ready(state)
        return 1e3 * (time.perf_counter() - begin) / steps

    return run_round


def measure(options: Options) -> None:
    import jax

    rounds = [make_round(runner, dispatch, options.steps) for runner, dispatch in VARIANTS]
    times = [[run_round() for run_round in rounds] for _ in range(options.rounds + 1)][1:]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    print(
        f"| {jax.device_count()} x {jax.devices()[0].device_kind} | " + " | ".join(f"{m:.2f}" for m in medians) + " |"
    )


def main(options: Options) -> None:
    if options.here:
        measure(options)
        return
    print("| devices | " + " | ".join(f"{r}, {t} per dispatch" for r, t in VARIANTS) + " |")
    print("|---" * (len(VARIANTS) + 1) + "|", flush=True)
    for count in options.devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        command = [sys.executable, "-m", "benchmarks.runners", "--here", "--steps", str(options.steps)]
        subprocess.run([*command, "--rounds", str(options.rounds)], check=True, env=os.environ | {"XLA_FLAGS": flags})


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
