"""`trm profile RUN`: shows where the time of profiled train steps went."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.pods.yardsticks import Measured, read_profile, tables
from train_jax.run.folder import find_run, write_text
from train_jax.storage.cache import local_folder


@dataclasses.dataclass(frozen=True)
class Profile:
    """Print where the time of profiled train steps went: by kind of work, pass, PyTorch module and operation.

    The steps are profiled by `trm train NAME --profile 5`. The trace itself is for XProf and Perfetto; see
    docs/profiling.md."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it: a folder, or gs://bucket/folder."""
    host: Annotated[int, Range(0, 10**6)] = 0
    """Process whose trace is read."""
    operations: Annotated[int, Range(0, 10**6)] = 10
    """Operations that are listed, the longest first."""
    json: str = ""
    """File for all figures as JSON; - for standard output instead of the tables."""


def main(config: Profile) -> None:
    folder = find_run(config.run_dir).profile(config.host)
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; train with --profile 5, or choose another --host")
    figures = read_profile(local_folder(folder))
    splits = {f"by_{split}": times for split, times in figures.splits.items()}
    text = json.dumps(dataclasses.asdict(dataclasses.replace(figures, splits={})) | splits, indent=1)
    if config.json not in ("", "-"):
        write_text(Path(config.json), text)
    print(text if config.json == "-" else "\n".join(_lines(figures, config)))


def _lines(figures: Measured, config: Profile) -> Iterator[str]:
    yield f"{config.run_dir}, process {config.host}: {figures.steps} steps, measured; milliseconds for a step"
    yield f"  from the first operation to the last one  {figures.wall:10.3f}"
    yield f"  in operations, all devices together       {figures.busy:10.3f}"
    yield from tables(figures.splits, {"ms": float})
    if config.operations:
        yield ""
        yield f"  {'ms':>10} {'share':>6} {'runs':>6}  by operation: kind, module, JAX primitive"
        for each in figures.operations[: config.operations]:
            where = ", ".join(filter(None, (each.kind, each.module, each.source.rpartition("/")[2])))
            share = each.milliseconds / figures.busy
            yield f"  {each.milliseconds:10.3f} {share:6.1%} {each.runs:6g}  {each.name}: {where}"
