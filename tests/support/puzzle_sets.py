"""Puzzle sets in memory whose examples contain their row; the `recipe.json` of one on disk."""

from pathlib import Path

import numpy as np

from train_jax.puzzles.batches import mixture_of
from train_jax.puzzles.format import PuzzleSet
from train_jax.puzzles.metadata import Metadata, read_recipe


def puzzle_set(puzzles_in_group: np.ndarray, examples_in_puzzle: np.ndarray) -> PuzzleSet:
    """Returns a puzzle set; the first token of an example is its row."""
    group_indices = np.concatenate([[0], np.cumsum(puzzles_in_group)])
    puzzle_indices = np.concatenate([[0], np.cumsum(examples_in_puzzle)])
    rows = np.arange(puzzle_indices[-1])
    inputs = np.stack([rows + 1, rows % 3], axis=1).astype(np.uint8)
    metadata = Metadata(
        seq_len=2,
        vocab_size=100,
        pad_id=0,
        ignore_label_id=0,
        blank_identifier_id=0,
        num_puzzle_identifiers=50,
        total_groups=len(puzzles_in_group),
        mean_puzzle_examples=puzzle_indices[-1] / len(examples_in_puzzle),
        total_puzzles=len(examples_in_puzzle),
        sets=("all",),
    )
    return PuzzleSet(metadata, inputs, inputs.copy(), np.arange(group_indices[-1]) + 1, puzzle_indices, group_indices)


def train_batch(puzzles: PuzzleSet, **options) -> dict[str, np.ndarray]:
    """Returns the training batch of one data set."""
    return mixture_of([puzzles]).train_batch(**options)


def record_of(directory: Path) -> dict:
    record = read_recipe(directory)
    assert record is not None
    return record
