"""Augmentation per batch: the symmetry of an example is a pure function of (seed, step, row of the global batch).

The symmetries are those of the augmented puzzles that builders store, all equally likely.
"""

import numpy as np

from train_jax.errors import UserError
from train_jax.tasks.puzzles.hashing import mix
from train_jax.tasks.puzzles.kind import Transform, Words
from train_jax.tasks.puzzles.kinds import describe, kind_of
from train_jax.tasks.puzzles.metadata import Metadata


def transform_for(data: Metadata, name: str = "the data set") -> Transform:
    """Returns the transformation of examples of this kind. Raises `UserError` for a kind without one."""
    if data.ignore_label_id not in (None, 0):
        raise UserError(
            f"--augment: {name} ignores label {data.ignore_label_id}, expected 0, which no symmetry changes; omit "
            "--augment or build the data set with `trm build-data`"
        )
    kind = kind_of(data)
    transform = None if kind is None else kind.transform
    if transform is None:
        raise UserError(
            f"--augment: {name} contains {describe(data)}, expected Sudokus or mazes; omit --augment "
            "(`trm build-data arc --num-aug` stores augmented ARC puzzles)"
        )
    return transform


def words_for(seed: int, step: int, rows: slice) -> Words:
    """Returns random bits for these rows of the global batch of `step`; they do not depend on the other rows."""
    start = np.zeros(1, np.uint64)
    for number in (seed, step):
        start = mix(start ^ np.uint64(number % 2**64))
    counts = np.arange(2 * rows.start, 2 * rows.stop, dtype=np.uint64)
    return mix(mix(start + counts), kind=1).reshape(-1, 2).T
