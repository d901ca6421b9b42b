"""The options of `trm build-data sudoku`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from models_torch.ranges import Choices, Range
from train_jax.errors import UserError
from train_jax.tasks.progress import Progress
from train_jax.tasks.puzzles.options import Augmentations, Puzzles, Seed, check_option_ranges, reject_options
from train_jax.tasks.puzzles.sudoku.dataset import build_from_tables, build_generated
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES, geometry_of_size

DEFAULTS_BY_SIZE = {
    4: {"num_train": 500, "num_test": 250, "num_empty": 8},
    6: {"num_train": 1000, "num_test": 1000, "num_empty": 18},
    9: {"num_train": 1000, "num_test": 1000, "num_empty": 50},
}
"""There are only about a thousand different 4x4 puzzles with eight empty cells and one solution."""


@dataclass(frozen=True)
class SudokuData:
    """Sudokus with exactly one solution: generated or, with --source, from the public Sudoku-Extreme tables.

    No two generated puzzles are equivalent. A data set with the same options is kept.
    """

    output_dir: Annotated[Path | None, arg(help_behavior_hint="(default: data/sudoku-9x9)")] = None
    """Output folder, or gs://bucket/folder."""
    overwrite: bool = False
    """Replace an existing data set that has other options."""
    seed: Seed = 0
    """Random seed; the same options give the same bytes."""
    num_aug: Augmentations = 0
    """Number of random symmetries of every train puzzle to add."""
    min_difficulty: Annotated[int | None, Range(0, 10**6), arg(help_behavior_hint="(default: any)")] = None
    """Least difficulty: in guesses, or with --source in the rating of the tables."""
    size: Annotated[int, Choices(tuple(GEOMETRIES))] = 9
    """Generated: number of rows, 4, 6 or 9."""
    num_train: Annotated[Puzzles | None, arg(help_behavior_hint="(default: 1000; of 4x4 500)")] = None
    """Generated: number of train puzzles."""
    num_test: Annotated[Puzzles | None, arg(help_behavior_hint="(default: 1000; of 4x4 250)")] = None
    """Generated: number of test puzzles."""
    num_empty: Annotated[int | None, Range(0, 81), arg(help_behavior_hint="(default: 8, 18, 50 by size)")] = None
    """Generated: number of empty cells; with --min-difficulty as many as possible."""
    source: Annotated[str | None, arg(help_behavior_hint="")] = None
    """Tables: folder, bucket (gs://…) or hub id, such as sapientinc/sudoku-extreme."""
    subsample_size: Annotated[Puzzles | None, arg(help_behavior_hint="(default: all)")] = None
    """Tables: number of train puzzles to draw."""

    @property
    def directory(self) -> Path:
        name = f"sudoku-{self.size}x{self.size}" if self.source is None else "sudoku-extreme"
        return self.output_dir or Path("data") / name

    def check(self) -> None:
        """Raises `UserError` if a value is out of range or options conflict."""
        geometry_of_size(self.size)
        check_option_ranges(self)
        if self.source is None:
            reject_options(self, "needs --source", "subsample_size")
        else:
            reject_options(self, "does not go with --source", "num_train", "num_test", "num_empty")
            if self.size != 9:
                raise UserError(f"--size {self.size} with --source: the tables contain 9x9 Sudokus; omit --size")

    def build(self, progress: Progress) -> bool:
        """Builds the data set; returns False if it exists already."""
        self.check()
        common = {"min_difficulty": self.min_difficulty, "num_aug": self.num_aug, "seed": self.seed}
        common |= {"overwrite": self.overwrite, "progress": progress}
        if self.source is not None:
            return build_from_tables(self.directory, self.source, subsample_size=self.subsample_size, **common)
        given = {name: getattr(self, name) for name in DEFAULTS_BY_SIZE[self.size]}
        counts = {name: DEFAULTS_BY_SIZE[self.size][name] if value is None else value for name, value in given.items()}
        if self.min_difficulty is not None:
            counts["num_empty"] = self.num_empty
        return build_generated(self.directory, geometry_of_size(self.size), **counts, **common)
