"""Counts and measures what the train step of one batch costs on more devices: 1, 2, 4, 8, and two processes of four.

    python -m benchmarks.scaling [--devices 1 2 4 8] [--no-processes] [--preset sudoku9] [--json FILE] [--compare FILE]

The global batch is the same on all devices, virtual ones on a CPU, each number in processes of its own. Without a
clock, from the compiled program of one device: the collectives of a step and the bytes of their results, the bytes of
arguments and temporaries, the FLOPs of the matrix products, and their efficiency: those of one device alone, divided
by those of all devices together. Below 1, the devices repeat work of each other.

Milliseconds are medians over the rounds. Virtual devices share the cores of the machine, so `1 device / time` is no
speed-up: below 1 it is what the division costs, and above 1 it says that one device alone leaves cores idle. It says
nothing of a machine where each device has cores of its own. Use a quiet machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import tyro

from benchmarks import tables

TITLES = ("processes x devices", "collectives", "their bytes", "arguments, MB", "temporaries, MB",
          "GFLOP of a device", "efficiency of FLOPs", "ms", "1 device / time")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(tables.Files):
    """Count and measure a train step on several devices."""

    devices: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of devices of one process."""
    processes: bool = True
    """Also measure two processes with half of the largest number of devices each."""
    preset: str = "sudoku9"
    """Preset of a puzzle run."""
    batch_size: int = 0
    """Examples in a step; 0 uses that of the preset."""
    rounds: int = 15
    """Number of measured steps, after two that are not measured; 0 only counts."""
    here: bool = False
    """Measure in this process, on its devices."""


def measure(options: Options) -> dict[str, Any]:
    """Returns the figures of the step on the devices of all processes, of which this is one."""
    import jax

    from benchmarks.example_puzzles import ExamplePuzzles, example_run
    from train_jax.pods.compile import memory_of
    from train_jax.pods.flops import products
    from train_jax.pods.hlo import Program
    from train_jax.pods.yardsticks import yardsticks
    from train_jax.run.presets import preset
    from train_jax.runtime.devices import Devices
    from train_jax.trainer.start import start

    devices, config = Devices(), preset(options.preset)
    size = options.batch_size or config.global_batch_size
    arch = dataclasses.replace(config.arch, batch_size=size, seq_len=81, vocab_size=11, num_puzzle_identifiers=1)
    run = example_run(config.model, arch, optim=config.optim, steps=1000, eval_batch_size=size)
    training = start(run, ExamplePuzzles(run), devices)
    initial, batch = training.initial_state(), training.batches.at(0)
    state = devices.replicate(initial)
    carry = training.initial_carry(initial, batch)
    batch, key = devices.shard(batch), devices.random_key(0)
    program = training.parallel_step()
    compiled = program.lower(state, carry, batch, key).compile()
    memory = memory_of(compiled)
    collectives = yardsticks(Program(compiled.as_text())).collectives
    result = {
        "collectives": len(collectives),
        "collective bytes": sum(each.bytes for each in collectives),
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "flops": products(jax.make_jaxpr(program)(state, carry, batch, key)).total,
    }
    times = []
    for _ in range(options.rounds + 2 if options.rounds else 0):
        begun = time.perf_counter()
        state, carry, metrics = program(state, carry, batch, key)
        jax.block_until_ready((state, carry, metrics))
        times.append(time.perf_counter() - begun)
    return result | ({"ms": 1000 * statistics.median(times[2:])} if times else {})


def measured(options: Options, processes: int, devices: int) -> dict[str, Any]:
    """Returns the figures of `processes` processes with `devices` devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.scaling", "--here", "--preset", options.preset]
    command += ["--rounds", str(options.rounds), "--batch-size", str(options.batch_size)]
    started = []
    for number in range(processes):
        place = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(number),
        }
        variables = environment | (place if processes > 1 else {})
        started.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{' '.join(command)} ended with status {[process.returncode for process in started]}")
    results = [json.loads(text.splitlines()[-1]) for text in texts]
    return results[0] | ({"ms": max(each["ms"] for each in results)} if options.rounds else {})


def cells(processes: int, devices: int, result: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    """Returns the row of a result; `alone` is that of one device."""
    count = processes * devices
    times = [f"{result['ms']:.1f}", f"{alone['ms'] / result['ms']:.2f}"] if "ms" in result else ["-", "-"]
    return [
        f"{processes} x {devices}", str(result["collectives"]), f"{result['collective bytes']:,.0f}",
        f"{result['arguments'] / 1e6:.2f}", f"{result['temporaries'] / 1e6:.2f}", f"{result['flops'] / 1e9:.3f}",
        f"{alone['flops'] / (count * result['flops']):.3f}", *times,
    ]  # fmt: skip


def main(options: Options) -> int:
    if options.here:
        from train_jax.runtime.processes import join_processes

        with join_processes("cpu"):
            print(json.dumps(measure(options)))
        return 0
    before, figures, details = tables.figures_before(options), {}, {}
    places = [(1, count) for count in options.devices]
    if options.processes and max(options.devices) > 1:
        places.append((2, max(options.devices) // 2))
    print(tables.header(TITLES), flush=True)
    alone: dict[str, Any] = {}
    for processes, count in places:
        result = details[f"{processes} x {count}"] = measured(options, processes, count)
        alone = alone or result
        print(tables.row(cells(processes, count, result, alone)), flush=True)
        units = {"collectives": "", "collective bytes": "", "temporaries": ", bytes", "flops": "", "ms": ""}
        figures |= {
            f"{processes} x {count} {name}{unit}": result[name] for name, unit in units.items() if name in result
        }
    print(f"\n{options.preset}, {options.batch_size or 'the batch of the preset'}; ratios are to the first row")
    return tables.finish(options, figures, before, "virtual devices", results=details)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
