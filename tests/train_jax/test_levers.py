"""Levers that must not change what is learned: the same twenty steps with each of them, on eight virtual devices."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROCESS = Path(__file__).with_name("training_process.py")
FIELDS = (
    "steps=20",
    "halt_exploration_prob=0.5",
    "eval_every_steps=0",
    "log_every_steps=10",
    "checkpoint_every_steps=20",
)

LEVERS = {
    "shard_map": ("runner='shard_map'",),
    "accumulation": ("accumulation_steps=2",),
    "several steps a dispatch": ("steps_per_dispatch=5",),
    "exploration as an input": ("halt_exploration_end=0.5",),
    "remat": ("remat='blocks'",),
    "all of them": (
        "runner='shard_map'",
        "accumulation_steps=2",
        "steps_per_dispatch=10",
        r"remat='.*L_level'",
    ),
}


def learned(tmp_path, data_dir, name, devices, *fields):
    out = tmp_path / f"{name}.npz"
    command = [sys.executable, str(PROCESS), str(devices), str(data_dir), str(tmp_path / name), str(out)]
    subprocess.run([*command, *FIELDS, *fields], check=True, capture_output=True)
    arrays = dict(np.load(out))
    return {name: array for name, array in arrays.items() if "opt_state" not in name}


def worst(a, b):
    assert a.keys() == b.keys()
    return max((float(np.abs(a[k] - b[k]).max() / max(np.abs(a[k]).max(), 1e-12)), k) for k in a if a[k].size)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, data_dir):
    arrays = learned(tmp_path_factory.mktemp("plain"), data_dir, "plain", 4)
    table = next(k for k in arrays if "puzzle_emb.weights" in k)
    assert len(np.unique(arrays[table], axis=0)) > 3, "the puzzle rows did not move: nothing was compared"
    return arrays


@pytest.mark.parametrize("lever", LEVERS)
def test_it_learns_the_same(tmp_path, data_dir, plain, lever):
    difference, name = worst(plain, learned(tmp_path, data_dir, "lever", 4, *LEVERS[lever]))
    assert difference <= 1e-5, f"{name} differs by {difference:.1e}"


def test_accumulation_of_four_is_one_batch_of_four_times_the_size(tmp_path, data_dir, plain):
    """On one device, sixteen examples at once, or four by four."""
    difference, name = worst(plain, learned(tmp_path, data_dir, "four", 1, "accumulation_steps=4"))
    assert difference <= 1e-5, f"{name} differs by {difference:.1e}"


def test_annealed_exploration_changes_what_is_learned(tmp_path, data_dir, plain):
    difference, _ = worst(plain, learned(tmp_path, data_dir, "less", 4, "halt_exploration_end=0.0"))
    assert difference > 1e-4
