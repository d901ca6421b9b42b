"""Levers that must not change what is learned: the same twenty steps with each of them, on four virtual devices."""

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


ANNEALED, FOUR = "annealed exploration", "accumulation of four on one device"


def learned(tmp_path, data_dir, runs):
    """What each run learned, all of them in one process."""
    words = []
    for name, (devices, *fields) in runs.items():
        words += ["--", str(devices), str(tmp_path / name), str(tmp_path / f"{name}.npz"), *FIELDS, *fields]
    subprocess.run([sys.executable, str(PROCESS), str(data_dir), *words], check=True, capture_output=True)
    every = {name: dict(np.load(tmp_path / f"{name}.npz")) for name in runs}
    return {n: {key: array for key, array in arrays.items() if "opt_state" not in key} for n, arrays in every.items()}


def worst(a, b):
    assert a.keys() == b.keys()
    return max((float(np.abs(a[k] - b[k]).max() / max(np.abs(a[k]).max(), 1e-12)), k) for k in a if a[k].size)


@pytest.mark.slow
def test_levers_do_not_change_what_is_learned(tmp_path, data_dir):
    """An accumulation of four is one batch of four times the size. Less exploration does change it, and is seen to."""
    levers = {name: (4, *fields) for name, fields in LEVERS.items()} | {FOUR: (1, "accumulation_steps=4")}
    runs = {"plain": (4,), ANNEALED: (4, "halt_exploration_end=0.0")} | levers
    found = learned(tmp_path, data_dir, runs)
    plain = found.pop("plain")
    table = next(k for k in plain if "puzzle_emb.weights" in k)
    assert len(np.unique(plain[table], axis=0)) > 3, "the puzzle rows did not move: nothing was compared"
    differences = {name: worst(plain, arrays) for name, arrays in found.items()}
    assert differences.pop(ANNEALED)[0] > 1e-4
    assert not {name: each for name, each in differences.items() if each[0] > 1e-5}
