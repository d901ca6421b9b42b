"""`pmap` beside `jit(shard_map)`, one step a dispatch beside several: milliseconds a step of a tiny TRM.

    python -m benchmarks.runners [--devices 1 8] [--steps 64]

The model is so small that what is measured is what a step costs beside the arithmetic. The variants take turns in one
process for each number of devices (virtual ones on a CPU); figures are medians of the rounds.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import tyro


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure what spreads a step over devices."""

    devices: tuple[int, ...] = (1, 8)
    """Numbers of devices, each in a process of its own; virtual ones on a CPU."""
    steps: int = 64
    """Steps in a round."""
    rounds: int = 7
    """Rounds of every variant."""
    here: bool = False
    """Measure in this process, on the devices it has."""


VARIANTS = [(runner, together) for together in (1, 8) for runner in ("pmap", "shard_map")]


def round_of(runner: Any, together: int, steps: int) -> Any:
    """A function that takes so many steps and returns the milliseconds of one."""
    import jax
    import numpy as np
    import torch

    import bridge
    from models_torch.registry import build, example_batch
    from train_jax.core.objective import objective_of
    from train_jax.core.state import new_learner
    from train_jax.core.step import make_train_step, several_steps
    from train_jax.optim.optimizer import dense_optimizer
    from train_jax.run.config import PRESETS
    from train_jax.runtime.devices import Devices

    devices, config = Devices(runner=runner), PRESETS["tiny"]
    arch = dataclasses.replace(config.arch, batch_size=2, seq_len=16, vocab_size=6, num_puzzle_identifiers=5)
    torch.manual_seed(0)
    objective = objective_of(bridge.export(build("trm", arch)))
    optimizer, size = dense_optimizer(config.optim, 1000), 2 * devices.count
    step = make_train_step(
        objective, optimizer, config.optim, total_steps=1000, global_batch_size=size, device_count=devices.count
    )
    program = devices.train(step if together == 1 else several_steps(step))
    batch = devices.split({k: v.numpy() for k, v in example_batch(arch, size, seed=0).items()})
    learner = devices.replicate(new_learner(objective.params, objective.buffers, optimizer))
    carry = devices.for_each(objective.initial_carry)(learner.params, learner.buffers, batch)
    stacked = batch if together == 1 else {k: np.stack([v] * together, axis=1) for k, v in batch.items()}
    state, placed, key = (learner, devices.spread(carry)), devices.spread(stacked), devices.key(0)

    def take() -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps // together):
            learner, carry, metrics = program(*state, placed, key)
            state = learner, carry
            devices.keep_pace([metrics])
        jax.block_until_ready(state)
        return 1e3 * (time.perf_counter() - start) / steps

    return take


def measure(options: Options) -> None:
    import jax

    takes = [round_of(runner, together, options.steps) for runner, together in VARIANTS]
    times = [[take() for take in takes] for _ in range(options.rounds + 1)][1:]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    print(
        f"| {jax.device_count()} x {jax.devices()[0].device_kind} | " + " | ".join(f"{m:.2f}" for m in medians) + " |"
    )


def main(options: Options) -> None:
    if options.here:
        measure(options)
        return
    print("| devices | " + " | ".join(f"{r}, {t} a dispatch" for r, t in VARIANTS) + " |")
    print("|---" * (len(VARIANTS) + 1) + "|", flush=True)
    for count in options.devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        command = [sys.executable, "-m", "benchmarks.runners", "--here", "--steps", str(options.steps)]
        subprocess.run([*command, "--rounds", str(options.rounds)], check=True, env=os.environ | {"XLA_FLAGS": flags})


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
