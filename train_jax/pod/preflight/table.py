"""The result of all checks: as a table for the terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator

from train_jax.pod.preflight.checks import Result


def lines(result: Result, width: int, *, brief: bool = False) -> Iterator[str]:
    """Yields the table; `brief`: only rows that do not pass, and the summary."""
    names = max((len(each.name) for each in result.rows), default=0)
    indent = " " * (names + 8)
    for each in result.rows:
        if brief and each.status == "PASS":
            continue
        where = f" ({each.where})" if each.where else ""
        limit = f" [{each.limit}]" if each.limit else ""
        yield from textwrap.wrap(
            f"{each.status}  {each.name:<{names}}  {each.measured}{where}{limit}", width, subsequent_indent=indent
        )
        if each.remedy:
            yield from textwrap.wrap(
                f"-> {each.remedy}", width, initial_indent=indent, subsequent_indent=f"{indent}   "
            )
    if result.left_out:
        yield from textwrap.wrap(
            f"not checked, because of what failed: {', '.join(result.left_out)}", width, subsequent_indent="  "
        )
    yield summary(result)


def summary(result: Result) -> str:
    counts = {status: sum(each.status == status for each in result.rows) for status in ("PASS", "WARN", "FAIL")}
    verdict = "not ready" if result.failed else "ready"
    return f"preflight: {verdict}; {counts['PASS']} passed, {counts['WARN']} warnings, {counts['FAIL']} failed"


def to_json(result: Result) -> str:
    """Returns `ok`, the merged rows, and the rows of every process."""
    processes = [
        {"host": host, "rows": [dataclasses.asdict(each) for each in rows]}
        for host, rows in zip(result.hosts, result.by_process, strict=True)
    ]
    figures = {
        "ok": not result.failed,
        "rows": [dataclasses.asdict(each) for each in result.rows],
        "processes": processes,
        "not_checked": result.left_out,
    }
    return json.dumps(figures, indent=1)
