"""A data set of three puzzles of no known kind, as arrays and as files to damage."""

import json
from pathlib import Path

import numpy as np

from train_jax.puzzles.metadata import Metadata

METADATA = Metadata(
    seq_len=4,
    vocab_size=6,
    pad_id=0,
    ignore_label_id=0,
    blank_identifier_id=0,
    num_puzzle_identifiers=3,
    total_groups=2,
    mean_puzzle_examples=5 / 3,
    total_puzzles=3,
    sets=("all",),
)
RECIPE = {"maker": "test", "seed": 1}


def arrays() -> dict[str, np.ndarray]:
    """Returns the arrays of two groups, of two puzzles and of one; the puzzles have two, one and two examples."""
    inputs = np.arange(20, dtype=np.uint8).reshape(5, 4) % 6
    return {
        "inputs": inputs,
        "labels": inputs[:, ::-1].copy(),
        "puzzle_identifiers": np.array([0, 1, 2], np.int32),
        "puzzle_indices": np.array([0, 2, 3, 5], np.int32),
        "group_indices": np.array([0, 2, 3], np.int32),
    }


def splits():
    return {"train": (METADATA, arrays()), "test": (METADATA, arrays())}


def rewrite_json(path: Path, **changes) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value != "absent"}))
