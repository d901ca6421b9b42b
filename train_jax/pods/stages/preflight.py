"""`trm preflight NAME`: checks hosts, devices, code, data and run folder before a run, on one machine or on a pod."""

import dataclasses
import shutil
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.errors import LostProcessError
from train_jax.pods.check.context import Context
from train_jax.pods.check.parts import PREFLIGHT
from train_jax.pods.check.rows import Result
from train_jax.pods.check.runner import one_failure, run_checks
from train_jax.run.arguments import parse_run, split_arguments
from train_jax.run.choices import with_file_read
from train_jax.run.config import RunConfig
from train_jax.runtime import backend
from train_jax.runtime.compilation import use_compile_cache
from train_jax.runtime.coordination import place
from train_jax.runtime.processes import join_processes


@dataclasses.dataclass(frozen=True)
class Preflight:
    """Check what a run needs before it starts: devices and processes, the same code, configuration and data on all
    hosts, arithmetic, the model beside PyTorch, memory, run folder, disk, clocks. Trains nothing. Run it on every host
    of a pod, as `trm train`; process 0 prints the table. Status 1 if a check fails.

    NAME is a preset or an experiment; every field of `trm train NAME` can follow."""

    name: Annotated[str, tyro.conf.Positional]
    """Preset or experiment, such as sudoku-extreme or exp01a."""
    expect_devices: Annotated[int, Range(0, 2**20)] = 0
    """Number of devices of all processes together, such as 32 for a v4-64; 0 accepts any."""
    expect_processes: Annotated[int, Range(0, 2**20)] = 0
    """Number of processes, such as 8 for a v4-64; 0 accepts any."""
    timeout: Annotated[float, Range(1, 1e5)] = 120.0
    """Seconds to wait for other processes and for the devices."""
    quick: bool = False
    """Leave out what compiles the model: the comparison with PyTorch, and memory."""
    brief: bool = False
    """Print only what does not pass, and one line."""
    json: bool = False
    """Print the rows of all processes as JSON instead of the table."""


def main(options: Preflight, config: RunConfig) -> None:
    result = _result(options, config)
    if place()[0] == 0:
        width = max(100, shutil.get_terminal_size().columns)
        print(result.to_json() if options.json else "\n".join(result.lines(width, brief=options.brief)))
    if result.failed:
        raise SystemExit(1)


def _result(options: Preflight, config: RunConfig) -> Result:
    choice = backend.choose(config.platform)  # JAX names its platforms after the processes have joined
    try:
        joined = join_processes(config.platform, options.timeout, cpu_devices=config.virtual_devices)
    except LostProcessError as error:
        return one_failure(PREFLIGHT, "processes", error)
    except backend.PlatformError as error:
        return one_failure(PREFLIGHT, "devices", error)
    with joined:
        use_compile_cache(config.compute.compile_cache)
        context = Context(
            options.name,
            with_file_read(config),
            choice,
            expect_devices=options.expect_devices,
            expect_processes=options.expect_processes,
        )
        return run_checks(PREFLIGHT, context, options.timeout, quick=options.quick)


def cli(argv: list[str]) -> None:
    own, rest = split_arguments(argv, Preflight, prog="trm preflight")
    options = parse(Preflight, own, prog="trm preflight")
    main(options, parse_run(rest, prog="trm preflight", description="")[1])
