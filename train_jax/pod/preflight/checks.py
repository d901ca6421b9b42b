"""The checks in their order: what needs no devices first, then the devices, then the model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator

from train_jax.errors import UserError
from train_jax.pod.preflight import devices as on_devices
from train_jax.pod.preflight import folder, holders, model, same, services
from train_jax.pod.preflight.row import Row, Rows, hosts_of_processes, is_first
from train_jax.run.config import RunConfig
from train_jax.runtime.backend import Choice
from train_jax.runtime.coordination import exchange, place
from train_jax.runtime.devices import Devices
from train_jax.runtime.peers import exit_now
from train_jax.start import Training, start
from train_jax.task import Task, task_class

EQUAL = ("code", "versions", "configuration", "data")
"""Processes that differ in these would run different programs, and wait for each other for ever."""
DEVICE_CHECKS = ("collective", "matrix product", "host to device", "all-reduce")
MODEL_CHECKS = ("configuration trains", "model beside PyTorch", "memory", "disk")


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the user says of the pod; 0 or empty for what is not said."""

    devices: int = 0
    processes: int = 0
    tpu: str = ""
    zone: str = ""
    timeout_seconds: float = 120.0
    """For anything that waits for other processes or for the backend."""
    quick: bool = False
    """Leaves out what compiles the model."""


@dataclasses.dataclass(frozen=True)
class Result:
    rows: list[Row]
    """Merged over the processes."""
    by_process: list[list[Row]]
    hosts: list[str]
    left_out: list[str]
    """Checks that could not run because of a failure before them."""

    @property
    def failed(self) -> bool:
        return any(each.failed for each in self.rows)


def run_checks(config: RunConfig, choice: Choice, expected: Expected) -> Result:
    """Runs all checks in all processes. Collective: every process gets the same result.

    Whether a check is run is decided by the rows of all processes, because most checks wait for the others.
    """
    hosts = hosts_of_processes()
    rows, left_out = Rows(), []
    task = _open(config)
    _check_hosts(rows, config, choice, task, expected, hosts)
    ready = not rows.failed_anywhere(*EQUAL[:2], "processes")
    devices = None
    if ready:
        devices = _check_backend(rows, config, choice, expected)
        ready = not rows.failed_anywhere("devices")
    if devices is not None and ready:
        _check_devices(rows, devices, expected)
    else:
        left_out += DEVICE_CHECKS
    same_run = not rows.failed_anywhere(*EQUAL)
    if devices is not None and ready and same_run and not isinstance(task, str):
        left_out += _check_model(rows, config, task, devices, expected)
    else:
        left_out += MODEL_CHECKS
    rows.failed_anywhere()
    return Result(rows.merged(hosts), rows.by_process, hosts, left_out)


def _open(config: RunConfig) -> Task | str:
    """The task with its data, or why it cannot be opened."""
    try:
        return task_class(config.task)(config)
    except (UserError, OSError) as error:
        return str(error)


def _check_hosts(
    rows: Rows, config: RunConfig, choice: Choice, task: Task | str, expected: Expected, hosts: list[str]
) -> None:
    own = _own_processes(hosts)
    with _watched("code and configuration", rows, expected.timeout_seconds):
        rows.check("processes", on_devices.check_processes, len(hosts), expected.processes)
        rows.check("code", same.check_code, config, hosts)
        rows.check("versions", same.check_versions, hosts)
        rows.check("configuration", same.check_configuration, config, hosts)
    rows.check("data", same.check_data, task, hosts)  # reads all of a large data set if nothing states its hash
    with _watched("clocks and run folder", rows, expected.timeout_seconds):
        rows.check("clock", same.check_clock, hosts)
        rows.check("run folder", folder.check_folder, config.run_dir, choice.platform, hosts)
        rows.check("device held by", holders.check_holders, choice.platform, own)
        rows.check("other processes", holders.check_other_processes, own)
    if is_first():
        rows.check("wandb", services.check_wandb, config)
        if expected.tpu:
            rows.check("TPU", services.check_tpu, expected.tpu, expected.zone)


def _own_processes(hosts: list[str]) -> set[int]:
    """The processes of this run on this host, by their number in the operating system. Collective."""
    pids = exchange("preflight pids", str(os.getpid()))
    here = hosts[place()[0]]
    return {int(pid) for pid, host in zip(pids, hosts, strict=True) if host == here}


def _check_backend(rows: Rows, config: RunConfig, choice: Choice, expected: Expected) -> Devices | None:
    made: list[Devices] = []

    def devices() -> Row:
        with _watched("devices", rows, expected.timeout_seconds):
            made.append(Devices(runner=config.compute.runner))
            return on_devices.check_devices(choice, expected.devices)

    rows.check("devices", devices)
    return made[0] if made else None


def _check_devices(rows: Rows, devices: Devices, expected: Expected) -> None:
    checks: dict[str, Callable[[Devices], Row]] = {
        "collective": on_devices.check_collective,
        "matrix product": on_devices.check_products,
        "host to device": on_devices.check_host_to_device,
        "all-reduce": on_devices.check_all_reduce,
    }
    for name, check in checks.items():
        with _watched(name, rows, expected.timeout_seconds):
            rows.check(name, check, devices)


def _check_model(rows: Rows, config: RunConfig, task: Task, devices: Devices, expected: Expected) -> list[str]:
    """Returns the names of the checks that were left out. Collective."""
    made: list[Training] = []

    def trains() -> Row:
        made.append(start(config, task, devices))
        return model.batch_row(made[0])

    rows.check(MODEL_CHECKS[0], trains)
    if rows.failed_anywhere(MODEL_CHECKS[0]):
        return list(MODEL_CHECKS[1:])
    if is_first():
        rows.check("disk", lambda: folder.check_disk(config, model.state_bytes(made[0])))
    if expected.quick:
        return []
    rows.check("model beside PyTorch", model.check_model, config, task)
    rows.check("memory", model.check_memory, made[0])
    return []


@contextlib.contextmanager
def _watched(name: str, rows: Rows, timeout_seconds: float) -> Iterator[None]:
    """Ends this process with a message if the block hangs, as a backend does whose device another process holds."""

    def end() -> None:
        failed = [f"{each.name}: {each.measured}" for each in rows.own if each.status != "PASS"]
        sys.stderr.write(
            f"trm: preflight: {name}: no answer within {timeout_seconds:.0f} s; does every host run this command, and "
            f"does no other process hold the device? (process {place()[0]}{'; '.join(['', *failed])})\n"
        )
        exit_now(1)

    timer = threading.Timer(timeout_seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def one_failure(name: str, error: Exception) -> Result:
    """The result if the processes did not even meet."""
    return Result([Row(name, "FAIL", str(error), "", "")], [], [], [*EQUAL, *DEVICE_CHECKS, *MODEL_CHECKS])
