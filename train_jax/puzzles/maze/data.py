"""`trm build-data maze`: data sets of generated mazes, or from the public Maze-Hard tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import arg

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.puzzles.building import (
    RuleSetData,
    TableRow,
    check_room,
    equivalents,
    problem_with,
    read_rows,
    reject_options,
    split_of,
    subsample,
)
from train_jax.puzzles.maze.generator import ONE_PATH, Style, generate, usual_min_path
from train_jax.puzzles.maze.grid import (
    GOAL,
    LARGEST,
    OPEN,
    SMALLEST,
    START,
    Mazes,
    Paths,
    all_turns,
    are_mazes,
    are_shortest_paths,
    fingerprints,
    keeps_inputs,
    search,
    size_of,
    tokens_of,
)
from train_jax.puzzles.maze.kind import MazeKind
from train_jax.puzzles.metadata import Metadata, Splits
from train_jax.storage.new_dataset import Progress

PathSteps = Annotated[int, Range(0, LARGEST**2)]
ROWS = 4096
"""Number of rows of a table that are processed at a time."""


@dataclass(frozen=True)
class MazeData(RuleSetData):
    """Mazes and their shortest paths: generated or, with --source, from the public Maze-Hard tables.

    No two generated mazes are equivalent, and every path is checked. A data set with the same options is kept.
    """

    output_dir: Annotated[Path | None, arg(help_behavior_hint="(default: data/maze-30x30)")] = None
    """Output folder, or gs://bucket/folder."""
    source: Annotated[str | None, arg(help_behavior_hint="")] = None
    """Tables: folder, bucket (gs://…) or hub id, such as sapientinc/maze-30x30-hard-1k."""
    augment: bool = False
    """Add the other seven rotations and reflections of every train maze."""
    min_path: Annotated[PathSteps | None, arg(help_behavior_hint="(default: by size, 110 for 30)")] = None
    """Shortest paths have more than this number of steps."""
    max_path: Annotated[PathSteps | None, arg(help_behavior_hint="(default: no limit)")] = None
    """Generated: shortest paths have at most this number of steps."""
    size: Annotated[int | None, Range(SMALLEST, LARGEST), arg(help_behavior_hint="(default: 30)")] = None
    """Generated: rows and columns, 4 to 50."""
    kind: Annotated[Style | None, arg(help_behavior_hint="(default: corridors)")] = None
    """Generated: corridors (one shortest path), perfect (one path between any two cells), or random walls as
    published (many shortest paths)."""

    MAKER = "maze"
    HUB_EXAMPLE = "sapientinc/maze-30x30-hard-1k"

    @property
    def rows(self) -> int:
        return 30 if self.size is None else self.size

    @property
    def style(self) -> Style:
        return self.kind or "corridors"

    @property
    def directory(self) -> Path:
        name = f"maze-{self.rows}x{self.rows}" if self.source is None else "maze-hard"
        return self.output_dir or Path("data") / name

    @property
    def least_path(self) -> int:
        """Bound of `min_path` for generated mazes."""
        return usual_min_path(self.rows) if self.min_path is None else self.min_path

    def check(self) -> None:
        super().check()
        if self.source is not None:
            reject_options(self, "does not go with --source", "size", "kind", "max_path")
        elif self.max_path is not None and self.max_path <= self.least_path:
            raise UserError(
                f"--max-path {self.max_path}: shortest paths have more than {self.least_path} steps (--min-path); "
                f"use at least {self.least_path + 1}, or a lower --min-path"
            )

    @property
    def recipe(self) -> dict[str, Any]:
        last = {"augment": self.augment, "seed": self.seed}
        if self.source is not None:
            return {"min_path": self.min_path, "subsample_size": self.subsample_size} | last
        train, test = self.counts(self.rows)
        paths = {"size": self.rows, "kind": self.style, "min_path": self.least_path}
        most = {} if self.max_path is None else {"max_path": self.max_path}
        return paths | {"num_train": train, "num_test": test} | last | most

    def splits(self, tables: Mapping[str, Path], progress: Progress) -> tuple[Splits, dict[str, Any]]:
        mazes = self._from_tables(tables, progress) if tables else self._generated(progress)
        findings = equivalents(*(fingerprints(each.inputs) for each in mazes.values()))
        for split, each in mazes.items():
            paths = search(each.inputs)
            findings[f"{split}_path_steps"] = f"{paths.steps.min()} to {paths.steps.max()}"
            findings[f"{split}_mazes_with_several_shortest_paths"] = int((~paths.unique).sum())
        augment = {"train": self.augment, "test": False}
        return {split: split_arrays(each, augment=augment[split]) for split, each in mazes.items()}, findings

    def _generated(self, progress: Progress) -> dict[str, Mazes]:
        """Generates mazes, no two of them equivalent.

        An independent search checks that every solution is a shortest path and, except for `walls`, that it is the
        only one.
        """
        train, test = self.counts(self.rows)
        check_room(self.directory, MazeKind(self.rows), train=train, test=test, copies=8 if self.augment else 1)
        rng = np.random.default_rng(self.seed)
        mazes = generate(train + test, self.rows, self.least_path, self.style, rng, progress, max_path=self.max_path)
        paths = search(mazes.inputs)
        good = are_shortest_paths(*mazes, paths) & (paths.steps > self.least_path)
        good &= paths.unique | (self.style not in ONE_PATH)
        if self.max_path is not None:
            good &= paths.steps <= self.max_path
        if not good.all():
            raise RuntimeError(
                f"the search does not confirm the solution of maze {int(np.argmin(good))} of {self.recipe}"
            )
        parts = {"train": slice(train), "test": slice(train, None)}
        return {split: Mazes(*(array[part] for array in mazes)) for split, part in parts.items()}

    def _from_tables(self, tables: Mapping[str, Path], progress: Progress) -> dict[str, Mazes]:
        """Reads the tables. Subsampling keeps the test split."""
        mazes = {split: read_maze_table(path, self.min_path, progress) for split, path in tables.items()}
        cells = {split: each.inputs.shape[1] for split, each in mazes.items()}
        if cells["train"] != cells["test"]:
            raise UserError(
                f"--source {self.source}: the mazes have {cells['train']} cells in train.csv and {cells['test']} in "
                "test.csv, expected the same number; use tables of one size"
            )
        if self.subsample_size is not None:
            train = mazes["train"]
            rng = np.random.default_rng(self.seed)
            chosen = subsample(len(train.inputs), self.subsample_size, rng)
            mazes["train"] = Mazes(*(array[chosen] for array in train))
        return mazes


def split_arrays(mazes: Mazes, *, augment: bool) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Returns the arrays of a split. A group is a maze and, if augmented, its seven images in the published order."""
    inputs, labels = (all_turns(array) if augment else array[:, None] for array in mazes)
    return split_of(inputs, labels, MazeKind(round(inputs.shape[2] ** 0.5)))


# ---- tables


def read_maze_table(path: Path, min_path: int | None, progress: Progress) -> Mazes:
    """Reads the mazes of a table whose shortest path has more than `min_path` steps.

    Every row is checked, also the rows that `min_path` removes. Raises `UserError` with the file, the line and the
    error. The rating column is not used; in the published data set it is the length of the path.
    """
    cells: list[int] = []

    def problem_of(row: list[str]) -> str:
        if not cells:  # the first maze; all others must have the same number
            cells.append(len(row[1]) if len(row) > 1 else 0)
        if size_of(cells[0]) is None:
            squares = f"{SMALLEST}x{SMALLEST} to {LARGEST}x{LARGEST}"
            return f"the question has {cells[0]} cells, expected a square of {squares}"
        return problem_with(row, cells[0])

    remedy = f"use the tables of {MazeData.HUB_EXAMPLE}"
    parts = read_rows(path, _read_chunk, problem_of, rows=ROWS, remedy=remedy, progress=progress)
    least = 0 if min_path is None else min_path
    hard = [[array[paths.steps > least] for array in part] for part, paths in parts]
    mazes = Mazes(*map(np.concatenate, zip(*hard, strict=True)))
    if not len(mazes.inputs):
        raise UserError(f"{path} has no maze with a path of more than {min_path} steps; use a lower --min-path")
    return mazes


def _read_chunk(chunk: Sequence[TableRow]) -> tuple[tuple[Mazes, Paths], dict[str, np.ndarray]]:
    """Returns well-formed rows with their shortest paths, and which of them are wrong."""
    mazes = Mazes(*(np.stack([tokens_of(row[column]) for _, row in chunk]) for column in (1, 2)))
    no_maze = ~are_mazes(mazes.inputs)
    mazes.inputs[no_maze] = OPEN  # any maze that can be searched
    mazes.inputs[no_maze, :2] = START, GOAL
    paths = search(mazes.inputs)
    return (mazes, paths), {
        "the question does not consist of '#', ' ', one 'S' and one 'G'": no_maze,
        "the goal cannot be reached": paths.steps < 0,
        "the answer is not the question with some open cells as 'o'": ~keeps_inputs(*mazes),
        "the answer is not a shortest path": ~are_shortest_paths(*mazes, paths),
    }
