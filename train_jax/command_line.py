"""Reads a stage's arguments into its dataclass, with tyro; what cannot be read is one line, as every user's mistake."""

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import tyro

from train_jax.errors import UserError

WIDE = "5000"
"""Columns, so that tyro wraps nothing that is put on one line here."""


def parse(command: Any, argv: list[str], *, prog: str, reader: Callable[..., Any] = tyro.cli, **more: Any) -> Any:
    """What `tyro.cli`, or another of its readers, makes of the arguments; `--help` prints and exits as ever.

    Raises `UserError` where tyro would print a box.
    """
    said = io.StringIO()
    asks_for_help = bool({"-h", "--help"} & set(argv))
    try:
        with contextlib.redirect_stderr(said), contextlib.nullcontext() if asks_for_help else _wide():
            return reader(command, args=argv, prog=prog, **more)
    except SystemExit:
        if not said.getvalue():
            raise
    raise UserError(_one_line(said.getvalue()))


@contextlib.contextmanager
def _wide() -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDE
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _one_line(box: str) -> str:
    """The message of tyro's box, the options it proposes or explains, and where to read more.

    Sections lie between rules, the title first; boxes are drawn with spaces and hyphens where stdout knows no Unicode.
    """
    sections: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        line = line.strip(" │")
        if line.startswith("╭") or (set(line) and set(line) <= set("─-╰╯")):
            sections.append([])
        elif line:
            sections[-1].append(line)
    message, *more = (" ".join(section) for section in sections[1:] if section)
    message = message.rstrip(".:")
    proposed = [line for section in sections[2:] for line in section if line.startswith("-")]
    if proposed:
        message += f"; {'expected' if message.startswith('Error parsing') else 'perhaps'} {' or '.join(proposed[:3])}"
    return f"{message}; see {re.sub('.* (run:?|see) ', '', more[-1])}"
