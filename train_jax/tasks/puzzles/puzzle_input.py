"""Reads puzzles of a test set for `trm solve`; `Kind.parse` and `Kind.read` read the puzzles of a user."""

import numpy as np

from train_jax.errors import UserError
from train_jax.tasks.puzzles.format import Metadata, load_split
from train_jax.tasks.puzzles.kind import Kind, PuzzleInput
from train_jax.tasks.puzzles.kinds import describe, kind_of


def from_test_set(data_dir: str, index: int) -> PuzzleInput:
    """Returns a puzzle of the test set. Raises `UserError` if there is none, or if its kind is unknown."""
    try:
        puzzles = load_split(data_dir, "test")
    except UserError as error:
        raise UserError(f"{error}; or give --puzzle TEXT or --file FILE, or another --data-dir") from error
    if not 0 <= index < puzzles.num_examples:
        raise UserError(
            f"--index {index}: the test set in {data_dir} has puzzles 0 to {puzzles.num_examples - 1}; use one of these"
        )
    owner = np.searchsorted(puzzles.puzzle_indices, index, side="right") - 1
    return PuzzleInput(
        f"puzzle {index} of the test set in {data_dir}",
        known_kind(puzzles.metadata, f"{data_dir} contains"),
        puzzles.inputs[index],
        puzzles.labels[index],
        puzzle_identifier=int(puzzles.puzzle_identifiers[owner]),
    )


def known_kind(data: Metadata, whose: str) -> Kind:
    """Returns the kind of a data set. Raises `UserError` if it is unknown; `whose` is the beginning of the message."""
    kind = kind_of(data)
    if kind is None:
        raise UserError(
            f"{whose} {describe(data)}, but `trm solve` can only show Sudokus, mazes and ARC puzzles; give another "
            "--data-dir"
        )
    return kind
