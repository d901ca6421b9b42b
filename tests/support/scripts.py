"""Starts the modules of `tests/support` that need a process of their own, such as for a number of virtual devices."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def script(name: str, *arguments: object) -> list[str]:
    """The command that runs `support.{name}`; start it in `TESTS`, where Python finds it."""
    return [sys.executable, "-m", f"support.{name}", *map(str, arguments)]


def run_script(name: str, *arguments: object) -> str:
    """Runs `support.{name}` to its end and returns its standard output; a failure shows its standard error."""
    done = subprocess.run(script(name, *arguments), cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
