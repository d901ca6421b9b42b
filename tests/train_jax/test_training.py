"""Whole runs, each in a process of its own: how many devices, killed and continued, what a run leaves on disk."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

PROCESS = Path(__file__).with_name("training_process.py")


def run(tmp_path, name, devices, *fields):
    return [str(devices), str(tmp_path / name), str(tmp_path / f"{name}.npz"), *fields]


def training(tmp_path, name, devices, data_dir, *fields):
    return [sys.executable, str(PROCESS), str(data_dir), *run(tmp_path, name, devices, *fields)]


def learned(tmp_path, name):
    return dict(np.load(tmp_path / f"{name}.npz"))


def difference(a, b):
    assert a.keys() == b.keys()
    return max((float(np.abs(a[k] - b[k]).max() / max(np.abs(a[k]).max(), 1e-12)), k) for k in a if a[k].size)


@pytest.mark.parametrize(
    "variant",
    [("mlp_t=True", "augment=True"), ("mlp_t=False", "pos_encodings='rope'")],
    ids=["mixer", "attention"],
)
def test_eight_devices_learn_what_one_does(tmp_path, data_dir, variant):
    """The same global batch, exploration on, rows of the puzzle table repeated within and across devices."""
    fields = ("steps=20", "halt_exploration_prob=0.5", "eval_every_steps=0", *variant)
    both = [*training(tmp_path, "one", 1, data_dir, *fields), "--", *run(tmp_path, "eight", 8, *fields)]
    subprocess.run(both, check=True, capture_output=True)
    one, eight = learned(tmp_path, "one"), learned(tmp_path, "eight")
    table = next(k for k in one if "puzzle_emb.weights" in k)
    assert len(np.unique(one[table], axis=0)) > 3, "the puzzle rows did not move: nothing was compared"
    parameters = {k: v for k, v in one.items() if "opt_state" not in k}
    worst, name = difference(parameters, {k: eight[k] for k in parameters})
    assert worst <= 1e-5, f"{name} differs by {worst:.1e}"


FIELDS = ("steps=60", "checkpoint_every_steps=10", "eval_every_steps=20", "augment=True")


@pytest.fixture(scope="module")
def whole(made_once, data_dir):
    """The folder of a run, called whole, that nobody stopped."""

    def train(folder):
        subprocess.run(training(folder, "whole", 1, data_dir, *FIELDS), check=True, capture_output=True)

    return made_once("finished", train)


def test_killed_and_continued_is_the_same_run_bit_for_bit(tmp_path, whole, data_dir):
    killed = subprocess.Popen(training(tmp_path, "killed", 1, data_dir, *FIELDS), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "checkpoints" / "20" / "commit_success.txt").exists():
        assert killed.poll() is None and time.monotonic() < deadline, "it was over before it could be killed"
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "FINISHED").exists()
    again = subprocess.run(
        training(tmp_path, "killed", 1, data_dir, *FIELDS), check=True, capture_output=True, text=True
    )
    assert "continuing at step" in again.stdout
    expected, found = learned(whole, "whole"), learned(tmp_path, "killed")
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    records = [[json.loads(x) for x in (f / "metrics.jsonl").open()] for f in (whole / "whole", tmp_path / "killed")]
    keys = [[(r["step"], sorted(r)) for r in of_run] for of_run in records]
    assert keys[0] == keys[1], "a step is recorded twice or not at all"
    losses = [[r.get("train/lm_loss") for r in of_run] for of_run in records]
    assert losses[0] == losses[1]


def test_a_finished_run_is_left_alone(tmp_path, whole, data_dir):
    """By another process than the one that made it."""
    command = training(whole, "whole", 1, data_dir, *FIELDS)
    before = {p: p.stat().st_mtime_ns for p in sorted((whole / "whole").rglob("*")) if p.is_file()}
    subprocess.run(command, check=True, capture_output=True)
    assert before == {p: p.stat().st_mtime_ns for p in sorted((whole / "whole").rglob("*")) if p.is_file()}
