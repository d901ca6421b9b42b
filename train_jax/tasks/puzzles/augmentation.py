"""Symmetries drawn on the fly: that of a training example is a pure function of (seed, step, row of the global batch).

They are the symmetries that a data set's stored copies are made with, each equally likely.
"""

import numpy as np

from train_jax.errors import UserError
from train_jax.tasks.puzzles.hashing import mix
from train_jax.tasks.puzzles.kind import Transform, Words
from train_jax.tasks.puzzles.kinds import describe, kind_of
from train_jax.tasks.puzzles.metadata import Metadata


def transform_for(data: Metadata, name: str = "the data set") -> Transform:
    """How examples of this kind are transformed. Raises `UserError` for a kind that has no symmetries to draw."""
    if data.ignore_label_id not in (None, 0):
        raise UserError(
            f"--augment: {name} ignores label {data.ignore_label_id}, expected 0, which no symmetry changes; leave "
            "--augment out or build the data set with `trm build-data`"
        )
    kind = kind_of(data)
    transform = None if kind is None else kind.transform
    if transform is None:
        raise UserError(
            f"--augment: {name} holds {describe(data)}, which have no symmetries that are drawn on the fly; leave "
            "--augment out (`trm build-data arc --num-aug` stores augmented ARC puzzles)"
        )
    return transform


def words_for(seed: int, step: int, rows: slice) -> Words:
    """Random bits for these rows of the global batch of `step`, whatever part of it is asked for."""
    start = np.zeros(1, np.uint64)
    for number in (seed, step):
        start = mix(start ^ np.uint64(number % 2**64))
    counts = np.arange(2 * rows.start, 2 * rows.stop, dtype=np.uint64)
    return mix(mix(start + counts), kind=1).reshape(-1, 2).T
