"""A row: what a check measured; the rows of all processes as one table."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal

Status = Literal["n/a", "PASS", "WARN", "FAIL"]
_ORDER: list[Status] = ["n/a", "PASS", "WARN", "FAIL"]
"""The statuses from best to worst; of the rows of several processes the worst one is shown."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The value that a check measured, and the limit beyond which it warns or fails."""

    name: str
    status: Status
    measured: str
    """The reason if the status is n/a."""
    limit: str = ""
    remedy: str = ""
    """The remedy; shown if the status is WARN or FAIL."""
    where: str = ""
    """The process and its host, if not all processes have the same row."""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """The numbers in `measured`, with their unit in the name."""

    @property
    def failed(self) -> bool:
        return self.status == "FAIL"

    @property
    def has_problem(self) -> bool:
        return self.status in ("WARN", "FAIL")


def row(measured: str, *, fail: bool = False, warn: bool = False, limit: str = "", remedy: str = "") -> Row:
    """Returns a row with the name of its check; it passes unless one of the conditions holds."""
    status: Status = "FAIL" if fail else "WARN" if warn else "PASS"
    return Row("", status, measured, limit, "" if status == "PASS" else remedy)


def named(name: str, measured: str, *, fail: bool = False, limit: str = "", **figures: float) -> Row:
    """Returns one of several rows of a check."""
    return Row(name, "FAIL" if fail else "PASS", measured, limit, figures=figures)


def absent(name: str, reason: str) -> Row:
    """Returns a row for a measurement that is not possible on this machine."""
    return Row(name, "n/a", reason)


def merge(by_process: Sequence[Sequence[Row]], hosts: Sequence[str]) -> list[Row]:
    """Returns one row for each name: the worst one, with its process if a problem is not that of all processes."""
    merged = []
    for name in dict.fromkeys(each.name for rows in by_process for each in rows):
        having = [(index, each) for index, rows in enumerate(by_process) for each in rows if each.name == name]
        index, worst = max(having, key=lambda pair: (_ORDER.index(pair[1].status), -pair[0]))
        if worst.has_problem and any(each != worst for _, each in having):
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
        """Yields the table for the terminal; with `brief`, only the rows with problems, and the summary."""
        rows = self.rows
        names = max(len(each.name) for each in rows)
        indent = " " * (names + 8)
        for each in rows:
            if brief and not each.has_problem:
                continue
            where = f" ({each.where})" if each.where else ""
            limit = f" [{each.limit}]" if each.limit else ""
            text = f"{each.status:4}  {each.name:<{names}}  {each.measured}{where}{limit}"
            yield from textwrap.wrap(text, width, subsequent_indent=indent)
            if each.remedy:
                yield from textwrap.wrap(f"-> {each.remedy}", width, initial_indent=indent, subsequent_indent=indent)
        if self.left_out:
            yield f"not checked, because of what failed: {', '.join(self.left_out)}"
        passed, warnings, failed = (sum(each.status == status for each in rows) for status in _ORDER[1:])
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
