"""`trm build-data`: generates, converts or inspects a data set."""

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse_subcommand
from train_jax.errors import check_options
from train_jax.report.terminal import build_summary, inspected, progress_of, samples
from train_jax.run.storage import path_of
from train_jax.tasks.language import text_building
from train_jax.tasks.language.chat.building import ChatData
from train_jax.tasks.language.instructions.building import InstructionData
from train_jax.tasks.language.instructions.building import build_summary as instruction_summary
from train_jax.tasks.language.text_building import TextData
from train_jax.tasks.language.text_set import read_record
from train_jax.tasks.puzzles.arc.data import ArcData
from train_jax.tasks.puzzles.inspection import inspect
from train_jax.tasks.puzzles.maze.data import MazeData
from train_jax.tasks.puzzles.sudoku.data import SudokuData


@dataclass(frozen=True)
class Inspect:
    """Prints counts, recipe, size and examples of a data set, repeated examples, and test examples in the train split.

    Examples are compared exactly and up to the symmetries of the puzzle. Nothing is written."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Folder of a data set, built by this project or by the published builders."""

    examples: Annotated[int, Range(0, 1000)] = 1
    """Number of examples of each split to show."""

    def check(self) -> None:
        """Raises `UserError` if a value is out of range."""
        check_options(self)


COMMANDS = {
    "sudoku": SudokuData,
    "maze": MazeData,
    "arc": ArcData,
    "text": TextData,
    "chat": ChatData,
    "instructions": InstructionData,
    "inspect": Inspect,
}


SUMMARIES = {
    TextData: text_building.build_summary,
    ChatData: text_building.build_summary,
    InstructionData: instruction_summary,
}
"""Functions that summarize a data set, for kinds other than puzzles."""


def main(config: SudokuData | MazeData | ArcData | TextData | ChatData | InstructionData | Inspect) -> None:
    config.check()
    started = time.monotonic()
    if isinstance(config, Inspect) and read_record(config.directory) is not None:
        print(text_building.build_summary(path_of(config.directory), False, 0))
    elif isinstance(config, Inspect):
        with progress_of() as progress:
            facts = inspect(config.directory, progress)
        print(inspected(path_of(config.directory), facts))
        styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        for text in samples(config.directory, config.examples, shutil.get_terminal_size().columns, styled=styled):
            print(f"\n{text}")
    elif isinstance(config, TextData) and config.part:
        with progress_of() as progress:
            line = config.encode_part(progress)
        print(line)
    else:
        with progress_of() as progress:
            built = config.build(progress)
        summary = SUMMARIES.get(type(config), build_summary)
        print(summary(path_of(config.directory), built, time.monotonic() - started))


def cli(argv: list[str]) -> None:
    unknown, description = "kind of data {}", "Generates, converts or inspects a data set."
    main(parse_subcommand(COMMANDS, argv, prog="trm build-data", unknown=unknown, description=description))
