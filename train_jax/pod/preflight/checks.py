"""The checks in their order: what needs no devices first, then the devices, then the model."""

from __future__ import annotations

import dataclasses
import os
import platform
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.pod.preflight import devices as on_devices
from train_jax.pod.preflight import hosts as on_hosts
from train_jax.pod.preflight.rows import Result, Row, Rows, merge
from train_jax.run.config import RunConfig
from train_jax.runtime.backend import Choice
from train_jax.runtime.coordination import exchange, place
from train_jax.runtime.devices import Devices
from train_jax.start import Training, start
from train_jax.task import Task, task_class

EQUAL = ("code", "versions", "configuration", "data")
"""Processes that differ in these would run different programs, and wait for each other for ever."""
DEVICE_CHECKS = {
    "collective": on_devices.check_collective,
    "matrix product": on_devices.check_products,
    "host to device": on_devices.check_host_to_device,
    "all-reduce": on_devices.check_all_reduce,
}
MODEL_CHECKS = ("configuration trains", "model beside PyTorch", "memory", "disk")


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


def run_checks(config: RunConfig, choice: Choice, options: Preflight) -> Result:
    """Runs all checks in all processes. Collective: every process gets the same result.

    Whether a check is run is decided by the rows of all processes, because most checks wait for the others.
    """
    hosts = exchange("preflight hosts", platform.node())
    rows, left_out, task = Rows(options.timeout), [], _open(config)
    _check_hosts(rows, config, choice, task, options, hosts)
    devices = None
    if not rows.failed_anywhere(*EQUAL[:2], "processes"):
        devices = _check_backend(rows, config, choice, options)
        devices = None if rows.failed_anywhere("devices") else devices
    if devices is not None:
        for name, check in DEVICE_CHECKS.items():
            rows.check(name, check, devices)
    else:
        left_out += DEVICE_CHECKS
    same_run = not rows.failed_anywhere(*EQUAL)
    if devices is not None and same_run and not isinstance(task, str):
        left_out += _check_model(rows, config, task, devices, options)
    else:
        left_out += MODEL_CHECKS
    rows.failed_anywhere()
    return Result(merge(rows.by_process, hosts), rows.by_process, hosts, left_out)


def one_failure(name: str, error: Exception) -> Result:
    """Returns the result if the processes did not even meet."""
    return Result([Row(name, "FAIL", str(error), "", "")], [], [], [*EQUAL, *DEVICE_CHECKS, *MODEL_CHECKS])


def _open(config: RunConfig) -> Task | str:
    """Returns the task with its data, or why it cannot be opened."""
    try:
        return task_class(config.task)(config)
    except (UserError, OSError) as error:
        return str(error)


def _check_hosts(
    rows: Rows, config: RunConfig, choice: Choice, task: Task | str, options: Preflight, hosts: list[str]
) -> None:
    pids, here = exchange("preflight pids", str(os.getpid())), hosts[place()[0]]
    own = {int(pid) for pid, host in zip(pids, hosts, strict=True) if host == here}
    rows.check("processes", on_devices.check_processes, len(hosts), options.expect_processes)
    rows.check("code", on_hosts.check_code, config, hosts)
    rows.check("versions", on_hosts.check_versions, hosts)
    rows.check("configuration", on_hosts.check_configuration, config, hosts)
    # Reads all of a large data set if nothing states its hash.
    rows.check("data", on_hosts.check_data, task, hosts, may_last=True)
    rows.check("clock", on_hosts.check_clock, hosts)
    rows.check("run folder", on_hosts.check_folder, config.run_dir, choice.platform, hosts)
    rows.check("device held by", on_hosts.check_holders, choice.platform, own)
    rows.check("other processes", on_hosts.check_other_processes, own)
    if place()[0] == 0:
        rows.check("wandb", on_hosts.check_wandb, config, may_last=True)
        if options.tpu:
            rows.check("TPU", on_hosts.check_tpu, options.tpu, options.zone)


def _check_backend(rows: Rows, config: RunConfig, choice: Choice, options: Preflight) -> Devices | None:
    made: list[Devices] = []

    def devices() -> Row:
        made.append(Devices(runner=config.compute.runner))
        return on_devices.check_devices(choice, options.expect_devices)

    rows.check("devices", devices)
    return made[0] if made else None


def _check_model(rows: Rows, config: RunConfig, task: Task, devices: Devices, options: Preflight) -> list[str]:
    """Returns the names of the checks that were left out. Collective."""
    made: list[Training] = []

    def trains() -> Row:
        made.append(start(config, task, devices))
        return on_devices.batch_row(made[0])

    rows.check(MODEL_CHECKS[0], trains, may_last=True)
    if rows.failed_anywhere(MODEL_CHECKS[0]):
        return list(MODEL_CHECKS[1:])
    if place()[0] == 0:
        rows.check("disk", lambda: on_hosts.check_disk(config, on_devices.state_bytes(made[0])), may_last=True)
    if options.quick:
        return []
    rows.check("model beside PyTorch", on_devices.check_model, config, task, may_last=True)
    rows.check("memory", on_devices.check_memory, made[0], may_last=True)
    return []
