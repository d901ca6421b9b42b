"""The record of a proof: the rows of its parts, in `prove.json`, a Markdown table and an HTML page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from train_jax.pods.check.rows import Row
from train_jax.report.render import render_document
from train_jax.storage.files import write_text
from train_jax.storage.json_files import NUMBER, TEXT, Kind, list_of, object_of, read_object, record_of

NO_TIME = "the time was over; the same command goes on here"
_ROW = record_of(
    {
        "name": TEXT,
        "status": TEXT,
        "measured": TEXT,
        "limit": TEXT,
        "remedy": TEXT,
        "where": TEXT,
        "figures": object_of(NUMBER),
    },
    others=Kind("no field", lambda _: False),
)
_FACTS = {"facts": object_of(TEXT)}
_RECORD = _FACTS | {"running": TEXT, "parts": object_of(list_of(_ROW))}
"""Fields of prove.json."""
_REMEDY = "remove it, and measure again"
_STATUSES = ("PASS", "WARN", "FAIL", "n/a")


class Record:
    """`prove.json` in the output folder: facts, the rows of finished parts, and the name of the running part."""

    def __init__(self, folder: Path, facts: Mapping[str, Any] = MappingProxyType({})):
        """Reads the rows of an existing file; if the facts have an `identity`, only rows with the same one."""
        self.folder = folder
        self.facts = dict(facts)
        self.parts: dict[str, list[Row]] = {}
        self.running = ""
        self.begins = True
        """False if the rows of earlier processes were taken."""
        path = folder / "prove.json"
        if path.exists():
            identity = read_object(path, _FACTS, remedy=_REMEDY)["facts"].get("identity")
            self.begins = self.facts.get("identity", identity) != identity
        if not self.begins:
            there = read_object(path, _RECORD, remedy=_REMEDY)
            self.facts = there["facts"] | self.facts
            self.parts = {part: [Row(**row) for row in rows] for part, rows in there["parts"].items()}
            self.running = there["running"]

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.parts.values() for row in rows]

    def has(self, part: str) -> bool:
        """True if a part has all of its rows; a proof that is continued then does not measure it again."""
        return part in self.parts and all(row.measured != NO_TIME for row in self.parts[part])

    def lines(self, part: str) -> str:
        """Returns the rows of a part for the terminal."""
        return "".join(f"{row.status:4}  {row.name}: {_text(row)}\n" for row in self.parts[part])

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)

    def begin(self, part: str) -> None:
        """Records that a part is running, so that the next process can name the part after a crash."""
        self.running = part
        self.write()

    def end(self, part: str, rows: Iterable[Row]) -> None:
        """Writes the rows of a part."""
        self.parts[part] = list(rows)
        self.running = ""
        self.write()

    def write(self) -> None:
        """Writes the three files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = {part: [dataclasses.asdict(row) for row in rows] for part, rows in self.parts.items()}
        content = {"facts": self.facts, "running": self.running, "parts": parts}
        write_text(self.folder / "prove.json", json.dumps(content, indent=1))
        write_text(self.folder / "prove.md", "\n".join(self.markdown()) + "\n")
        write_text(self.folder / "prove.html", self.page())

    def markdown(self) -> Iterator[str]:
        """Yields the lines of the table."""
        yield from (f"- {name}: {value}" for name, value in self.facts.items())
        yield ""
        yield f"| {' | '.join(_TITLES)} |"
        yield "|---" * len(_TITLES) + "|"
        for cells in self._table():
            yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        yield ""
        yield self.summary()

    def summary(self) -> str:
        """Returns the number of rows by status."""
        counts = {status: sum(row.status == status for row in self.rows) for status in _STATUSES}
        return f"{len(self.rows)} rows: {', '.join(f'{count} {status}' for status, count in counts.items())}"

    def page(self) -> str:
        """Returns the HTML page."""
        table = {"titles": _TITLES, "rows": list(self._table())}
        return render_document("proof.html.j2", title="trm prove", facts=self.facts, summary=self.summary(), **table)

    def _table(self) -> Iterator[tuple[str, ...]]:
        for part, rows in self.parts.items():
            for row in rows:
                yield part, row.name, row.status, _text(row), row.limit


_TITLES = ("part", "row", "status", "measured", "limit")


def _text(row: Row) -> str:
    where = f" ({row.where})" if row.where else ""
    remedy = f"; {row.remedy}" if row.remedy else ""
    return f"{row.measured}{where}{remedy}"
