"""Runs that are killed at random moments, continued, and compared with the run that nobody disturbed.

The whole campaign is `python -m benchmarks.faults`; its table is in `docs/reliability.md`. Here is a short one.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.scripts import ENVIRONMENT, ROOT, run_script, script

from benchmarks.faults import Campaign, main
from benchmarks.faults_list import Fault, Part, problems_of, table
from benchmarks.faults_runs import FIELDS, STEPS, Run, differences, free_address
from train_jax.errors import LostProcessError
from train_jax.run.folder import RunFolder
from train_jax.run.tracking import read_metrics


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_starts_ends_as_one_that_is_not(
    tmp_path, finished_run, finished_fields, data_dir
):
    """At a random moment: while it imports, restores or compiles."""
    folder, out = tmp_path / "run", tmp_path / "run.npz"
    command = script("train_tiny", data_dir, 1, folder, out, *finished_fields)
    seconds, ended = random.uniform(1, 5), True
    while ended:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(finished_run, folder)
        (folder / "FINISHED").unlink()
        shutil.rmtree(folder / "checkpoints" / "60")
        killed = subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL)
        time.sleep(seconds)
        killed.kill()
        killed.wait()
        seconds, ended = seconds / 2, (folder / "checkpoints" / "60").exists()  # before the kill, on a fast machine
    assert "continuing at step 50" in run_script("train_tiny", data_dir, 1, folder, out, *finished_fields)
    expected, arrays = dict(np.load(f"{finished_run}.npz")), dict(np.load(out))
    for name in expected:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)
    losses = [[(r["step"], r.get("train/lm_loss")) for r in read_metrics(RunFolder(f))] for f in (finished_run, folder)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_ends_as_one_that_is_not(tmp_path, data_dir):
    """Twice in each phase, at random moments, while it goes on from the checkpoints that the kills left."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    Run(whole, data_dir, 1).finish()
    Run(whole, data_dir, 1, export=True).finish()
    run = Run(folder, data_dir, 1)
    for phase in ["compiling", "training", "restoring", "saving", "evaluating"] * 2:
        run.start()
        run.wait_for_phase(phase, 1)
        moment = time.monotonic() + random.uniform(0, 3 if phase == "compiling" else 0.05)
        while time.monotonic() < moment and not (phase == "compiling" and "phase training" in run.text(0)):
            time.sleep(0.005)  # not into the training after a fast compilation, or the run ends before the tenth kill
        run.kill()
    run.start()
    run.finish()
    assert not differences(folder, whole, metrics=True)
    export = Run(folder, data_dir, 1, export=True)
    export.start()
    time.sleep(random.uniform(2, 6))
    export.kill()
    export.start()
    export.finish()
    assert (folder / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()


@pytest.mark.campaign
@pytest.mark.parametrize("part", Part.__args__)
def test_campaign(part):
    """Goes on where it stopped; `python -m benchmarks.faults` is the same."""
    assert main(Campaign((part,))) == 0


def children(process):
    return [int(number) for number in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.slow
def test_two_processes_with_restarts_join_again_after_one_was_killed(tmp_path, data_dir):
    folder, count = tmp_path / "run", 2
    words = ["--data-dir", str(data_dir), "--run-dir", str(folder), "--wandb", "disabled", "--restarts", "2"]
    words += [word for name, value in FIELDS.items() for word in (f"--{name}", str(value))]
    variables = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": str(count)}
    variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    supervisors = [
        subprocess.Popen(
            [sys.executable, "-m", "train_jax", "train", "tiny", *words],
            env=os.environ | ENVIRONMENT | variables | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for index in range(count)
    ]
    while not (folder / "checkpoints" / "10").exists():
        assert all(process.poll() is None for process in supervisors)
        time.sleep(0.01)
    os.kill(children(supervisors[1])[0], signal.SIGKILL)
    outputs = [process.communicate(timeout=400) for process in supervisors]
    errors = [error for _, error in outputs]
    assert [process.returncode for process in supervisors] == [0, 0], errors
    assert "trm: the run was killed by SIGKILL; restart 1 of 2 in 5 s" in errors[1]
    assert "trm: process 1 on " in errors[0]
    assert f"the run ended with status {LostProcessError.STATUS}; restart 1 of 2 in 5 s" in errors[0]
    assert "continuing at step" in outputs[0][0] and "finished:" in outputs[0][0]


def test_the_campaign_reports_what_is_wrong(tmp_path):
    class Ended:
        def text(self, index):
            return f"trm: process 0 on here died\nstopped by SIGTERM, saved after step {7 + index}"

    fault = Fault("term4-1", "saving", 2, 0, "SIGTERM", statuses=[75, 1], stop_seconds=12)
    assert problems_of(fault, Ended(), 7) == ["statuses [75, 1], expected 75", "stopped after 12.0 s"]
    assert problems_of(fault, Ended(), 5)[-1] == "not saved at step 5"
    fault.statuses, fault.stop_seconds = [0, 0], 2
    assert problems_of(fault, Ended(), STEPS) == [], "finished before the notice was due"
    assert problems_of(fault, Ended(), STEPS - 1)[0] == "statuses [0, 0], expected 75"
    fault = Fault("lost-SIGKILL-0", "training", 2, 0, "SIGKILL", statuses=[-9, 69], stop_seconds=1)
    assert problems_of(fault, Ended(), 7) == []
    fault.statuses, fault.victim, fault.stop_seconds = [69, None], 1, 31
    assert problems_of(fault, Ended(), 7) == ["stopped after 31.0 s", "an error does not name the process"]
    fault.problems = ["state.step"]
    assert "| SIGKILL to 1 of 2 (process 1) | training | 1 | 0 | 31.0 | 0 | 0.0 |" in table([fault])


def test_the_comparison_of_runs_finds_one_bit(tmp_path, finished_run):
    for name in ("one", "two"):
        shutil.copytree(finished_run, tmp_path / name)
    assert not differences(tmp_path / "one", tmp_path / "two", metrics=True)
    metrics = tmp_path / "two" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"train/count": ', '"train/count": 1'))
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "60" / "carry")
    assert differences(tmp_path / "one", tmp_path / "two", metrics=True) == [
        "carry: other arrays",
        "metrics.jsonl",
    ]
