"""`trm status RUN…`: shows progress, speed and health of runs, and where their time went."""

import dataclasses
import json
import math
import shutil
from typing import Annotated, Any

import tyro

from train_jax.report.status_table import status_table
from train_jax.run.status import find_runs, read_status


@dataclasses.dataclass(frozen=True)
class Status:
    """Show runs: step, loss, accuracy, speed, time left, last checkpoint, goodput (the share of the wall time in steps
    that count), health. Only their files are read."""

    run_dirs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders, or folders of runs, such as the root of a sweep."""
    json: bool = False
    """Print all facts as JSON: a list with an object for each run."""


def main(config: Status) -> None:
    runs = [read_status(folder) for folder in find_runs(config.run_dirs)]
    if config.json:
        print(json.dumps([_finite(dataclasses.asdict(run)) for run in runs], indent=1))
    else:
        print(status_table(runs, width=max(72, shutil.get_terminal_size().columns)))


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with null for NaN and infinities, which JSON does not have."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields.items()}
