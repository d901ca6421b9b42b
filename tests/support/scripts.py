"""Starts the modules of `tests/support` that need a process of their own, such as for a number of virtual devices."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
"""Finds the packages before `tests/bridge`, and `support`."""


def script(name: str, *arguments: object) -> list[str]:
    """The command that runs `support.{name}`; start it in `ROOT` with `ENVIRONMENT`."""
    return [sys.executable, "-m", f"support.{name}", *map(str, arguments)]


def run_script(name: str, *arguments: object) -> str:
    """Runs `support.{name}` to its end and returns its standard output; a failure shows its standard error."""
    command, environment = script(name, *arguments), os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
