"""Writes the digests that the package index publishes for the pinned releases, for all platforms, beside the pins.

    pip install uv && python tests/write_hashes.py

`hashes/base.txt` has what `pip install trm-bridge` installs beside PyTorch and what PyTorch needs, and
`hashes/train.txt` what `trm-bridge[train]` adds; `hashes/base-newest.txt` has the base of constraints-newest.txt.
PyTorch's builds differ by machine, so it is installed first, without digests.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = "# Written by tests/write_hashes.py; docs/releases.md has the command that uses it.\n"


def requirements(part: str) -> list[str]:
    """Returns what pyproject.toml wants for `base` or an extra, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] if part == "base" else project["optional-dependencies"][part]
    return [line for line in listed if not re.match(r"torch\W", line)]


def resolved(wanted: list[str], pins: str, python: str) -> dict[str, str]:
    """Returns name -> the lines of a pin with its digests, of all that is wanted and what that needs."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "wanted.in")
        source.write_text("\n".join(wanted))
        command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--universal"]
        command += ["--generate-hashes", "--no-emit-package", "torch"]
        command += ["--prerelease", "allow", "--python-version", python]
        command += ["--constraints", str(ROOT / pins), str(source)]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    entries = re.split(r"^(?=\w)", text, flags=re.MULTILINE)
    return {entry.partition("==")[0]: entry for entry in entries if "==" in entry}


def main() -> None:
    base = resolved(requirements("base"), "constraints.txt", "3.11")
    newest = resolved(requirements("base"), "constraints-newest.txt", "3.13")
    train = resolved(requirements("base") + requirements("train"), "constraints.txt", "3.11")
    added = {name: lines for name, lines in train.items() if name not in base}
    (ROOT / "hashes").mkdir(exist_ok=True)
    for part, entries in (("base", base), ("base-newest", newest), ("train", added)):
        (ROOT / f"hashes/{part}.txt").write_text(HEADER + "".join(entries.values()))
        print(f"hashes/{part}.txt: {len(entries)} releases")


if __name__ == "__main__":
    main()
