"""Measures how long a save blocks the training loop, and how long a restore takes, with the baseline's state and carry.

    python -m benchmarks.saving [--saves 5] [--global-batch-size 6144] [--folder FOLDER]

There are eight virtual devices. The train step is a stub of 0.13 s, about the baseline's step on a TPU v4-64 by the
compiler's estimate. It changes the carry in place, as a train step does, while the checkpoint before is written in the
background. `blocked` is the time for which the loop waits in a save; `the step after` is what the first step after it
takes longer than the others. A checkpoint every 1 000 steps is the default. `restored` is the time in which a new run
has the newest checkpoint on its devices, checksums compared; the files are in memory, since they were written before.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import tyro

from benchmarks.example_puzzles import ExamplePuzzles, example_run
from models_torch.trm import TRMConfig
from train_jax.run.folder import RunFolder
from train_jax.runtime.clock import Clock
from train_jax.runtime.devices import Devices
from train_jax.trainer.hooks.log_lines import Logging
from train_jax.trainer.hooks.saving import Saving
from train_jax.trainer.start import start

DEVICES = 8
STEP_SECONDS = 0.13
EVERY_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure how long a save blocks the loop."""

    saves: int = 5
    """Number of measured saves, after one that is not measured."""
    global_batch_size: int = 6144
    """Examples whose carry is saved."""
    hidden_size: int = 512
    """Width of the model."""
    steps_between: int = 40
    """Number of stub steps between two saves."""
    folder: str = ""
    """Folder for the checkpoints, which are removed at the end; by default a temporary folder."""


def made(options: Options, folder: Path) -> tuple[Saving, Any, Any]:
    """Returns the `Saving` of a run of the baseline, its state and its carry, on the devices."""
    devices = Devices(DEVICES)
    arch = TRMConfig(
        batch_size=options.global_batch_size, seq_len=81, vocab_size=11, hidden_size=options.hidden_size,
        num_puzzle_identifiers=1001,
    )  # fmt: skip
    config = example_run("trm", arch, run_dir=str(folder), eval_batch_size=DEVICES, steps=1)
    training = start(config, ExamplePuzzles(config), devices)
    state = training.initial_state()
    carry = training.initial_carry(state, training.batches.at(0))
    parts: Any = SimpleNamespace(config=config, devices=devices, task=SimpleNamespace(fingerprint=""))
    return Saving(parts, RunFolder(folder), Logging(training)), devices.replicate(state), devices.shard(carry)


def stub_step() -> Any:
    """Returns a step that changes the smallest array of the donated carry in place, and no other."""

    def step(carry: Any) -> Any:
        leaves, structure = jax.tree.flatten(carry)
        smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
        leaves[smallest] = ~leaves[smallest] if leaves[smallest].dtype == bool else leaves[smallest] + 1
        return jax.tree.unflatten(structure, leaves)

    return jax.jit(step, donate_argnums=0)


def measure(options: Options, folder: Path) -> None:
    saving, state, carry = made(options, folder)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((state, carry)))
    step = stub_step()
    clock = Clock()
    carry = jax.block_until_ready(step(carry))
    blocked = []
    after = []
    for number in range(1, options.saves + 2):
        saving.wait()  # as after 1 000 steps, everything is on disk
        begun = time.perf_counter()
        session: Any = SimpleNamespace(step=number, state=state, carry=carry, clock=clock, metrics={})
        saving.start(session)
        blocked.append(time.perf_counter() - begun)
        times = []
        for _ in range(options.steps_between):
            begun = time.perf_counter()
            carry = jax.block_until_ready(step(carry))
            times.append(time.perf_counter() - begun)
            time.sleep(max(0.0, STEP_SECONDS - times[-1]))
        after.append(times[0] - statistics.median(times))
    begun = time.perf_counter()
    saving.wait()
    waited = time.perf_counter() - begun
    saving.close()
    print_table(size, blocked[1:], after[1:], waited)
    del state, carry
    print(f"restored in {restore_seconds(options, folder):.1f} s")


def restore_seconds(options: Options, folder: Path) -> float:
    """Returns the seconds until a run that continues has its state and carry on the devices."""
    saving, state, carry = made(options, folder)
    begun = time.perf_counter()
    resumed = saving.restore(jax.device_get(state))
    assert resumed is not None
    devices = Devices(DEVICES)
    rows = devices.from_rows(resumed.carry_like(devices.to_rows(carry)), carry)
    jax.block_until_ready((devices.replicate(resumed.state), devices.shard(rows)))
    seconds = time.perf_counter() - begun
    saving.close()
    return seconds


def print_table(size: int, blocked: list[float], after: list[float], waited: float) -> None:
    print(f"{size / 1e9:.2f} GB on {DEVICES} virtual devices, {os.cpu_count()} cores, {len(blocked)} saves\n")
    print("| a save | median, s | largest, s | share of 1 000 steps of 0.13 s |\n|---|---|---|---|")
    for name, seconds in (("blocked", blocked), ("the step after", after)):
        median = statistics.median(seconds)
        share = statistics.median(seconds) / (EVERY_STEPS * STEP_SECONDS)
        print(f"| {name} | {median:.2f} | {max(seconds):.2f} | {share:.2%} |")
    print(f"\nthe last one was on disk {waited:.1f} s after the steps behind it")


def main(options: Options) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="saving-"))
    try:
        measure(options, folder / "run")
    finally:
        shutil.rmtree(folder / "run", ignore_errors=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
