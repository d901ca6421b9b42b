"""Whole runs in processes of their own: on one and eight devices, killed and continued."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
from support.scripts import ENVIRONMENT, ROOT, run_script, script

from train_jax.run.folder import RunFolder


def run(tmp_path, name, devices, *fields):
    return [str(devices), str(tmp_path / name), str(tmp_path / f"{name}.npz"), *fields]


def difference(a, b):
    assert a.keys() == b.keys()
    return max((float(np.abs(a[k] - b[k]).max() / max(np.abs(a[k]).max(), 1e-12)), k) for k in a if a[k].size)


@pytest.mark.slow
def test_eight_devices_learn_the_same_as_one_from_the_start_or_from_a_checkpoint(tmp_path, data_dir):
    """Both runs have the same global batch and exploration, and puzzle rows repeated within and across devices.

    The carry goes with the rows of the global batch from one device to eight. With the default `eps`, Adam's first
    steps turn the rounding of a gradient near 0 into a part of the learning rate.
    """
    fields = ("eps=1e-6", "halt_exploration_prob=0.5", "eval_every_steps=0", "checkpoint_every_steps=10", "L_cycles=1")
    fields = (*fields, "mlp_t=False", "pos_encodings='rope'", "augment=True")
    runs = (("one", 1, 20), ("eight", 8, 20), ("continued", 1, 10), ("continued", 8, 20))
    words = [run(tmp_path, name, devices, *fields, f"steps={steps}") for name, devices, steps in runs]
    run_script("train_tiny", data_dir, *words[0], *(word for each in words[1:] for word in ("--", *each)))
    one = dict(np.load(tmp_path / "one.npz"))
    table = next(k for k in one if "puzzle_emb.weights" in k)
    assert len(np.unique(one[table], axis=0)) > 3, "the puzzle rows did not change: nothing was compared"
    parameters = {k: v for k, v in one.items() if "opt_state" not in k}
    for name in ("eight", "continued"):
        arrays = np.load(tmp_path / f"{name}.npz")
        worst, leaf = difference(parameters, {k: arrays[k] for k in parameters})
        assert worst <= 3e-6, f"{leaf} of {name} differs by {worst:.1e}"


@pytest.mark.slow
def test_killed_and_continued_is_the_same_run_bit_for_bit(tmp_path, finished_run, finished_fields, data_dir):
    command = script("train_tiny", data_dir, *run(tmp_path, "killed", 1, *finished_fields))
    killed = subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "checkpoints" / "20" / "commit_success.txt").exists():
        assert killed.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    continued = RunFolder(tmp_path / "killed")
    assert not continued.finished.exists()
    output = run_script("train_tiny", data_dir, *run(tmp_path, "killed", 1, *finished_fields))
    assert "continuing at step" in output
    expected, arrays = dict(np.load(f"{finished_run}.npz")), dict(np.load(tmp_path / "killed.npz"))
    for name in expected:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)
    records = [[json.loads(x) for x in folder.metrics.open()] for folder in (RunFolder(finished_run), continued)]
    keys = [[(r["step"], sorted(r)) for r in of_run] for of_run in records]
    assert keys[0] == keys[1], "a step is recorded twice or not at all"
    losses = [[r.get("train/lm_loss") for r in of_run] for of_run in records]
    assert losses[0] == losses[1]
