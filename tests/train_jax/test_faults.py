"""Runs that are killed at random moments, continued, and compared with the run that nobody disturbed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.scripts import ENVIRONMENT, ROOT

from campaigns.faults import Campaign, main
from campaigns.faults_list import Part
from campaigns.faults_runs import FIELDS, Run, differences, free_address
from train_jax.errors import LostProcessError


@pytest.mark.campaign
def test_a_run_that_is_killed_in_each_phase_ends_as_one_that_is_not(tmp_path, data_dir):
    """The run is killed at random moments, and continues from the checkpoints that are left."""
    whole = tmp_path / "whole"
    folder = tmp_path / "run"
    Run(whole, data_dir, 1).finish()
    Run(whole, data_dir, 1, export=True).finish()
    run = Run(folder, data_dir, 1)
    for phase in ["compiling", "training", "evaluating", "restoring", "saving"]:
        run.start()
        run.wait_for_phase(phase, 1)
        moment = time.monotonic() + random.uniform(0, 3 if phase == "compiling" else 0.05)
        while time.monotonic() < moment and not (phase == "compiling" and "phase training" in run.text(0)):
            time.sleep(0.005)  # a kill in the training after a fast compilation would let the run end early
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
    assert main(Campaign((part,))) == 0


@pytest.mark.campaign
def test_two_processes_with_restarts_join_again_after_one_was_killed(tmp_path, data_dir):
    folder = tmp_path / "run"
    count = 2
    words = ["--data-dir", str(data_dir), "--run-dir", str(folder), "--wandb", "disabled", "--restarts", "2"]
    words += [word for name, value in FIELDS.items() for word in (f"--{name}", str(value))]
    variables = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": str(count)}
    variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    command = [sys.executable, "-m", "train_jax", "train", "tiny", *words]
    output = subprocess.PIPE
    everything = [os.environ | ENVIRONMENT | variables | {"JAX_PROCESS_ID": str(index)} for index in range(count)]
    supervisors = [
        subprocess.Popen(command, env=each, stdout=output, stderr=output, text=True, cwd=ROOT) for each in everything
    ]
    while not (folder / "checkpoints" / "10").exists():
        assert all(process.poll() is None for process in supervisors)
        time.sleep(0.01)
    second = supervisors[1].pid
    os.kill(int(Path(f"/proc/{second}/task/{second}/children").read_text().split()[0]), signal.SIGKILL)
    outputs = [process.communicate(timeout=400) for process in supervisors]
    errors = [error for _, error in outputs]
    assert [process.returncode for process in supervisors] == [0, 0], errors
    assert "trm: the run was killed by SIGKILL; restart 1 of 2 in 5 s" in errors[1]
    assert "trm: process 1 on " in errors[0]
    assert f"the run ended with status {LostProcessError.STATUS}; restart 1 of 2 in 5 s" in errors[0]
    assert "continuing at step" in outputs[0][0] and "finished:" in outputs[0][0]


def test_the_comparison_of_runs_finds_one_bit(tmp_path, finished_run):
    for name in ("one", "two"):
        shutil.copytree(finished_run, tmp_path / name)
    assert not differences(tmp_path / "one", tmp_path / "two", metrics=True)
    metrics = tmp_path / "two" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"train/count": ', '"train/count": 1'))
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "60" / "carry")
    assert differences(tmp_path / "one", tmp_path / "two", metrics=True) == ["carry: other arrays", "metrics.jsonl"]
