"""Puzzles for a model to solve, from a test set; those that a user gives are read by `Kind.parse` and `Kind.read`."""

import numpy as np

from train_jax.errors import UserError
from train_jax.tasks.puzzles.format import Metadata, load_split
from train_jax.tasks.puzzles.kind import Kind, PuzzleInput
from train_jax.tasks.puzzles.kinds import describe, kind_of


def from_test_set(data_dir: str, index: int) -> PuzzleInput:
    """Raises `UserError` where there is no such puzzle, or of no kind that can be drawn."""
    try:
        puzzles = load_split(data_dir, "test")
    except UserError as error:
        raise UserError(f"{error}; or give --puzzle TEXT or --file FILE, or another --data-dir") from error
    if not 0 <= index < puzzles.num_examples:
        raise UserError(f"--index {index}: the test set in {data_dir} has puzzles 0 to {puzzles.num_examples - 1}")
    owner = np.searchsorted(puzzles.puzzle_indices, index, side="right") - 1
    return PuzzleInput(
        f"puzzle {index} of the test set in {data_dir}",
        known_kind(puzzles.metadata, f"{data_dir} holds"),
        puzzles.inputs[index],
        puzzles.labels[index],
        puzzle_identifier=int(puzzles.puzzle_identifiers[owner]),
    )


def known_kind(data: Metadata, whose: str) -> Kind:
    """Raises `UserError` for a data set of no kind that is known here; `whose`: how the message begins."""
    kind = kind_of(data)
    if kind is None:
        raise UserError(
            f"{whose} {describe(data)}, which are no Sudokus, mazes or ARC puzzles; `trm solve` shows those only"
        )
    return kind
