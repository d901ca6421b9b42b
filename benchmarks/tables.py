"""Common parts of the benchmarks: tables in Markdown, their JSON files, and the comparison with an earlier run."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from train_jax.run.machine import processor, versions_of_packages
from train_jax.runtime.backend import cores
from train_jax.version import commit

SLOWER = 1.1
"""Ratio to the earlier run from which a figure is reported as larger."""


@dataclasses.dataclass(frozen=True)
class Files:
    """Options for the files of a benchmark."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write all figures to this file."""
    compare: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Report the figures that are more than a tenth larger than in this file, the JSON of an earlier run."""


def header(titles: Sequence[str]) -> str:
    return f"{row(titles)}\n{'|---' * len(titles)}|"


def row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def between(text: str, name: str, rows: Sequence[str]) -> str:
    """Returns the text with other lines between the comment of that name and the next comment that ends a table."""
    start = f"<!-- {name} -->\n"
    end = "<!-- end of table -->"
    before, found, rest = text.partition(start)
    if not found:
        raise SystemExit(f"no line {start.strip()} in the page")
    return before + start + "\n".join(rows) + "\n" + end + rest.partition(end)[2]


def figures_before(files: Files) -> dict[str, float]:
    """Returns the figures of `--compare` by name, empty without it; exit status 2 if they are of another machine."""
    if files.compare is None:
        return {}
    try:
        earlier = json.loads(files.compare.read_text())
        machine = earlier["machine"]
        figures = {name: float(value) for name, value in earlier["figures"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _refuse(f"{files.compare} cannot be read ({error!r}); give the --json FILE of an earlier run")
    if machine != processor():
        _refuse(f"{files.compare} is of {machine}, this machine is {processor()}; compare on one machine")
    return figures


def larger(figures: Mapping[str, float], before: Mapping[str, float]) -> list[str]:
    """Returns a line for every figure that became larger."""
    return [
        f"{name}: {value:.4g}, before {before[name]:.4g}"
        for name, value in figures.items()
        if value > SLOWER * before.get(name, float("inf"))
    ]


def finish(files: Files, figures: Mapping[str, float], before: Mapping[str, float], device: str, **more: Any) -> int:
    """Prints the machine, writes the JSON and reports what became larger; returns the exit status, 1 if something did.

    `figures` are those of which less is better, such as `baseline train, ms`; `more` only goes into the JSON.
    """
    today = datetime.date.today()
    print(f"\n{cores()} cores of {processor()}, {device}, {today}, {commit('')}")
    if files.json is not None:
        facts = {"machine": processor(), "date": str(today), "commit": commit(None), "device": device}
        facts |= {"versions": versions_of_packages(), "command": sys.argv, "figures": dict(figures)}
        files.json.write_text(json.dumps(facts | more, indent=1))
    worse = larger(figures, before)
    print("".join(f"larger: {line}\n" for line in worse), end="")
    return int(bool(worse))


def _refuse(line: str) -> Any:
    print(line, file=sys.stderr)
    raise SystemExit(2)
