"""A data set of small puzzles with several identifiers, so that puzzle rows repeat within a batch."""

import numpy as np
import pytest

from train_jax.tasks.puzzles.format import Metadata
from train_jax.tasks.puzzles.sudoku.generator import generate
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES, geometry_of_size
from train_jax.tasks.puzzles.writing import write_dataset

IDENTIFIERS = 6


@pytest.fixture(scope="session")
def data_dir(made_once):
    return made_once("puzzles", write_puzzles)


def write_puzzles(folder):
    assert GEOMETRIES
    rng = np.random.default_rng(0)
    originals = generate(72, 8, geometry_of_size(4), rng, progress=lambda *_: None)
    splits = {}
    for split, rows in (("train", slice(0, 64)), ("test", slice(64, 72))):
        inputs = originals.puzzles[rows] + 1
        count = len(inputs)
        metadata = Metadata(16, 6, 0, 0, 0, IDENTIFIERS, count, 1.0, count, ("all",))
        arrays = {
            "inputs": inputs.astype(np.uint8),
            "labels": (originals.solutions[rows] + 1).astype(np.uint8),
            "puzzle_identifiers": rng.integers(1, IDENTIFIERS, count).astype(np.int32),
            "puzzle_indices": np.arange(count + 1, dtype=np.int32),
            "group_indices": np.arange(count + 1, dtype=np.int32),
        }
        splits[split] = (metadata, arrays)
    write_dataset(folder, splits, ["<blank>", *map(str, range(1, IDENTIFIERS))], {"made": "by the tests"})
