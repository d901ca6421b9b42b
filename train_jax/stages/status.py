"""`trm status RUN…`: how far runs are, how fast, whether they are well, and where their time went."""

import dataclasses
import json
import math
import shutil
import sys
import time
from typing import Annotated, Any

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.report.status_table import status_table
from train_jax.run.status import find_runs, read_status


@dataclasses.dataclass(frozen=True)
class Status:
    """Show runs: step, loss, accuracy, speed, time left, last checkpoint, goodput (the share of the wall time in steps
    that count), health. Only their files are read."""

    run_dirs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders, or folders of runs."""
    json: bool = False
    """Print everything that is known as JSON: a list with an object for each run."""
    watch: Annotated[float, Range(0, 1e6)] = 0.0
    """Show them again after so many seconds, until Ctrl-C; 0 shows them once."""


def main(config: Status) -> None:
    while True:
        shown = _shown(config)
        if config.watch and sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")
        print(shown, flush=True)
        if not config.watch:
            return
        time.sleep(config.watch)


def _shown(config: Status) -> str:
    runs = [read_status(folder) for folder in find_runs(config.run_dirs)]
    if config.json:
        return json.dumps([_finite(run.as_dict()) for run in runs], indent=None if config.watch else 1)
    return status_table(runs, width=max(72, shutil.get_terminal_size().columns))


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """With null for NaN and infinities, which JSON does not have."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields.items()}


def cli(argv: list[str]) -> None:
    main(parse(Status, argv, prog="trm status"))
