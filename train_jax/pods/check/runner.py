"""Runs checks in all processes: every process gets the rows of all, and none waits for one that failed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from train_jax.errors import PreemptedError
from train_jax.pods.check.context import Context
from train_jax.pods.check.rows import Result, Row, absent, named, row
from train_jax.runtime.coordination import exchange, place
from train_jax.runtime.exits import exit_now


class Check(NamedTuple):
    """A check: a function that returns its rows, or None if there is nothing to check in this process."""

    name: str
    function: Callable[[Context], Row | list[Row] | None]
    needs: tuple[str, ...] = ()
    """Checks that have to pass before this one, in all processes: most checks wait for all processes."""
    needs_data: bool = False
    """True if the check cannot be made without the data set."""
    compiles: bool = False
    """True if it compiles the model, which `--quick` leaves out."""
    may_last: bool = False
    """False if the process ends when the check takes too long, as a backend does whose device another process holds."""


def run_checks(checks: Sequence[Check], context: Context, timeout_seconds: float, *, quick: bool = False) -> Result:
    """Runs the checks in all processes; with `quick`, only those that do not compile the model. Collective: every
    process gets the same result."""
    by_process: list[list[Row]] = [[] for _ in context.hosts]
    left_out: list[str] = []
    for check in checks:
        if quick and check.compiles:
            continue
        failed = {each.name for rows in by_process for each in rows if each.failed}
        if not failed.union(left_out).isdisjoint(check.needs):
            left_out.append(check.name)
            continue
        found = _rows_of(check, context, by_process[place()[0]], timeout_seconds)
        texts = exchange("check rows", json.dumps([dataclasses.asdict(each) for each in found]))
        for rows, text in zip(by_process, texts, strict=True):
            rows.extend(Row(**fields) for fields in json.loads(text))
    return Result(by_process, context.hosts, left_out)


def one_failure(checks: Sequence[Check], name: str, error: Exception) -> Result:
    """Returns the result if the processes did not even meet: the failure, and that nothing else was checked."""
    others = [each.name for each in checks if each.name != name]
    return Result([[named(name, str(error), fail=True)]], [""], others)


def _rows_of(check: Check, context: Context, before: Sequence[Row], timeout_seconds: float) -> list[Row]:
    """Returns the rows of this process.

    Whatever the check raises is a failure, so that the other processes do not wait for this one.
    """
    if check.needs_data and not context.has_data:
        return [absent(check.name, context.no_data)]
    try:
        with contextlib.nullcontext() if check.may_last else _no_longer_than(timeout_seconds, check.name, before):
            found = check.function(context)
    except (PreemptedError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        kind = "" if hasattr(error, "STATUS") else f"{type(error).__name__}: "
        found = row(f"{kind}{reason[:400]}", fail=True)
    rows = [found] if isinstance(found, Row) else found or []
    return [dataclasses.replace(each, name=each.name or check.name) for each in rows]


def _no_longer_than(seconds: float, name: str, before: Sequence[Row]) -> contextlib.AbstractContextManager[None]:
    """Ends this process, with the problems of the rows before, if the block takes longer."""

    def end() -> None:
        problems = [f"; {each.name}: {each.measured}" for each in before if each.has_problem]
        sys.stderr.write(
            f"trm: preflight: {name}: no answer within {seconds:.0f} s; does every host run this command, and does no "
            f"other process hold the device? (process {place()[0]}{''.join(problems)})\n"
        )
        exit_now(1)

    return limited(seconds, end)


@contextlib.contextmanager
def limited(seconds: float, end: Callable[[], None]) -> Iterator[None]:
    """Calls `end`, which ends the process, in another thread if the block takes longer."""
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
