"""The examples for other engines, read by the engine's own parser where it is installed."""

import argparse
import importlib.util
import os
import subprocess

import pytest
import yaml
from support.scripts import ROOT

from train_jax.runtime.cluster import VARIABLES

ENGINES = ROOT / "docs" / "engines"
FILES = sorted(ENGINES.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_names_the_processes_and_runs_a_command_that_exists(path):
    text = path.read_text()
    command = {"sweep": "trm sweep", "text": "trm build-data text"}.get(path.name.partition("_")[0], "trm train")
    assert command != "trm train" or all(name in text for name in VARIABLES)
    scripts = list(yaml.safe_load(text)[name] for name in ("setup", "run")) if path.suffix == ".yaml" else [text]
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert "source ./environment.sh" in text and command in text


def stand_in(folder, **programs):
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "environment.sh").touch()
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def sweeping(tmp_path, trm):
    """Returns a worker of SLURM with stand-ins for trm and scontrol."""
    variables = stand_in(tmp_path, trm=trm, scontrol='echo "$*" > requeued')
    variables |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "RUNS": "/r", "DATA": "/d"}
    command = ["bash", str(ENGINES / "sweep_slurm.sh"), "exp01", "--seeds", "3"]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)


def test_a_worker_of_a_sweep_on_slurm(tmp_path):
    worker = sweeping(tmp_path, 'echo "$*"; exit 1')
    assert worker.communicate()[0] == "sweep exp01 --seeds 3 --runs-root /r --data-root /d --continue-on-failure\n"
    assert worker.returncode == 1 and not (tmp_path / "requeued").exists()


def test_a_worker_that_is_stopped_is_queued_again(tmp_path):
    worker = sweeping(tmp_path, "trap 'kill %1; echo saved; exit 75' TERM; sleep 60 & echo started; wait")
    assert worker.stdout.readline() == "started\n"
    worker.terminate()
    assert worker.communicate(timeout=30)[0] == "saved\n" and worker.returncode == 75
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_the_example_for_xpk_passes_its_script_as_one_word(tmp_path):
    programs = {"xpk": 'printf "%s\\0" "$@" > arguments', "trm": 'env | grep ^JAX_; echo "$*"'}
    variables = {"BUCKET": "b", "CLUSTER": "c", "ZONE": "z", **stand_in(tmp_path, **programs)}
    subprocess.run(["bash", str(ENGINES / "xpk.sh")], cwd=tmp_path, env=variables, check=True)
    arguments = (tmp_path / "arguments").read_text().split("\0")[:-1]
    assert arguments[:2] == ["workload", "create"]
    if importlib.util.find_spec("xpk") is not None:
        parser = argparse.ArgumentParser()
        importlib.import_module("xpk.parser.core").set_parser(parser)
        parser.parse_args(arguments)
    (command,) = [word.removeprefix("--command=") for word in arguments if word.startswith("--command=")]
    worker = variables | {"TPU_WORKER_HOSTNAMES": "h0,h1", "TPU_WORKER_ID": "1", "PRESET": "tiny"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=worker, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == [
        "JAX_COORDINATOR_ADDRESS=h0:8476",
        "JAX_NUM_PROCESSES=2",
        "JAX_PROCESS_ID=1",
        "train tiny --data-dir gs://b/data/tiny --run-dir gs://b/runs/tiny",
    ]
