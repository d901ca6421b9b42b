"""The checks in their order: first those that need no devices, then the devices, then the model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from train_jax.errors import PreemptedError
from train_jax.pods.check import devices, hosts
from train_jax.pods.check.rows import Pod, Result, Row, row
from train_jax.runtime.coordination import exchange, place
from train_jax.runtime.exits import exit_now


class Check(NamedTuple):
    """A check: a function that returns its row, or None if there is nothing to check."""

    name: str
    function: Callable[[Pod], Row | None]
    needs: tuple[str, ...] = ()
    """Checks that have to pass before this one, in all processes: most checks wait for all processes."""
    may_last: bool = False
    """False if the process ends when the check takes too long, as a backend does whose device another process holds."""


EQUAL = ("code", "versions", "configuration", "data")
"""Processes that differ in these would run different programs, and wait for each other for ever."""
CHECKS = (
    Check("processes", devices.check_processes),
    Check("code", hosts.check_code),
    Check("versions", hosts.check_versions),
    Check("configuration", hosts.check_configuration),
    Check("data", hosts.check_data, may_last=True),  # reads all of a large data set the first time
    Check("clock", hosts.check_clock),
    Check("run folder", hosts.check_folder),
    Check("device held by", hosts.check_holders),
    Check("wandb", hosts.check_wandb, may_last=True),
    Check("devices", devices.check_devices, ("processes", "code", "versions")),
    Check("collective", devices.check_collective, ("devices",)),
    Check("matrix product", devices.check_products, ("devices",)),
    Check("configuration trains", devices.check_training, ("devices", *EQUAL), may_last=True),
    Check("disk", hosts.check_disk, ("configuration trains",), may_last=True),
    Check("model beside PyTorch", devices.check_model, ("configuration trains",), may_last=True),
    Check("memory", devices.check_memory, ("configuration trains",), may_last=True),
)
COMPILE_THE_MODEL = ("model beside PyTorch", "memory")


def run_checks(pod: Pod, timeout_seconds: float, *, quick: bool, without: Collection[str] = ()) -> Result:
    """Runs all checks except those in `without` in all processes; with `quick`, only those that do not compile the
    model. Collective: every process gets the same result."""
    by_process: list[list[Row]] = [[] for _ in pod.hosts]
    left_out: list[str] = []
    for check in CHECKS:
        if check.name in without or (quick and check.name in COMPILE_THE_MODEL):
            continue
        failed = {each.name for rows in by_process for each in rows if each.failed}
        if not failed.union(left_out).isdisjoint(check.needs):
            left_out.append(check.name)
            continue
        found = _row_of(check, pod, by_process[place()[0]], timeout_seconds)
        for rows, text in zip(by_process, exchange("preflight row", json.dumps(found)), strict=True):
            rows.extend(Row(*fields) for fields in json.loads(text))
    return Result(by_process, pod.hosts, left_out)


def one_failure(name: str, error: Exception) -> Result:
    """Returns the result if the processes did not even meet: the failure, and that nothing else was checked."""
    return Result([[Row(name, "FAIL", str(error))]], [""], [each.name for each in CHECKS if each.name != name])


def _row_of(check: Check, pod: Pod, before: Sequence[Row], timeout_seconds: float) -> list[tuple]:
    """Returns the fields of the row of this process, in a list that is empty without a row.

    Whatever the check raises is a failure, so that the other processes do not wait for this one.
    """
    try:
        with contextlib.nullcontext() if check.may_last else _ended_after(timeout_seconds, check.name, before):
            result = check.function(pod)
    except (PreemptedError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        kind = "" if hasattr(error, "STATUS") else f"{type(error).__name__}: "
        result = row(f"{kind}{reason[:400]}", fail=True)
    return [] if result is None else [dataclasses.astuple(dataclasses.replace(result, name=check.name))]


@contextlib.contextmanager
def _ended_after(seconds: float, name: str, before: Sequence[Row]) -> Iterator[None]:
    """Ends this process, with the rows that did not pass, if the block takes longer."""

    def end() -> None:
        problems = [f"; {each.name}: {each.measured}" for each in before if each.status != "PASS"]
        sys.stderr.write(
            f"trm: preflight: {name}: no answer within {seconds:.0f} s; does every host run this command, and does no "
            f"other process hold the device? (process {place()[0]}{''.join(problems)})\n"
        )
        exit_now(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
