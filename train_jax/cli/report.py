"""`trm report RUN_DIR`: writes the HTML report of a run, and a picture for a README."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.report.commands import commands_of
from train_jax.report.run_page import read_run_files
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.storage.files import check_output, write_text


@dataclasses.dataclass(frozen=True)
class Report:
    """Write the report of a run as one HTML file: metrics, learning curves, configuration; puzzles after every ACT
    step and early halting, or compressors, samples and CORE of a language model."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it: a folder, or gs://bucket/folder."""
    step: str = "newest"
    """Checkpoint: newest, best (of a run with --keep-best), or its step. The results of a chosen one are in
    RUN/at-step-N."""
    price_per_hour: Annotated[float, Range(0, 10**6)] = 0.0
    """Price of the machines per hour, for the costs of the phases of a chat model; 0 shows no costs."""
    picture: Path | None = None
    """Also write an SVG for a README to this file: the learning curve and a solved puzzle. Not for language models."""
    platform: Platform = "auto"
    """Platform; on one host of a TPU pod, auto is the CPU."""


def main(config: Report) -> None:
    use_on_one_host(config.platform)
    if config.picture is not None:
        check_output(config.picture)
    files = dataclasses.replace(read_run_files(config.run_dir, config.step), price_per_hour=config.price_per_hour)
    commands = commands_of(files.config.task)
    if config.picture is not None and not commands.draws_pictures:
        raise UserError(f"--picture {config.picture} is not for runs of task {files.config.task}; omit it")
    drawing = None if config.picture is None else commands.picture(files)
    write_text(files.folder.report, commands.page(files))
    print(f"report: {files.folder.report}")
    for name, (path, text) in commands.tables(files).items():
        write_text(path, text)
        print(f"{name}: {path}")
    if config.picture is not None and drawing is not None:
        write_text(config.picture, drawing)
        print(f"picture: {config.picture}")
