"""The run and processes to check, the row that a check returns, the merged rows of all processes, and their table."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal

from train_jax.run.config import RunConfig
from train_jax.runtime.backend import Choice
from train_jax.runtime.devices import Devices
from train_jax.task import Task
from train_jax.trainer.start import Training

Status = Literal["PASS", "WARN", "FAIL"]
_ORDER: list[Status] = ["PASS", "WARN", "FAIL"]


@dataclasses.dataclass
class Pod:
    """The run and the processes to check. The fields without a value are set by the check that computes them."""

    config: RunConfig
    choice: Choice
    hosts: list[str]
    """Names of the hosts, by process."""
    expect_devices: int = 0
    expect_processes: int = 0
    task: Task = dataclasses.field(init=False)
    devices: Devices = dataclasses.field(init=False)
    training: Training = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True)
class Row:
    """The value that a check measured, and the limit beyond which it warns or fails."""

    name: str
    status: Status
    measured: str
    limit: str = ""
    remedy: str = ""
    """The remedy; shown unless the status is PASS."""
    where: str = ""
    """The process and its host, if not all processes have the same row."""

    @property
    def failed(self) -> bool:
        return self.status == "FAIL"


def row(measured: str, *, fail: bool = False, warn: bool = False, limit: str = "", remedy: str = "") -> Row:
    """Returns a row without its name; it passes unless one of the conditions holds."""
    status: Status = "FAIL" if fail else "WARN" if warn else "PASS"
    return Row("", status, measured, limit, "" if status == "PASS" else remedy)


def merge(by_process: Sequence[Sequence[Row]], hosts: Sequence[str]) -> list[Row]:
    """Returns one row for each check: the worst one, with its process if the rows differ."""
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
    """The rows of every process, and the checks that could not run because of a failure before them."""

    by_process: list[list[Row]]
    hosts: list[str]
    left_out: list[str]

    @property
    def rows(self) -> list[Row]:
        """Rows merged over the processes."""
        return merge(self.by_process, self.hosts)

    @property
    def failed(self) -> bool:
        return any(each.failed for each in self.rows)

    def lines(self, width: int, *, brief: bool = False) -> Iterator[str]:
        """Yields the table for the terminal; with `brief`, only the rows that do not pass, and the summary."""
        rows = self.rows
        names = max(len(each.name) for each in rows)
        indent = " " * (names + 8)
        for each in rows:
            if brief and each.status == "PASS":
                continue
            where = f" ({each.where})" if each.where else ""
            limit = f" [{each.limit}]" if each.limit else ""
            text = f"{each.status}  {each.name:<{names}}  {each.measured}{where}{limit}"
            yield from textwrap.wrap(text, width, subsequent_indent=indent)
            if each.remedy:
                yield from textwrap.wrap(f"-> {each.remedy}", width, initial_indent=indent, subsequent_indent=indent)
        if self.left_out:
            yield f"not checked, because of what failed: {', '.join(self.left_out)}"
        passed, warnings, failed = (sum(each.status == status for each in rows) for status in _ORDER)
        yield f"preflight: {'not ready' if failed else 'ready'}; {passed} passed, {warnings} warnings, {failed} failed"

    def to_json(self) -> str:
        """Returns `ok`, the merged rows, and the rows of every process."""
        processes = [
            {"host": host, "rows": [dataclasses.asdict(each) for each in rows]}
            for host, rows in zip(self.hosts, self.by_process, strict=True)
        ]
        rows = [dataclasses.asdict(each) for each in self.rows]
        figures = {"ok": not self.failed, "rows": rows, "processes": processes, "not_checked": self.left_out}
        return json.dumps(figures, indent=1)
