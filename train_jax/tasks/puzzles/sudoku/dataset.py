"""Builds Sudoku data sets, from generated puzzles or from the public tables."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from train_jax.tasks.progress import Progress
from train_jax.tasks.puzzles.metadata import Metadata
from train_jax.tasks.puzzles.rule_sets import IDENTIFIERS, check_room, equivalents, split_of, subsample
from train_jax.tasks.puzzles.sudoku.csv import GEOMETRY as CSV_GEOMETRY
from train_jax.tasks.puzzles.sudoku.csv import HUB_EXAMPLE, Table, guesses_of, read_table
from train_jax.tasks.puzzles.sudoku.generator import Originals, generate
from train_jax.tasks.puzzles.sudoku.grid import Geometry, tokens_of
from train_jax.tasks.puzzles.sudoku.kind import SudokuKind
from train_jax.tasks.puzzles.sudoku.rating import describe_guesses, rank_correlation, ratings
from train_jax.tasks.puzzles.sudoku.symmetry import augment, fingerprints
from train_jax.tasks.puzzles.tables import local_tables, sha256_of
from train_jax.tasks.puzzles.writing import Splits, is_built, write_dataset

AUGMENTED_AT_ONCE = 2**17

MAKER_VERSION = 1
"""Stored in every recipe. Increase it when the same options give different puzzles."""


def build_generated(
    directory: Path,
    geometry: Geometry,
    *,
    num_train: int,
    num_test: int,
    num_empty: int | None,
    min_difficulty: int | None = None,
    num_aug: int,
    seed: int,
    overwrite: bool,
    progress: Progress,
) -> bool:
    """Builds a data set of generated puzzles, no two equivalent; returns False if it exists already.

    If `num_empty` is None, as many cells are emptied as each grid allows. `min_difficulty` is a number of guesses
    (`rating.py`). Raises `UserError` if no such puzzles can be generated, and the errors of `is_built`.
    """
    recipe = {
        "maker": "sudoku",
        "maker_version": MAKER_VERSION,
        "size": geometry.size,
        "num_train": num_train,
        "num_test": num_test,
        "num_empty": num_empty,
        "num_aug": num_aug,
        "seed": seed,
    }
    if min_difficulty is not None:  # absent by default, so that recipes older than this option still match
        recipe["min_difficulty"] = min_difficulty
    if is_built(directory, recipe, overwrite=overwrite):
        return False
    originals, examples = num_train + num_test, num_train * (1 + num_aug) + num_test
    check_room(directory, SudokuKind(geometry), originals=originals, examples=examples)
    rng = np.random.default_rng(seed)
    pairs = generate(originals, num_empty, geometry, rng, min_difficulty=min_difficulty or 0, progress=progress)
    train, test = (Originals(*(array[part] for array in pairs)) for part in (np.s_[:num_train], np.s_[num_train:]))
    findings = _difficulty("train", ratings(train.puzzles, geometry))
    findings |= _difficulty("test", ratings(test.puzzles, geometry))
    splits = _splits(train, test, geometry, num_aug, rng, progress)
    return write_dataset(directory, splits, IDENTIFIERS, recipe, findings=findings, overwrite=overwrite)


def build_from_tables(
    directory: Path,
    source: str,
    *,
    subsample_size: int | None,
    min_difficulty: int | None,
    num_aug: int,
    seed: int,
    overwrite: bool,
    progress: Progress,
) -> bool:
    """Converts the public Sudoku-Extreme tables; returns False if the data set exists already.

    `min_difficulty` refers to the rating in the tables. A solver verifies that every selected puzzle has exactly one
    solution. The public test set is not filtered for equivalent puzzles; `recipe.json` stores an upper bound of the
    number of test puzzles that are equivalent to a train puzzle (their fingerprints are equal). It also stores the
    difficulty, both as rated in the tables and as rated by `rating.py`.
    """
    options = {"subsample_size": subsample_size, "min_difficulty": min_difficulty, "num_aug": num_aug, "seed": seed}
    with local_tables(source, hub_example=HUB_EXAMPLE) as tables:
        recipe = {
            "maker": "sudoku tables",
            "maker_version": MAKER_VERSION,
            "tables_sha256": {split: sha256_of(path) for split, path in tables.items()},
            **options,
        }
        if is_built(directory, recipe, overwrite=overwrite):
            return False
        read = {
            split: read_table(path, min_difficulty=min_difficulty, progress=progress) for split, path in tables.items()
        }
        rng = np.random.default_rng(seed)
        if subsample_size is not None:
            read["train"] = read["train"].rows(subsample(len(read["train"].puzzles), subsample_size, rng))
        originals, test_count = (len(read[split].puzzles) for split in tables)
        examples = originals * (1 + num_aug) + test_count
        check_room(directory, SudokuKind(CSV_GEOMETRY), originals=originals, examples=examples)
        findings: dict[str, Any] = {"source": source}
        for split, path in tables.items():
            findings |= _difficulty(split, guesses_of(path, read[split], progress), read[split])
    train, test = (Originals(table.puzzles, table.solutions) for table in read.values())
    findings |= equivalents(*(fingerprints(each.puzzles, CSV_GEOMETRY) for each in (train, test)))
    splits = _splits(train, test, CSV_GEOMETRY, num_aug, rng, progress)
    return write_dataset(directory, splits, IDENTIFIERS, recipe, findings=findings, overwrite=overwrite)


def _difficulty(split: str, guesses: Integer[np.ndarray, "n"], table: Table | None = None) -> dict[str, str]:
    """Describes the difficulty of a split; for tables also their rating and its rank correlation with the guesses."""
    findings = {f"{split}_difficulty": describe_guesses(guesses)}
    if table is not None:
        own = table.ratings
        findings[f"{split}_rating_in_the_table"] = (
            f"{own.min()} to {own.max()}, mean {own.mean():.1f}, median {np.median(own):g}; rank correlation with "
            f"guesses {rank_correlation(guesses, own):.2f}"
        )
    return findings


def _splits(
    train: Originals, test: Originals, geometry: Geometry, num_aug: int, rng: np.random.Generator, progress: Progress
) -> Splits:
    """Returns the arrays of both splits. Only the train split is augmented."""
    return {
        "train": split_arrays(train, geometry, num_aug=num_aug, rng=rng, progress=progress),
        "test": split_arrays(test, geometry, num_aug=0, rng=rng, progress=progress),
    }


def split_arrays(
    originals: Originals, geometry: Geometry, *, num_aug: int, rng: np.random.Generator, progress: Progress
) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Returns the arrays of a split. A group is an original followed by `num_aug` random equivalent puzzles."""
    count, copies = len(originals.puzzles), 1 + num_aug
    inputs, labels = (np.empty((count, copies, geometry.cells), np.uint8) for _ in range(2))
    inputs[:, 0], labels[:, 0] = tokens_of(originals.puzzles), tokens_of(originals.solutions)
    step = max(1, AUGMENTED_AT_ONCE // copies)
    for start in range(0, count if num_aug else 0, step):
        part = slice(start, min(start + step, count))
        puzzles, solutions = (np.repeat(array[part], num_aug, axis=0) for array in originals)
        puzzles, solutions = augment(puzzles, solutions, geometry, rng)
        inputs[part, 1:] = tokens_of(puzzles).reshape(-1, num_aug, geometry.cells)
        labels[part, 1:] = tokens_of(solutions).reshape(-1, num_aug, geometry.cells)
        progress("augmented examples", part.stop * copies, count * copies)
    return split_of(inputs, labels, SudokuKind(geometry))
