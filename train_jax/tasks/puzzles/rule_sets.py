"""Data sets whose puzzles all follow one set of rules: what their arrays, options and findings have in common."""

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
"""Of padding, and of a label that counts for nothing."""
BLANK_IDENTIFIER = 0
IDENTIFIERS = ["<blank>"]
"""The rules are the same for all, so they share the blank identifier."""
INDEX_BYTES = 12
"""Of an example in the three index arrays, at most."""


def split_of(
    inputs: UInt8[np.ndarray, "groups copies cells"], labels: UInt8[np.ndarray, "groups copies cells"], kind: Kind
) -> tuple[Metadata, dict[str, np.ndarray]]:
    """A split whose groups are an original, first, and its augmentations; every copy is a puzzle of one example."""
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
    """Raises `UserError` where a data set of so many examples does not fit into memory or on the disk."""
    bytes_of_set = examples * (2 * kind.seq_len + INDEX_BYTES)
    remedy = "use fewer puzzles or augmentations"
    check_memory(bytes_of_set + originals * 4 * kind.seq_len, remedy)
    check_disk(directory, bytes_of_set, remedy)


def subsample(available: int, size: int, rng: np.random.Generator) -> Integer[np.ndarray, "size"]:
    """Which of so many train puzzles to keep, `size` of them."""
    if size > available:
        raise UserError(f"--subsample-size {size} of {available} train puzzles; use at most that many")
    return rng.choice(available, size, replace=False)


def equivalents(train: UInt64[np.ndarray, "n"], test: UInt64[np.ndarray, "m"]) -> Mapping[str, Any]:
    """What the fingerprints of two splits say about leaks and repetitions."""
    return {
        "test_puzzles_equivalent_to_a_train_puzzle": int(np.isin(test, train).sum()),
        "train_puzzles_equivalent_to_another": int((~first_of_each(train, known=train[:0])).sum()),
    }
