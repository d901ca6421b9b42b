"""Compares what the commands print with a recorded text: help, states, summaries and reports of two finished runs.

    python -m campaigns.outputs                                    # compares this checkout with the record
    python -m campaigns.outputs --record                           # writes the record anew
    python -m campaigns.outputs --tree ../old --record old.txt     # records another checkout

The runs are those of tests/support/written_by_b7781048.zip. Times, dates, paths of the checkout and hashes of the code
are replaced. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import html
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("outputs.txt")
ARCHIVE = ROOT / "tests" / "support" / "written_by_b7781048.zip"

PAGES = ("data", "arch", "act", "optim", "schedule", "muon", "compute", "logging")
KINDS = ("sudoku", "maze", "arc", "text", "chat", "instructions", "inspect")
COMMANDS = (
    "train",
    "train tiny --help",
    *(f"train tiny --help {page}" for page in PAGES),
    *(f"build-data {kind} --help" for kind in KINDS),
    "nothing",
    "train nothing",
    "train exp01a --dry-run",
    "train d12 --dry-run",
    "sweep list",
    "build-data inspect sudokus",
    "build-data inspect words",
    "status puzzles text",
    "status puzzles --json",
    "summary puzzles",
    "summary text",
    "report puzzles",
    "report text",
)
REPORTS = ("puzzles", "text")

REPLACED = (
    (r"\d{4}-\d\d-\d\d( \d\d:\d\d(:\d\d)?)?( UTC)?", "DATE"),
    (r"\b\d+(\.\d+)? (days?|hours?|minutes?|min|h|s) ago", "TIME ago"),
    (r'("(checkpoint_age|silent)_seconds": )[\d.]+', r"\1TIME"),
)


def outputs() -> Iterator[str]:
    """Yields the lines of every command, run in this process and in the current folder."""
    usage = _output("--help")
    yield from _section("--help", usage)
    for stage in re.findall(r"^  ([a-z][a-z-]*)  ", usage, re.MULTILINE):
        yield from _section(f"{stage} --help", _output(f"{stage} --help"))
    for command in COMMANDS:
        yield from _section(command, _output(command))
    for run in REPORTS:
        for page in sorted(Path(run, "report").rglob("*.html")):
            yield from _section(f"text of {page}", _text_of_page(page.read_text()))


def _section(title: str, text: str) -> Iterator[str]:
    yield f"==== {title}"
    for line in text.replace(f"{Path.cwd()}/", "").splitlines():
        for pattern, replacement in REPLACED:
            line = re.sub(pattern, replacement, line)
        yield line.rstrip()


def _output(command: str) -> str:
    main = importlib.import_module("train_jax.__main__").main
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main(command.split())
        except SystemExit as stop:
            status = stop.code
    return f"{out.getvalue()}exit status {status or 0}\n"


def _text_of_page(page: str) -> str:
    """Returns the visible text of an HTML page, a line for each element; plots count by their number only."""
    plots = page.count("<svg")
    page = re.sub(r"<(style|script|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    lines = [html.unescape(line).strip() for line in re.sub(r"<[^>]*>", "\n", page).splitlines()]
    return "\n".join([f"{plots} plots", *(line for line in lines if line)])


def record(tree: Path) -> list[str]:
    """Returns the lines of a checkout, which prints them in a process of its own."""
    variables = {
        "PYTHONPATH": str(tree),
        "PYTHONSAFEPATH": "1",
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(ARCHIVE) as archive:
            archive.extractall(folder)
        out = Path(folder, "outputs.txt")
        command = [sys.executable, str(Path(__file__).resolve()), "--print", str(out)]
        done = subprocess.run(command, cwd=folder, env=os.environ | variables)
        if done.returncode:
            raise SystemExit(done.returncode)
        return out.read_text().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout of the project")
    parser.add_argument("--record", type=Path, nargs="?", const=RECORD, help="write the text, in place of a comparison")
    parser.add_argument("--against", type=Path, default=RECORD, help=f"recorded text; default: {RECORD.name}")
    parser.add_argument("--print", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.print:
        options.print.write_text("".join(f"{line}\n" for line in outputs()))
        return 0
    lines = record(options.tree.resolve())
    if options.record:
        options.record.write_text("".join(f"{line}\n" for line in lines))
        return 0
    before = options.against.read_text().splitlines()
    different = list(difflib.unified_diff(before, lines, str(options.against), str(options.tree), n=1, lineterm=""))
    print(*different, sep="\n")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
