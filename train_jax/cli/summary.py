"""`trm summary RUN_DIR`: prints the results of a run from its files."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from train_jax.report.commands import commands_of
from train_jax.run.folder import find_run, read_fields, read_finished
from train_jax.run.tracking import duration, read_metrics


@dataclasses.dataclass(frozen=True)
class Summary:
    """Print the results of a run. Nothing is computed."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it: a folder, or gs://bucket/folder."""


def main(config: Summary) -> None:
    folder = find_run(config.run_dir)
    fields = read_fields(folder)
    if not folder.finished.exists():
        records = read_metrics(folder)
        reached = f"step {records[-1]['step']}" if records else "no metrics yet"
        print(f"{config.run_dir} is not finished ({reached}); continue it with `trm train`")
        return
    commands = commands_of(fields["task"])
    figures = read_finished(folder, commands.figures)
    print(commands.summary(figures, folder, "EMA" if fields["ema_decay"] else "raw"))
    print(f"training time {duration(figures['train_seconds'])} for {figures['train_steps']:.0f} steps")
    check = commands.export_check(folder)
    if check is not None:
        print(check)
    for path, what in ((folder.weights, "weights under PyTorch names"), (folder.report, "report")):
        if path.exists():
            print(f"{what}: {relative(path)}")


def relative(path: Path) -> Path:
    """Returns the path relative to the current folder if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
