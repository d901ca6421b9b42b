"""A data set of small puzzles with several identifiers, so that puzzle rows repeat within a batch."""

import numpy as np
import pytest
from support.scripts import run_script

from train_jax.tasks.puzzles.format import Metadata
from train_jax.tasks.puzzles.sudoku.generator import generate
from train_jax.tasks.puzzles.sudoku.grid import geometry_of_size
from train_jax.tasks.puzzles.writing import write_dataset

IDENTIFIERS = 6


@pytest.fixture(scope="session")
def data_dir(made_once):
    return made_once("puzzles", write_puzzles)


@pytest.fixture(scope="session")
def finished_fields():
    """Of the tiny preset, in `finished_run`."""
    return "steps=60", "checkpoint_every_steps=10", "eval_every_steps=20", "augment=True"


@pytest.fixture(scope="session")
def finished_run(made_once, data_dir, finished_fields):
    """The folder of a run of `support.train_tiny` on one device, with `run.npz` beside it; copy it to change it."""

    def train(folder):
        run_script("train_tiny", data_dir, 1, folder / "run", folder / "run.npz", *finished_fields)

    return made_once("finished", train) / "run"


def write_puzzles(folder):
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
