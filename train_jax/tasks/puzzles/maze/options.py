"""The options of `trm build-data maze`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.tasks.progress import Progress
from train_jax.tasks.puzzles.maze.dataset import build_from_tables, build_generated
from train_jax.tasks.puzzles.maze.generator import Style, usual_min_path
from train_jax.tasks.puzzles.maze.grid import LARGEST, SMALLEST
from train_jax.tasks.puzzles.options import Puzzles, Seed, check_option_ranges, reject_options

PathSteps = Annotated[int, Range(0, LARGEST**2)]
NUM_TRAIN, NUM_TEST = 1000, 1000
NUM_TRAIN_4X4, NUM_TEST_4X4 = 500, 250
"""There are only about 1 350 different 4x4 mazes with a path of four steps or more."""


@dataclass(frozen=True)
class MazeData:
    """Mazes and their shortest paths: generated or, with --source, from the public Maze-Hard tables.

    No two generated mazes are equivalent, and every path is checked. A data set with the same options is kept.
    """

    output_dir: Annotated[Path | None, arg(help_behavior_hint="(default: data/maze-30x30)")] = None
    """Output folder, or gs://bucket/folder."""
    overwrite: bool = False
    """Replace an existing data set that has other options."""
    seed: Seed = 0
    """Random seed; the same options give the same bytes."""
    augment: bool = False
    """Add the other seven rotations and reflections of every train maze."""
    min_path: Annotated[PathSteps | None, arg(help_behavior_hint="(default: by size, 110 for 30)")] = None
    """Shortest paths have more steps than this."""
    max_path: Annotated[PathSteps | None, arg(help_behavior_hint="(default: no limit)")] = None
    """Generated: shortest paths have at most this number of steps."""
    size: Annotated[int | None, Range(SMALLEST, LARGEST), arg(help_behavior_hint="(default: 30)")] = None
    """Generated: rows and columns, 4 to 50."""
    kind: Annotated[Style | None, arg(help_behavior_hint="(default: corridors)")] = None
    """Generated: corridors (one shortest path), perfect (one path between any two cells), or random walls as
    published (many shortest paths)."""
    num_train: Annotated[Puzzles | None, arg(help_behavior_hint="(default: 1000; of 4x4 500)")] = None
    """Generated: number of train mazes."""
    num_test: Annotated[Puzzles | None, arg(help_behavior_hint="(default: 1000; of 4x4 250)")] = None
    """Generated: number of test mazes."""
    source: Annotated[str | None, arg(help_behavior_hint="")] = None
    """Tables: folder, bucket (gs://…) or hub id, such as sapientinc/maze-30x30-hard-1k."""
    subsample_size: Annotated[Puzzles | None, arg(help_behavior_hint="(default: all)")] = None
    """Tables: number of train mazes to draw."""

    @property
    def rows(self) -> int:
        return 30 if self.size is None else self.size

    @property
    def directory(self) -> Path:
        return self.output_dir or Path("data") / (
            f"maze-{self.rows}x{self.rows}" if self.source is None else "maze-hard"
        )

    @property
    def least_path(self) -> int:
        """The bound of `min_path` for generated mazes."""
        return usual_min_path(self.rows) if self.min_path is None else self.min_path

    def check(self) -> None:
        """Raises `UserError` if a value is out of range or options conflict."""
        check_option_ranges(self)
        if self.source is None:
            reject_options(self, "needs --source", "subsample_size")
        else:
            reject_options(self, "does not go with --source", "num_train", "num_test", "size", "kind", "max_path")
            return
        min_path = self.least_path
        if self.max_path is not None and self.max_path <= min_path:
            raise UserError(
                f"--max-path {self.max_path}: shortest paths have more than {min_path} steps (--min-path); "
                f"use at least {min_path + 1}, or a lower --min-path"
            )

    def build(self, progress: Progress) -> bool:
        """Builds the data set; returns False if it exists already."""
        self.check()
        common = {"augment": self.augment, "seed": self.seed, "overwrite": self.overwrite, "progress": progress}
        if self.source is not None:
            return build_from_tables(
                self.directory, self.source, min_path=self.min_path, subsample_size=self.subsample_size, **common
            )
        num_train, num_test = (NUM_TRAIN_4X4, NUM_TEST_4X4) if self.rows == 4 else (NUM_TRAIN, NUM_TEST)
        return build_generated(
            self.directory,
            size=self.rows,
            style=self.kind or "corridors",
            min_path=self.least_path,
            max_path=self.max_path,
            num_train=num_train if self.num_train is None else self.num_train,
            num_test=num_test if self.num_test is None else self.num_test,
            **common,
        )
