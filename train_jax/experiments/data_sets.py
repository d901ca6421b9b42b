"""The data sets of experiments: the folder of each, and the command that builds it."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath

from train_jax.experiments.table import BASE_PRESET, EXPERIMENTS, Experiment

SUDOKU_SIZES = {"sudoku9": 9, "sudoku6": 6, "study": 6, "tiny": 4}
"""Presets with generated Sudokus. There are only about a thousand different 4x4 puzzles with eight empty cells."""
SMALL_MAZES = {30: 6, 50: 10}
"""Rows of mazes at full size, and in presets with generated Sudokus."""
AUGMENTATIONS_AT_FULL_SIZE = 1000


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set that `trm build-data` makes."""

    folder: str
    options: tuple[str, ...]
    """The arguments of `trm build-data` without the output folder."""
    kind: str
    """Key of the kind of puzzle."""
    puzzles: int
    """Train puzzles, each of which is one example of an epoch."""

    def inside(self, root: str) -> DataSet:
        """Returns the data set in a folder `root` instead of `data`."""
        name = PurePath(self.folder).name
        return dataclasses.replace(self, folder=f"{root.rstrip('/')}/{name}")

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command after `trm`."""
        return ("build-data", *self.options, "--output-dir", self.folder)


def data_sets(row: Experiment, preset: str = BASE_PRESET) -> tuple[DataSet, ...]:
    """Returns the data sets of an experiment, at full size or at the size of a preset with generated Sudokus."""
    small = preset in SUDOKU_SIZES
    sets = []
    for kind in row.data:
        if kind == "sudoku":
            sets.append(_small_sudokus(row, SUDOKU_SIZES[preset]) if small else _sudoku_extreme(row))
        else:
            side = int(kind.removeprefix("maze-"))
            sets.append(_mazes(SMALL_MAZES[side] if small else side))
    return tuple(sets)


def recipes() -> dict[str, tuple[str, int]]:
    """Returns kind and train puzzles of the data sets of all experiments, at every size, by the name of its folder."""
    rows = [(row, preset) for row in EXPERIMENTS.values() for preset in (BASE_PRESET, *SUDOKU_SIZES)]
    sets = [each for row, preset in rows for each in data_sets(row, preset)]
    return {PurePath(each.folder).name: (each.kind, each.puzzles) for each in sets}


def _sudoku_extreme(row: Experiment) -> DataSet:
    usual = (row.puzzles, row.augmentations) == (1000, AUGMENTATIONS_AT_FULL_SIZE)
    folder = "data/sudoku-extreme" + ("" if usual else f"-{row.puzzles}-aug-{row.augmentations}")
    options = ("sudoku", "--source", "sapientinc/sudoku-extreme", "--subsample-size", str(row.puzzles))
    return DataSet(folder, (*options, "--num-aug", str(row.augmentations)), "sudoku-9x9", row.puzzles)


def _small_sudokus(row: Experiment, size: int) -> DataSet:
    """The data set of the preset, or for groups 4a and 4b one with a tenth of the puzzles (4x4) or augmentations."""
    folder, options = f"data/sudoku-{size}x{size}", ("sudoku", "--size", str(size))
    key, usual = f"sudoku-{size}x{size}", 500 if size == 4 else 1000
    if not row.group.startswith("exp04"):
        return DataSet(folder, options, key, usual)
    puzzles = row.puzzles // 10 if size == 4 else row.puzzles
    augmentations = row.augmentations // 10 if row.group == "exp04b" else 0
    options += ("--num-train", str(puzzles), "--num-aug", str(augmentations))
    return DataSet(f"{folder}-{puzzles}-aug-{augmentations}", options, key, puzzles)


def _mazes(side: int) -> DataSet:
    return DataSet(f"data/maze-{side}x{side}", ("maze", "--size", str(side)), f"maze-{side}", 1000)
