"""`trm build-data`: makes, converts or inspects a data set."""

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.report.built import build_summary, inspected, samples
from train_jax.tasks.puzzles.arc.dataset import build_arc
from train_jax.tasks.puzzles.inspection import inspect
from train_jax.tasks.puzzles.maze import dataset as maze_dataset
from train_jax.tasks.puzzles.maze.generator import Kind, usual_min_path
from train_jax.tasks.puzzles.maze.grid import LARGEST, SMALLEST
from train_jax.tasks.puzzles.progress import ProgressLine
from train_jax.tasks.puzzles.sudoku import dataset as sudoku_dataset
from train_jax.tasks.puzzles.sudoku.grid import geometry_of_size

DEFAULTS_BY_SIZE = {
    4: {"num_train": 500, "num_test": 250, "num_empty": 8},
    6: {"num_train": 1000, "num_test": 1000, "num_empty": 18},
    9: {"num_train": 1000, "num_test": 1000, "num_empty": 50},
}
"""There are only about a thousand different 4x4 puzzles with eight empty cells and one solution."""


@dataclass(frozen=True)
class SudokuData:
    """Sudokus with exactly one solution, or the public Sudoku-Extreme tables with --source.

    Generated train and test puzzles are all different under the symmetries of Sudoku (digits, bands, rows, stacks,
    columns and, for 4x4 and 9x9, transposition). A data set that is already there is left alone.
    """

    output_dir: Path | None = None
    """Where to write it; by default data/sudoku-4x4, data/sudoku-6x6, data/sudoku-9x9 or, with --source,
    data/sudoku-extreme."""

    size: int = 9
    """Cells in a row: 4 (boxes of 2 rows x 2 columns), 6 (2 x 3) or 9 (3 x 3)."""

    num_train: int | None = None
    """Generated train puzzles, before augmentation; by default 1000 (500 of size 4)."""

    num_test: int | None = None
    """Generated test puzzles; by default 1000 (250 of size 4)."""

    num_empty: int | None = None
    """Empty cells of every generated puzzle; by default half the cells (8, 18) for sizes 4 and 6, and 50 for 9, or with
    --min-difficulty as many as each puzzle allows."""

    num_aug: int = 0
    """Random symmetries of every train puzzle to add to it; 1000 is usual for Sudoku-Extreme."""

    seed: int = 0
    """Seed of everything drawn here; the same options and seed give the same bytes."""

    source: str | None = None
    """Convert the Sudoku-Extreme tables instead: a folder or bucket (gs://…) with train.csv and test.csv, or a Hugging
    Face hub id such as sapientinc/sudoku-extreme."""

    subsample_size: int | None = None
    """With --source: draw so many of its train puzzles; by default all."""

    min_difficulty: int | None = None
    """Leave out easier puzzles, from train and test; by default none. Difficulty is the guesses that our solver needs:
    of 9x9 puzzles with as many cells empty as can be, 59 % need one, 14 % five, 3 % ten, 0.5 % twenty. With --source it
    is the tables' own rating, which counts another solver's backtracks; a build says how far both agree."""

    overwrite: bool = False
    """Replace a data set of other options in the output directory."""

    def run(self) -> None:
        geometry = geometry_of_size(self.size)
        default_name = f"sudoku-{geometry}" if self.source is None else "sudoku-extreme"
        directory = self.output_dir or Path("data") / default_name
        started = time.monotonic()
        progress = ProgressLine()
        if self.source is None:
            reject(self, "needs --source", "subsample_size")
            given = {name: getattr(self, name) for name in ("num_train", "num_test", "num_empty")}
            chosen = {
                name: DEFAULTS_BY_SIZE[self.size][name] if value is None else value for name, value in given.items()
            }
            if self.min_difficulty is not None:
                chosen["num_empty"] = self.num_empty
            built = sudoku_dataset.build_generated(
                directory,
                geometry,
                **chosen,
                min_difficulty=self.min_difficulty,
                num_aug=self.num_aug,
                seed=self.seed,
                overwrite=self.overwrite,
                progress=progress,
            )
        else:
            reject(self, "does not go with --source", "num_train", "num_test", "num_empty")
            if self.size != 9:
                raise UserError(f"--size {self.size} with --source: the tables hold 9x9 Sudokus; leave --size out")
            built = sudoku_dataset.build_from_tables(
                directory,
                self.source,
                subsample_size=self.subsample_size,
                min_difficulty=self.min_difficulty,
                num_aug=self.num_aug,
                seed=self.seed,
                overwrite=self.overwrite,
                progress=progress,
            )
        progress.clear()
        print(build_summary(directory, built, time.monotonic() - started))


@dataclass(frozen=True)
class MazeData:
    """Mazes with a shortest path that is longer than a bound, or the public Maze-Hard tables with --source.

    Generated train and test mazes all differ under the eight turns of the square, and with start and goal exchanged.
    Every solution is confirmed by a search that shares nothing with the generator. A data set that is already there is
    left alone.
    """

    output_dir: Path | None = None
    """Where to write it; by default data/maze-30x30 or, with --source, data/maze-hard."""

    size: int | None = None
    """Rows and columns, 5 to 50; by default 30."""

    kind: Kind | None = None
    """corridors (default): winding corridors with a few loops and exactly one shortest path, so that one answer is
    right. walls: the published procedure, 30 to 50 % of the cells walls at random, usually with many shortest paths, of
    which the solution takes the first of up, left, down and right at every step."""

    min_path: int | None = None
    """Shortest paths have more steps than this; by default as hard as the published 110 for 30x30 (29 for 10x10, 203
    for 50x50), with --source no bound."""

    num_train: int | None = None
    """Generated train mazes, before augmentation; by default 1000."""

    num_test: int | None = None
    """Generated test mazes; by default 1000."""

    augment: bool = False
    """Add the other seven turns of every train maze to it."""

    seed: int = 0
    """Seed of everything drawn here; the same options and seed give the same bytes."""

    source: str | None = None
    """Convert the public tables instead: a folder or bucket (gs://…) with train.csv and test.csv, or a Hugging Face hub
    id such as sapientinc/maze-30x30-hard-1k."""

    subsample_size: int | None = None
    """With --source: draw so many of its train mazes; by default all."""

    overwrite: bool = False
    """Replace a data set of other options in the output directory."""

    def run(self) -> None:
        size = 30 if self.size is None else self.size
        directory = self.output_dir or Path("data") / (f"maze-{size}x{size}" if self.source is None else "maze-hard")
        started = time.monotonic()
        progress = ProgressLine()
        common = {"augment": self.augment, "seed": self.seed, "overwrite": self.overwrite, "progress": progress}
        if self.source is None:
            reject(self, "needs --source", "subsample_size")
            if not SMALLEST <= size <= LARGEST:
                raise UserError(f"--size {size}: mazes have {SMALLEST} to {LARGEST} rows; use a size in that range")
            built = maze_dataset.build_generated(
                directory,
                size=size,
                kind=self.kind or "corridors",
                min_path=usual_min_path(size) if self.min_path is None else self.min_path,
                num_train=1000 if self.num_train is None else self.num_train,
                num_test=1000 if self.num_test is None else self.num_test,
                **common,
            )
        else:
            reject(self, "does not go with --source", "num_train", "num_test", "size", "kind")
            built = maze_dataset.build_from_tables(
                directory, self.source, min_path=self.min_path, subsample_size=self.subsample_size, **common
            )
        progress.clear()
        print(build_summary(directory, built, time.monotonic() - started))


ARC_SUBSETS = {1: ("training", "evaluation", "concept"), 2: ("training2", "evaluation2", "concept")}
ARC_TEST_SUBSETS = {1: ("evaluation",), 2: ("evaluation2",)}


@dataclass(frozen=True)
class ArcData:
    """ARC-AGI puzzles from the official JSON files, with random turns, colour permutations and places.

    The test split holds the test examples of --test-subsets; their demonstrations, and everything of the other subsets,
    are trained on. The test split is augmented too, for voting. A data set that is already there is left alone; a build
    that was killed starts again (about a minute for 1000 augmentations), the same whatever the number of workers.
    """

    source: str
    """Folder with the official files (arc-agi_training_challenges.json, arc-agi_training_solutions.json, …), or the
    beginning of their paths up to the subset's name."""

    output_dir: Path | None = None
    """Where to write it; by default data/arc1concept-aug-1000 or the like. 1000 augmentations take 7 GB."""

    edition: Literal[1, 2] = 1
    """ARC-AGI-1 or ARC-AGI-2: decides the subsets where they are not given."""

    subsets: tuple[str, ...] = ()
    """Which subsets to read; by default training evaluation concept, or training2 evaluation2 concept."""

    test_subsets: tuple[str, ...] = ()
    """Which of them are tested; by default evaluation, or evaluation2."""

    num_aug: int = 1000
    """Different augmentations of every puzzle to add to it; a puzzle that looks alike in many gets fewer."""

    seed: int = 42
    """Seed of everything drawn here, below 2**32. Without augmentations the published builder's arrays for it."""

    workers: int = 0
    """Threads; 0 takes one for each core."""

    overwrite: bool = False
    """Replace a data set of other options in the output directory."""

    def run(self) -> None:
        subsets = self.subsets or ARC_SUBSETS[self.edition]
        directory = self.output_dir or Path("data") / f"arc{self.edition}concept-aug-{self.num_aug}"
        if self.subsets and self.output_dir is None:
            raise UserError(f"--subsets {' '.join(subsets)} needs --output-dir; give the data set a place of its own")
        started = time.monotonic()
        progress = ProgressLine()
        built = build_arc(
            directory,
            self.source,
            subsets=subsets,
            test_subsets=self.test_subsets or ARC_TEST_SUBSETS[self.edition],
            num_aug=self.num_aug,
            seed=self.seed,
            workers=self.workers,
            overwrite=self.overwrite,
            progress=progress,
        )
        progress.clear()
        print(build_summary(directory, built, time.monotonic() - started))


@dataclass(frozen=True)
class Inspect:
    """Kind a data set over: counts, recipe, disk size, examples, what occurs twice, and what of the test set is also in
    the training set, as it is or under the puzzle's symmetries. Nothing is written."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The data set, made here or by the published builders."""

    examples: int = 1
    """Examples of each split to draw."""

    def run(self) -> None:
        if self.examples < 0:
            raise UserError(f"--examples {self.examples}: expected at least 0; use 0 to draw none")
        progress = ProgressLine()
        facts = inspect(self.directory, progress)
        progress.clear()
        print(inspected(self.directory, facts))
        styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        for text in samples(self.directory, self.examples, shutil.get_terminal_size().columns, styled=styled):
            print(f"\n{text}")


def reject(options: SudokuData | MazeData, reason: str, *names: str) -> None:
    """Raises `UserError` for the first of these options that is given."""
    for name in names:
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)} {reason}; leave it out")


COMMANDS = {"sudoku": SudokuData, "maze": MazeData, "arc": ArcData, "inspect": Inspect}


def main(config: SudokuData | MazeData | ArcData | Inspect) -> None:
    config.run()


def cli(argv: list[str]) -> None:
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UserError(f"unknown kind of data {argv[0]!r}; one of {', '.join(COMMANDS)}")
    main(
        parse(
            COMMANDS,
            argv,
            prog="trm build-data",
            reader=tyro.extras.subcommand_cli_from_dict,
            description="Makes, converts or inspects a data set.",
        )
    )
