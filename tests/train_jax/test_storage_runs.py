"""Whole runs in storage: killed and continued, with requests that fail, read by every stage."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.presets import SMALL_RUN
from support.processes import run_processes
from support.scripts import ENVIRONMENT, ROOT

from train_jax.__main__ import main
from train_jax.run.events import read_goodput
from train_jax.run.folder import RunFolder, complete_steps
from train_jax.storage import cache
from train_jax.storage.files import upload_folder
from train_jax.storage.storage import path_of

SMALL = [*SMALL_RUN, "--steps", "6"]


@pytest.fixture
def arguments(remote, data_dir):
    """`arguments(name)`: the words after `trm` that train in the folder of that name, on data in storage."""
    upload_folder(data_dir, path_of(remote) / "data", last=["recipe.json"])
    data = ["--data-dir", f"{remote}/data"]
    return lambda name: ["train", "tiny", *data, "--run-dir", f"{remote}/{name}", *SMALL]


def in_a_process(arguments, emulator, killed_at=lambda method, path: False):
    """Runs the command in a process of its own, which is killed when the service gets such a request."""
    command = [sys.executable, "-m", "train_jax", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True)

    def kill(method, path):
        if killed_at(method, path):
            os.kill(process.pid, signal.SIGKILL)
            return "reset"
        return ""

    with emulator.failing(kill):
        _, errors = process.communicate()
    return process.returncode, errors


def losses(run):
    """Returns the losses by step, each step once."""
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    values = {r["step"]: r["train/lm_loss"] for r in records if "train/lm_loss" in r}
    assert len(values) == sum("train/lm_loss" in r for r in records)
    return values


@pytest.mark.slow
def test_a_run_in_storage_is_killed_continued_evaluated_and_reported(arguments, remote, emulator, capsys):
    run = RunFolder(path_of(remote) / "run")
    committed = f"{run.path.relative_to(path_of('gs://tests'))}/checkpoints/4/commit_success.txt"
    status, errors = in_a_process(arguments("run"), emulator, lambda method, path: f"name={committed}" in path)
    assert status == -signal.SIGKILL and "trm:" not in errors, errors
    assert not run.finished.exists()
    assert main(arguments("run")) == 0
    assert "continuing at step 2" in capsys.readouterr().out
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
    for stage in ("evaluate", "report", "summary"):
        assert main([stage, str(run.path)]) == 0, capsys.readouterr().err
    assert f"report: {run.report}" in capsys.readouterr().out
    assert run.report.exists() and run.evaluation("test").exists() and run.predictions("test").exists()
    assert not (run.path / "lock").read_bytes() and not (ROOT / "gs:").exists(), "the lease is given back"


@pytest.fixture
def undisturbed(tmp_path, data_dir, capsys):
    """The losses and the exported weights of the same run on the local disk."""
    where = ["--data-dir", str(data_dir), "--run-dir", str(tmp_path / "local")]
    assert main(["train", "tiny", *where, *SMALL]) == 0
    assert main(["export", str(tmp_path / "local"), "--no-check"]) == 0
    run = RunFolder(tmp_path / "local")
    return losses(run), run.weights.read_bytes()


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_request(arguments, remote, emulator, undisturbed, seed):
    """A run of six steps makes about 700 requests."""
    left = int(np.random.default_rng(seed).integers(20, 600))

    def killed(method, path):
        nonlocal left
        left -= 1
        return left == 0

    status, errors = in_a_process(arguments("run"), emulator, killed)
    assert status == -signal.SIGKILL, errors
    status, errors = in_a_process(arguments("run"), emulator)
    assert status == 0, errors
    assert main(["export", f"{remote}/run", "--no-check"]) == 0
    run = RunFolder(path_of(remote) / "run")
    assert (losses(run), run.weights.read_bytes()) == undisturbed


@pytest.mark.campaign
def test_two_processes_write_one_run_in_storage(arguments, remote, emulator, tmp_path):
    """Each process has a cache of its own, as on two hosts."""
    caches = [{"TRM_CACHE_DIR": str(tmp_path / f"cache{index}")} for index in range(2)]
    statuses, texts = run_processes([[sys.executable, "-m", "train_jax", *arguments("run")]] * 2, environments=caches)
    assert statuses == [0, 0], "\n".join(texts)
    run = RunFolder(path_of(remote) / "run")
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
    assert "2 of the run" in run.host_log(1).read_text() and complete_steps(run.checkpoints) == [4, 6]
    assert sum(read_goodput(run).seconds.values()) == pytest.approx(read_goodput(run).wall_seconds, rel=0.01)


def test_a_data_set_is_copied_once_and_again_when_it_or_its_copy_changes(arguments, remote, emulator, capsys):
    data = path_of(remote) / "data"
    count = len(emulator.requests)

    def downloads():
        nonlocal count
        new, count = emulator.requests[count:], len(emulator.requests)
        return sum("__inputs.npy" in path and ("alt=media" in path or "/download/" in path) for _, path in new)

    inspect = ["build-data", "inspect", str(data), "--examples", "0"]
    arguments("unused")
    assert main(inspect) == 0 and downloads() == 2
    assert main(inspect) == 0 and downloads() == 0
    copy = cache.local_folder(data) / "train" / "all__inputs.npy"
    assert copy.is_relative_to(os.environ["TRM_CACHE_DIR"])
    changed = bytearray(copy.read_bytes())
    changed[-1] ^= 1
    copy.write_bytes(changed)
    cache._verified.clear()  # acts as a new process
    assert main(inspect) == 0 and downloads() == 2
    (data / "train" / "all__inputs.npy").write_bytes(bytes(changed))
    capsys.readouterr()
    assert main(inspect) == 2
    assert f"{data} is not what its recipe.json says (SHA-256); build it again with" in capsys.readouterr().err


def test_a_data_set_is_built_in_storage_as_on_a_disk(remote, emulator, tmp_path, capsys):
    """The local scratch folder is removed, and what is built already is not uploaded again."""
    build = ["build-data", "sudoku", "--size", "4", "--num-train", "6", "--num-test", "2", "--num-empty", "6"]
    local = tmp_path / "local"
    folder = path_of(remote) / "data"
    for place in (local, folder):
        assert main([*build, "--output-dir", str(place)]) == 0
    files = {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert folder.files().keys() == files.keys()
    arrays = [name for name in files if name.endswith(".npy")]
    assert arrays and all((folder / name).read_bytes() == files[name] for name in arrays)
    assert not list((cache.cache_folder() / "building").iterdir())
    before = len(emulator.requests)
    assert main([*build, "--output-dir", str(folder)]) == 0
    assert {method for method, _ in emulator.requests[before:]} == {"GET"}
