"""Starts the scripts in `tests/support`, which need a separate process, for example for virtual devices."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
"""The packages precede `tests` in the search path, because `tests` contains a folder called `bridge`."""


def script(name: str, *arguments: object) -> list[str]:
    """Returns the command that runs `support.{name}`; start it in `ROOT` with `ENVIRONMENT`."""
    return [sys.executable, "-m", f"support.{name}", *map(str, arguments)]


def run_script(name: str, *arguments: object) -> str:
    """Runs `support.{name}` and returns its standard output; a failure shows its standard error."""
    command = script(name, *arguments)
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
