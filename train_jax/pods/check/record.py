"""The rows of a proof, their file `prove.json`, a Markdown table and an HTML page."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from train_jax.storage.files import write_text
from train_jax.storage.json_files import NUMBER, TEXT, Kind, list_of, object_of, read_object, record_of

Status = Literal["PASS", "FAIL", "n/a"]
NO_TIME = "the time was over; the same command goes on here"


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement; for a row that is n/a, `measured` is the reason."""

    name: str
    status: Status
    measured: str
    limit: str = ""
    part: str = ""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """The numbers in `measured`, with their unit in the name."""


_ROW = record_of(
    {"name": TEXT, "status": TEXT, "measured": TEXT, "limit": TEXT, "part": TEXT, "figures": object_of(NUMBER)},
    others=Kind("no field", lambda _: False),
)
_RECORD = {"facts": object_of(TEXT), "running": TEXT, "parts": object_of(list_of(_ROW))}
"""Fields of prove.json."""


def passed(name: str, measured: str, *, fail: bool = False, limit: str = "", **figures: float) -> Row:
    """Returns a row that passes unless `fail`."""
    return Row(name, "FAIL" if fail else "PASS", measured, limit, figures=figures)


def absent(name: str, reason: str) -> Row:
    """Returns a row for a measurement that is not possible on this machine."""
    return Row(name, "n/a", reason)


class Record:
    """`prove.json` in the output folder: facts, the rows of finished parts, and the name of the running part."""

    def __init__(self, folder: Path, facts: Mapping[str, Any] = MappingProxyType({})):
        """Reads the rows of an existing file; if the facts have an `identity`, only rows with the same one."""
        self.folder, self.facts = folder, dict(facts)
        self.parts: dict[str, list[Row]] = {}
        self.running = ""
        self.begins = True
        """False if the rows of earlier processes were taken."""
        path = folder / "prove.json"
        if path.exists():
            there = read_object(path, _RECORD, remedy="remove it, and measure again")
            self.begins = self.facts.get("identity", there["facts"].get("identity")) != there["facts"].get("identity")
            if not self.begins:
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
        return "".join(f"{row.status:4}  {row.name}: {row.measured}\n" for row in self.parts[part])

    @property
    def failed(self) -> bool:
        return any(row.status == "FAIL" for row in self.rows)

    def begin(self, part: str) -> None:
        """Records that a part is running, so that the next process can name the part after a crash."""
        self.running = part
        self.write()

    def end(self, part: str, rows: Iterable[Row]) -> None:
        """Writes the rows of a part."""
        self.parts[part] = [dataclasses.replace(row, part=part) for row in rows]
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
        yield "| part | row | status | measured | limit |"
        yield "|---|---|---|---|---|"
        for row in self.rows:
            cells = (row.part, row.name, row.status, row.measured, row.limit)
            yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        yield ""
        yield self.summary()

    def summary(self) -> str:
        """Returns the number of rows by status."""
        counts = [f"{sum(row.status == status for row in self.rows)} {status}" for status in ("PASS", "FAIL", "n/a")]
        return f"{len(self.rows)} rows: {', '.join(counts)}"

    def page(self) -> str:
        """Returns the HTML page."""
        facts = "".join(f"<dt>{html.escape(k)}<dd>{html.escape(str(v))}" for k, v in self.facts.items())
        rows = "".join(
            f'<tr class="{row.status[0]}">'
            + "".join(f"<td>{html.escape(x)}" for x in (row.part, row.name, row.status, row.measured, row.limit))
            for row in self.rows
        )
        titles = "".join(f"<th>{title}" for title in ("part", "row", "status", "measured", "limit"))
        return f"{_HEAD}<dl>{facts}</dl><p>{self.summary()}</p><table><tr>{titles}{rows}</table>\n"


_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>trm prove</title><style>
body{font:15px/1.5 system-ui;margin:2rem auto;max-width:75rem;padding:0 1rem;color-scheme:light dark}
td,th{text-align:left;vertical-align:top;padding:.2rem .6rem;border-top:1px solid #8884}
dl{display:grid;grid-template-columns:max-content 1fr;gap:0 1rem}dd{margin:0}
.F td:nth-child(3){color:#c33;font-weight:bold}.n{opacity:.6}</style><h1>trm prove</h1>"""
