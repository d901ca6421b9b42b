"""Builds maze data sets, from generated mazes or from public tables."""

from pathlib import Path
from typing import Any

import numpy as np

from train_jax.errors import UserError
from train_jax.tasks.progress import Progress
from train_jax.tasks.puzzles.maze.check import are_shortest_paths, search
from train_jax.tasks.puzzles.maze.csv import HUB_EXAMPLE, read_maze_table
from train_jax.tasks.puzzles.maze.generator import ONE_PATH, Style, generate
from train_jax.tasks.puzzles.maze.grid import Mazes
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.maze.symmetry import all_turns, fingerprints
from train_jax.tasks.puzzles.metadata import Metadata
from train_jax.tasks.puzzles.rule_sets import IDENTIFIERS, check_room, equivalents, split_of, subsample
from train_jax.tasks.puzzles.tables import local_tables, sha256_of
from train_jax.tasks.puzzles.writing import is_built, write_dataset

MAKER_VERSION = 1
"""Stored in every recipe. Increase it when the same options give different mazes."""


def build_generated(
    directory: Path,
    *,
    size: int,
    style: Style,
    min_path: int,
    num_train: int,
    num_test: int,
    augment: bool,
    seed: int,
    overwrite: bool,
    progress: Progress,
    max_path: int | None = None,
) -> bool:
    """Builds a data set of generated mazes, no two of them equivalent. Returns False if it exists already.

    An independent search checks that every solution is a shortest path and, except for `walls`, that it is the only
    one. Raises `UserError` if no such mazes can be generated, and the errors of `is_built`.
    """
    recipe = {
        "maker": "maze",
        "maker_version": MAKER_VERSION,
        "size": size,
        "kind": style,
        "min_path": min_path,
        "num_train": num_train,
        "num_test": num_test,
        "augment": augment,
        "seed": seed,
    }
    if max_path is not None:
        recipe["max_path"] = max_path
    if is_built(directory, recipe, overwrite=overwrite):
        return False
    examples = num_train * (8 if augment else 1) + num_test
    check_room(directory, MazeKind(size), originals=num_train + num_test, examples=examples)
    rng = np.random.default_rng(seed)
    mazes = generate(num_train + num_test, size, min_path, style, rng, progress, max_path=max_path)
    paths = search(mazes.inputs)
    good = are_shortest_paths(*mazes, paths) & (paths.steps > min_path) & (paths.unique | (style not in ONE_PATH))
    if max_path is not None:
        good &= paths.steps <= max_path
    if not good.all():
        raise RuntimeError(f"the search does not confirm the solution of maze {int(np.argmin(good))} of {recipe}")
    train, test = (Mazes(*(array[part] for array in mazes)) for part in (np.s_[:num_train], np.s_[num_train:]))
    return _write(directory, train, test, recipe, augment=augment, overwrite=overwrite)


def build_from_tables(
    directory: Path,
    source: str,
    *,
    min_path: int | None,
    subsample_size: int | None,
    augment: bool,
    seed: int,
    overwrite: bool,
    progress: Progress,
) -> bool:
    """Converts public maze tables; returns False if the data set exists already. Subsampling keeps the test split."""
    options = {"min_path": min_path, "subsample_size": subsample_size, "augment": augment, "seed": seed}
    with local_tables(source, hub_example=HUB_EXAMPLE) as tables:
        recipe = {
            "maker": "maze tables",
            "maker_version": MAKER_VERSION,
            "tables_sha256": {split: sha256_of(path) for split, path in tables.items()},
            **options,
        }
        if is_built(directory, recipe, overwrite=overwrite):
            return False
        train, test = (read_maze_table(path, min_path=min_path, progress=progress) for path in tables.values())
    if train.inputs.shape[1] != test.inputs.shape[1]:
        raise UserError(
            f"--source {source}: the mazes have {train.inputs.shape[1]} cells in train.csv and "
            f"{test.inputs.shape[1]} in test.csv, expected the same number; use tables of one size"
        )
    if subsample_size is not None:
        chosen = subsample(len(train.inputs), subsample_size, np.random.default_rng(seed))
        train = Mazes(*(array[chosen] for array in train))
    return _write(directory, train, test, recipe, augment=augment, overwrite=overwrite, source=source)


def _write(
    directory: Path, train: Mazes, test: Mazes, recipe: dict, *, augment: bool, overwrite: bool, source: str = ""
) -> bool:
    splits = {"train": split_arrays(train, augment=augment), "test": split_arrays(test, augment=False)}
    findings: dict[str, Any] = {"source": source} if source else {}
    findings |= equivalents(*(fingerprints(mazes.inputs) for mazes in (train, test)))
    for split, mazes in (("train", train), ("test", test)):
        paths = search(mazes.inputs)
        findings[f"{split}_path_steps"] = f"{paths.steps.min()} to {paths.steps.max()}"
        findings[f"{split}_mazes_with_several_shortest_paths"] = int((~paths.unique).sum())
    return write_dataset(directory, splits, IDENTIFIERS, recipe, findings=findings, overwrite=overwrite)


def split_arrays(mazes: Mazes, *, augment: bool) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Returns the arrays of a split. A group is a maze and, if augmented, its seven images in the published order."""
    inputs, labels = (all_turns(array) if augment else array[:, None] for array in mazes)
    return split_of(inputs, labels, MazeKind(round(inputs.shape[2] ** 0.5)))
