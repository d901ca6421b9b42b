"""The result of a check: a row of one process, the rows of all processes as one, and the table of all checks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from train_jax.errors import PreemptedError
from train_jax.runtime.coordination import exchange, place
from train_jax.runtime.peers import exit_now

Status = Literal["PASS", "WARN", "FAIL"]
_ORDER: list[Status] = ["PASS", "WARN", "FAIL"]


@dataclasses.dataclass(frozen=True)
class Row:
    """What a check measured, and the limit beyond which it warns or fails."""

    name: str
    status: Status
    measured: str
    limit: str = ""
    remedy: str = ""
    """What to do; shown unless the status is PASS."""
    where: str = ""
    """The process and its host, where not all processes have the same row."""

    @property
    def failed(self) -> bool:
        return self.status == "FAIL"


def row(measured: str, *, fail: bool = False, warn: bool = False, limit: str = "", remedy: str = "") -> Row:
    """Returns a row without its name; it passes unless one of the conditions holds."""
    status: Status = "FAIL" if fail else "WARN" if warn else "PASS"
    return Row("", status, measured, limit, "" if status == "PASS" else remedy)


class Rows:
    """The rows of this process, check after check."""

    def __init__(self, timeout_seconds: float) -> None:
        self.own: list[Row] = []
        self.by_process: list[list[Row]] = [[]]
        self._timeout_seconds = timeout_seconds

    def check(self, name: str, function: Callable[..., Row | None], *arguments: Any, may_last: bool = False) -> None:
        """Runs a check and keeps its row, if it has one.

        Whatever the check raises is a failure, so that the other processes do not wait for this one. Unless the check
        `may_last`, this process ends if it hangs, as a backend does whose device another process holds.
        """
        try:
            with contextlib.nullcontext() if may_last else self._watched(name):
                result = function(*arguments)
        except (PreemptedError, KeyboardInterrupt):
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or "no message"
            kind = "" if hasattr(error, "STATUS") else f"{type(error).__name__}: "
            result = row(f"{kind}{reason[:400]}", fail=True)
        if result is not None:
            self.own.append(dataclasses.replace(result, name=name))

    @contextlib.contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        timer = threading.Timer(self._timeout_seconds, self._end, [name])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, name: str) -> None:
        problems = [f"; {each.name}: {each.measured}" for each in self.own if each.status != "PASS"]
        sys.stderr.write(
            f"trm: preflight: {name}: no answer within {self._timeout_seconds:.0f} s; does every host run this "
            f"command, and does no other process hold the device? (process {place()[0]}{''.join(problems)})\n"
        )
        exit_now(1)

    def failed_anywhere(self, *names: str) -> bool:
        """Returns whether a check of these names, by default any, failed in a process. Collective, without devices."""
        texts = exchange("preflight rows", json.dumps([dataclasses.asdict(each) for each in self.own]))
        self.by_process = [[Row(**fields) for fields in json.loads(text)] for text in texts]
        return any(each.failed and (not names or each.name in names) for rows in self.by_process for each in rows)


def merge(by_process: Sequence[Sequence[Row]], hosts: Sequence[str]) -> list[Row]:
    """Returns one row for each check: the worst one, with the process that it comes from if others have another."""
    merged = []
    for name in dict.fromkeys(each.name for rows in by_process for each in rows):
        having = [(index, each) for index, rows in enumerate(by_process) for each in rows if each.name == name]
        index, worst = max(having, key=lambda pair: (_ORDER.index(pair[1].status), -pair[0]))
        if worst.status != "PASS" and any(each != worst for _, each in having):
            alike = sum(each.status == worst.status for _, each in having) - 1
            more = f", and {alike} more" if alike else ""
            worst = dataclasses.replace(worst, where=f"process {index} on {hosts[index]}{more}")
        merged.append(worst)
    return merged


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

    def lines(self, width: int, *, brief: bool = False) -> Iterator[str]:
        """Yields the table for the terminal; `brief`: only rows that do not pass, and the summary."""
        names = max((len(each.name) for each in self.rows), default=0)
        indent = " " * (names + 8)
        for each in self.rows:
            if brief and each.status == "PASS":
                continue
            where = f" ({each.where})" if each.where else ""
            limit = f" [{each.limit}]" if each.limit else ""
            text = f"{each.status}  {each.name:<{names}}  {each.measured}{where}{limit}"
            yield from textwrap.wrap(text, width, subsequent_indent=indent)
            if each.remedy:
                remedy = f"-> {each.remedy}"
                yield from textwrap.wrap(remedy, width, initial_indent=indent, subsequent_indent=f"{indent}   ")
        if self.left_out:
            text = f"not checked, because of what failed: {', '.join(self.left_out)}"
            yield from textwrap.wrap(text, width, subsequent_indent="  ")
        passed, warnings, failed = (sum(each.status == status for each in self.rows) for status in _ORDER)
        verdict = "not ready" if self.failed else "ready"
        yield f"preflight: {verdict}; {passed} passed, {warnings} warnings, {failed} failed"

    def to_json(self) -> str:
        """Returns `ok`, the merged rows, and the rows of every process."""
        processes = [
            {"host": host, "rows": [dataclasses.asdict(each) for each in rows]}
            for host, rows in zip(self.hosts, self.by_process, strict=True)
        ]
        figures = {
            "ok": not self.failed,
            "rows": [dataclasses.asdict(each) for each in self.rows],
            "processes": processes,
            "not_checked": self.left_out,
        }
        return json.dumps(figures, indent=1)
