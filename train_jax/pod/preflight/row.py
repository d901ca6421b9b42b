"""The result of a check: a row of one process, and the rows of all processes as one."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any, Literal

from train_jax.errors import PreemptedError
from train_jax.runtime.coordination import exchange, place

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


def row(name: str, measured: str, *, fail: bool = False, warn: bool = False, limit: str = "", remedy: str = "") -> Row:
    """A row that passes unless one of the conditions holds."""
    status: Status = "FAIL" if fail else "WARN" if warn else "PASS"
    return Row(name, status, measured, limit, "" if status == "PASS" else remedy)


def guarded(name: str, check: Callable[[], Row]) -> Row:
    """The row of a check; whatever it raises is a failure, so that the other processes do not wait for this one."""
    try:
        return check()
    except (PreemptedError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        kind = "" if hasattr(error, "STATUS") else f"{type(error).__name__}: "
        return Row(name, "FAIL", f"{kind}{reason[:400]}")


def gather_rows(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of all processes. Collective, without the devices."""
    texts = exchange("preflight rows", json.dumps([dataclasses.asdict(each) for each in rows]))
    return [[Row(**fields) for fields in json.loads(text)] for text in texts]


def merge(by_process: Sequence[Sequence[Row]], hosts: Sequence[str]) -> list[Row]:
    """One row for each check: the worst one, with the process that it comes from if others have another."""
    names = list(dict.fromkeys(each.name for rows in by_process for each in rows))
    return [_worst(name, by_process, hosts) for name in names]


def _worst(name: str, by_process: Sequence[Sequence[Row]], hosts: Sequence[str]) -> Row:
    having = [(index, each) for index, rows in enumerate(by_process) for each in rows if each.name == name]
    index, worst = max(having, key=lambda pair: (_ORDER.index(pair[1].status), -pair[0]))
    if worst.status == "PASS" or all(each == worst for _, each in having):
        return worst
    alike = sum(each.status == worst.status for _, each in having) - 1
    more = f", and {alike} more" if alike else ""
    return dataclasses.replace(worst, where=f"process {index} on {hosts[index]}{more}")


class Rows:
    """The rows of this process, check after check."""

    def __init__(self) -> None:
        self.own: list[Row] = []
        self.by_process: list[list[Row]] = [[]]

    def check(self, name: str, function: Callable[..., Row | None], *arguments: Any) -> bool:
        """Runs a check and keeps its row, if it has one; returns whether it did not fail here."""
        result = guarded(name, lambda: function(*arguments))  # pyright: ignore[reportArgumentType]
        if result is not None:
            self.own.append(result)
        return result is None or not result.failed

    def failed_anywhere(self, *names: str) -> bool:
        """Whether a check of these names, by default any, failed in a process. Collective."""
        self.by_process = gather_rows(self.own)
        return any(each.failed and (not names or each.name in names) for rows in self.by_process for each in rows)

    def merged(self, hosts: Sequence[str]) -> list[Row]:
        return merge(self.by_process, hosts)


def hosts_of_processes() -> list[str]:
    """The host of every process, in their order. Collective."""
    return exchange("preflight hosts", platform.node())


def is_first() -> bool:
    """Whether this is process 0; asks no backend."""
    return place()[0] == 0
