"""SIGTERM at any moment: what has finished is saved, the exit status says so, and the same command continues."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest
from support.scripts import ENVIRONMENT, ROOT, run_script, script

from train_jax.errors import PreemptedError

FIELDS = ("steps=60", "checkpoint_every_steps=10", "eval_every_steps=20", "augment=True")


def preempted(command, ready, seconds=10.0):
    """Starts the command, sends SIGTERM once `ready(line)` and returns (exit status, its standard error)."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if ready(line):
            break
    process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    error = process.communicate(timeout=60)[1]
    assert time.monotonic() - start < seconds
    return process.returncode, error


@pytest.mark.slow
def test_a_run_that_is_preempted_ends_as_one_that_is_not(tmp_path, finished_run, finished_fields, data_dir):
    folder, out = tmp_path / "run", tmp_path / "run.npz"
    command = [*script("train_tiny", data_dir, 1, folder, out, *finished_fields)]
    status, error = preempted(command, lambda line: "step 20" in line)
    assert status == PreemptedError.STATUS, error
    assert "stopped by SIGTERM, saved after step " in error
    assert "continuing at step" in run_script("train_tiny", data_dir, 1, folder, out, *finished_fields)
    expected, arrays = dict(np.load(f"{finished_run}.npz")), dict(np.load(out))
    for name in expected:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)
