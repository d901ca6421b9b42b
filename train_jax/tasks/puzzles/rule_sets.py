"""The common parts of data sets whose puzzles all follow the same rules (Sudokus, mazes)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer, UInt8, UInt64

from train_jax.errors import UserError
from train_jax.tasks.puzzles.hashing import first_of_each
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.metadata import Metadata
from train_jax.tasks.puzzles.options import check_disk, check_memory

PAD_TOKEN = 0
"""The token of padding, and of labels that the loss ignores."""
BLANK_IDENTIFIER = 0
IDENTIFIERS = ["<blank>"]
"""All puzzles follow the same rules, so they share the blank identifier."""
INDEX_BYTES = 12
"""Upper bound of the bytes per example in the three index arrays."""


def split_of(
    inputs: UInt8[np.ndarray, "groups copies cells"], labels: UInt8[np.ndarray, "groups copies cells"], kind: Kind
) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Returns a split; a group is an original followed by its augmentations, each a puzzle of one example."""
    count, copies, cells = inputs.shape
    metadata = Metadata(
        seq_len=cells,
        vocab_size=kind.vocab_size,
        pad_id=PAD_TOKEN,
        ignore_label_id=PAD_TOKEN,
        blank_identifier_id=BLANK_IDENTIFIER,
        num_puzzle_identifiers=1,
        total_groups=count,
        mean_puzzle_examples=1.0,
        total_puzzles=count,
        sets=("all",),
        kind=kind.key,
    )
    return metadata, {
        "inputs": inputs.reshape(-1, cells),
        "labels": labels.reshape(-1, cells),
        "puzzle_identifiers": np.full(count * copies, BLANK_IDENTIFIER, np.int32),
        "puzzle_indices": np.arange(count * copies + 1, dtype=np.int32),
        "group_indices": np.arange(count + 1, dtype=np.int32) * copies,
    }


def check_room(directory: Path, kind: Kind, *, originals: int, examples: int) -> None:
    """Raises `UserError` if a data set of `examples` examples does not fit into memory or on the disk."""
    bytes_of_set = examples * (2 * kind.seq_len + INDEX_BYTES)
    remedy = "use fewer puzzles or augmentations"
    check_memory(bytes_of_set + originals * 4 * kind.seq_len, remedy)
    check_disk(directory, bytes_of_set, remedy)


def subsample(available: int, size: int, rng: np.random.Generator) -> Integer[np.ndarray, "size"]:
    """Selects `size` of `available` train puzzles at random."""
    if size > available:
        raise UserError(f"--subsample-size {size}: there are {available} train puzzles; use at most {available}")
    return rng.choice(available, size, replace=False)


def equivalents(train: UInt64[np.ndarray, "n"], test: UInt64[np.ndarray, "m"]) -> Mapping[str, Any]:
    """Counts leaks and repetitions by the fingerprints of two splits."""
    return {
        "test_puzzles_equivalent_to_a_train_puzzle": int(np.isin(test, train).sum()),
        "train_puzzles_equivalent_to_another": int((~first_of_each(train, known=train[:0])).sum()),
    }
