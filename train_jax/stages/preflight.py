"""`trm preflight NAME`: checks hosts, devices, code, data and run folder before a run, on one machine or on a pod."""

import dataclasses
import shutil
import sys
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.errors import LostProcessError, UserError
from train_jax.pod.launch.gcloud import check_names
from train_jax.pod.preflight.checks import Expected, one_failure, run_checks
from train_jax.pod.preflight.rows import Result
from train_jax.run.config import RunConfig
from train_jax.run_arguments import parse_run, split_arguments
from train_jax.runtime import backend
from train_jax.runtime.compile_cache import use_compile_cache
from train_jax.runtime.coordination import place
from train_jax.runtime.processes import join_processes


@dataclasses.dataclass(frozen=True)
class Preflight:
    """Check what a run needs before it starts: devices and processes, the same code, configuration and data on all
    hosts, arithmetic, bandwidth, the model beside PyTorch, memory, run folder, disk, clocks. Trains nothing. Run it on
    every host of a pod, as `trm train`; process 0 prints the table. Status 1 if a check fails.

    NAME is a preset or an experiment; every field of `trm train NAME` can follow."""

    name: Annotated[str, tyro.conf.Positional]
    """Preset or experiment, such as sudoku-extreme or exp01a."""
    expect_devices: Annotated[int, Range(0, 2**20)] = 0
    """Number of devices of all processes together, such as 32 for a v4-64; 0 accepts any."""
    expect_processes: Annotated[int, Range(0, 2**20)] = 0
    """Number of processes, such as 8 for a v4-64; 0 accepts any."""
    tpu: str = ""
    """Name of the TPU, to ask Google Cloud for its state and health with gcloud."""
    zone: str = ""
    """Zone of the TPU."""
    timeout: Annotated[float, Range(1, 1e5)] = 120.0
    """Seconds to wait for other processes and for the devices."""
    quick: bool = False
    """Leave out what compiles the model: the comparison with PyTorch, and memory."""
    brief: bool = False
    """Print only what does not pass, and one line."""
    json: bool = False
    """Print the rows of all processes as JSON instead of the table."""


def main(options: Preflight, config: RunConfig) -> None:
    if bool(options.tpu) != bool(options.zone):
        raise UserError("--tpu and --zone belong together; give both, such as --tpu my-tpu-1 --zone us-central2-b")
    if options.tpu:
        check_names(tpu=options.tpu, zone=options.zone)
    use_compile_cache(config.compute.compile_cache)
    result = _result(options, config)
    if place()[0] == 0:
        width = max(100, shutil.get_terminal_size().columns)
        print(result.to_json() if options.json else "\n".join(result.lines(width, brief=options.brief)))
    if result.failed:
        raise SystemExit(1)


def _result(options: Preflight, config: RunConfig) -> Result:
    expected = Expected(
        options.expect_devices, options.expect_processes, options.tpu, options.zone, options.timeout, options.quick
    )
    choice = backend.choose(config.platform)
    try:
        context = join_processes(config.platform, options.timeout, cpu_devices=config.virtual_devices)
    except LostProcessError as error:
        return one_failure("processes", error)
    except backend.PlatformError as error:
        return one_failure("devices", error)
    with context:
        return run_checks(config, choice, expected)


def cli(argv: list[str]) -> None:
    own, rest = split_arguments(argv, Preflight, prog="trm preflight")
    options = parse(Preflight, own, prog="trm preflight")
    main(options, parse_run(rest, prog="trm preflight", description="")[1])


if __name__ == "__main__":
    cli(sys.argv[1:])
