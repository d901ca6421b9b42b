"""Runs the parts of a proof within its time: the parts on the devices in a worker process, the runs in their own.

A part that hangs or crashes ends its worker; the next worker reports that part and continues with the rest. The same
holds for several processes: all workers end with the failed one, and the next ones connect again.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from train_jax.pods.check.context import Context
from train_jax.pods.check.parts import Part
from train_jax.pods.check.record import NO_TIME, Record
from train_jax.pods.check.rows import Row, absent, named
from train_jax.pods.check.runner import limited, run_checks
from train_jax.runtime.coordination import exchange, place

_HUNG = 86
"""Exit status of a worker whose part took too long."""
_CHECK_SECONDS = 120.0
"""Seconds after which a check that waits for other processes ends this one."""
_LEAST_SECONDS = 2.0
"""Seconds that have to be left for another worker to be started."""


def work(context: Context, record: Record, parts: Sequence[Part], part_seconds: float) -> None:
    """Runs the parts that have no rows yet, in a worker. Collective: the first process selects them, and writes."""
    if place()[0] == 0 and record.running:
        where = f"the process ended while it ran, or it took more than {part_seconds:.0f} s"
        record.end(record.running, [named(record.running, where, fail=True)])
    todo = json.loads(exchange("prove parts", json.dumps([p.name for p in parts if not record.has(p.name)]))[0])
    for part in parts:
        if part.name not in todo:
            continue
        if place()[0] == 0:
            record.begin(part.name)
        with limited(part_seconds, functools.partial(_end, part.name, part_seconds)):
            rows = _rows_of(part, context)
        if place()[0] == 0:
            record.end(part.name, rows)
            sys.stdout.write(record.lines(part.name))
            sys.stdout.flush()


def _rows_of(part: Part, context: Context) -> list[Row]:
    result = run_checks(part.checks, context, _CHECK_SECONDS)
    return [*result.rows, *(absent(name, "left out because of what failed before it") for name in result.left_out)]


def _end(name: str, seconds: float) -> None:
    sys.stderr.write(f"trm: prove: {name}: no end within {seconds:.0f} s\n")
    sys.stderr.flush()
    os._exit(_HUNG)


def supervise(command: Sequence[str], deadline: float, most_workers: int) -> int:
    """Starts workers until one ends by itself or time is over; returns the last one's status, 0 if time ended it."""
    status = 0
    for _ in range(most_workers):
        left = deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            break
        worker = subprocess.Popen(command, start_new_session=True)
        try:
            status = worker.wait(left)
        except BaseException as error:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return 0
        if status in (0, 2):
            break
    return status


def close(record: Record, parts: Sequence[str]) -> None:
    """Writes a row for every part that has none, including the running one, which says so."""
    record.running = ""
    for part in parts:
        if not record.has(part):
            record.end(part, [absent(part, NO_TIME)])
