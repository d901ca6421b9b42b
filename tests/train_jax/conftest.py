"""A data set of small puzzles with several identifiers, so that puzzle rows repeat within a batch."""

import os
import shutil
import sys

import numpy as np
import pytest
from support.launching import cloud, launch  # noqa: F401 (fixtures)
from support.markers import slow_unless
from support.scripts import run_script
from support.storage_emulator import Emulator
from support.untrained_run import write_language_run

from train_jax import plugin
from train_jax.puzzles.building import write_dataset
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.sudoku.generator import generate
from train_jax.puzzles.sudoku.grid import geometry_of_size
from train_jax.storage.files import upload_folder
from train_jax.storage.storage import path_of

IDENTIFIERS = 6
STORAGES = slow_unless(lambda name: name == "disk", ["disk", "storage"])


@pytest.fixture(scope="session")
def data_dir(made_once):
    return made_once("puzzles", write_puzzles)


@pytest.fixture(scope="session")
def finished_fields():
    """Returns the fields of the tiny preset, as in `finished_run`."""
    return "steps=60", "checkpoint_every_steps=10", "eval_every_steps=20", "augment=True"


@pytest.fixture(scope="session")
def finished_run(made_once, data_dir, finished_fields):
    """The folder of a run of `support.train_tiny` on one device, with `run.npz` beside it; copy it to change it."""

    def train(folder):
        run_script("train_tiny", data_dir, 1, folder / "run", folder / "run.npz", *finished_fields)

    return made_once("finished", train) / "run"


@pytest.fixture(scope="session")
def language_run(made_once):
    """The folder, as text, of an untrained language model, for which every token is as probable; do not change it.

    Its data set is in `set` beside it.
    """
    return str(made_once("generate", write_language_run) / "run")


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


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """The storage service of this session; this process and those that it starts reach it as `gs://tests`."""
    emulator = Emulator()
    patch = pytest.MonkeyPatch()
    cache = {"TRM_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    for name, value in (emulator.environment | cache).items():
        patch.setenv(name, value)
    yield emulator
    patch.undo()
    emulator.stop()


@pytest.fixture
def remote(emulator, tmp_path):
    """An empty folder in storage, as text."""
    return f"gs://tests/{tmp_path.name}-{os.getpid()}"


@pytest.fixture
def impatient(monkeypatch):
    """Requests are repeated without pauses, and only a few times."""
    monkeypatch.setattr("train_jax.storage.requests.PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr("train_jax.storage.requests.FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("gcsfs.retry.min", lambda *_: 0.01, raising=False)


@pytest.fixture(params=STORAGES)
def place(request, tmp_path):
    """An empty folder on the local disk, and in slow tests also one in storage."""
    return tmp_path if request.param == "disk" else path_of(request.getfixturevalue("remote"))


@pytest.fixture
def data_at(place, tmp_path, data_dir):
    """The data set of `data_dir` in `place`; in storage without the recipe, which refuses a copy of changed data."""
    copy = shutil.copytree(data_dir, tmp_path / "data")
    if place != tmp_path:
        (copy / "recipe.json").unlink()
        upload_folder(copy, place / "data", last=[])
    return place / "data"


@pytest.fixture
def forgotten(monkeypatch):
    """Forgets the plugins that a test adds, and the modules of its files."""
    known = plugin._Known()
    known.plugins = [*plugin.own_plugins()]
    known.script = plugin._known.script
    monkeypatch.setattr(plugin, "_known", known)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of a file is appended
    modules = set(sys.modules)
    yield known
    for name in set(sys.modules) - modules:
        ours = name.startswith(("train_jax", "models_torch", "bridge"))
        library = name in sys.stdlib_module_names or "site-packages" in str(getattr(sys.modules[name], "__file__", ""))
        if not (ours or library or "." in name):
            del sys.modules[name]
