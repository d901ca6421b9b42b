"""`trm preflight` on one machine: a story that passes, and faults that are planted one at a time."""

import json
import os
import subprocess
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from support.markers import slow_or_campaign
from support.presets import with_fields
from support.scripts import ENVIRONMENT, ROOT, script

from train_jax.__main__ import main
from train_jax.pod.preflight import hosts
from train_jax.pod.preflight.rows import Pod, Row, merge
from train_jax.run.presets import preset
from train_jax.runtime.backend import Choice


def preflight(fault, devices, *options, environment=None):
    """In a process of its own; returns the exit status and the rows by name."""
    command = script("preflight_process", fault, devices, "tiny", "--json", *options)
    variables = os.environ | ENVIRONMENT | (environment or {})
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.stdout.startswith("{"), done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert figures["ok"] == (done.returncode == 0) and done.returncode in (0, 1)
    return done.returncode, {each["name"]: each for each in figures["rows"]}


@pytest.fixture
def where(tmp_path, data_dir):
    return "--data-dir", data_dir, "--run-dir", tmp_path / "runs" / "one"


_REMEDY_IN_TEXT = ("data", "configuration trains", "devices")
"""Checks whose text is an error of `trm train`, which says the remedy."""


def failed(rows):
    return {name for name, each in rows.items() if each["status"] == "FAIL"}


def test_a_machine_that_is_ready(where, capsys, tmp_path):
    assert main(["preflight", "tiny", *map(str, where), "--quick", "--wandb", "disabled"]) == 0
    text = capsys.readouterr().out
    assert "preflight: ready;" in text and "FAIL " not in text
    names = ["processes", "code", "data", "run folder", "devices", "collective", "matrix product", "disk"]
    assert [name for name in names if f"PASS  {name} " not in text] == []
    assert not (tmp_path / "runs").exists(), "everything that was made is removed"


@pytest.mark.slow
def test_the_model_beside_pytorch_and_its_memory(where):
    status, rows = preflight("none", 2, *where)
    assert (status, failed(rows)) == (0, set())
    assert {"model beside PyTorch", "memory"} <= rows.keys()
    assert (
        "2 x cpu" in rows["devices"]["measured"] and "sum over 2 devices is 3; 16 MiB" in rows["collective"]["measured"]
    )


@pytest.mark.parametrize("model", slow_or_campaign(["hrm"], ["transformer", "trm_hier6"]))
def test_other_architectures_beside_pytorch(where, model):
    assert preflight("none", 1, *where, "--model", model, "--arch.forward-dtype", "bfloat16")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "devices", "options", "name", "message"),
    [
        ("none", 1, ["--expect-devices", "4", "--quick"], "devices", "1 x cpu"),
        ("none", 1, ["--expect-processes", "8", "--quick"], "processes", "1 process"),
        ("none", 3, ["--quick"], "configuration trains", "global batch 16 does not divide over 3 devices"),
        ("none", 1, ["--platform", "gpu", "--quick"], "devices", "there is no device of the platform cuda"),
        ("none", 1, ["--data-dir", "nowhere", "--quick"], "data", "no data set at nowhere"),
        ("none", 1, ["--run-dir", "README.md/run", "--quick"], "run folder", "README.md/run cannot be written"),
        ("memory", 1, [], "memory", "of 1.0 MiB"),
        ("logistic", 1, [], "model beside PyTorch", "differ, most"),
        ("product", 1, ["--quick"], "matrix product", "bfloat16"),
    ],
    ids=["devices", "processes", "batch", "platform", "data", "unwritable", "memory", "lowering", "product"],
)
def test_a_fault_is_caught(where, fault, devices, options, name, message):
    status, rows = preflight(fault, devices, *where, *options)
    assert (status, failed(rows)) == (1, {name})
    assert message in rows[name]["measured"] and (rows[name]["remedy"] or name in _REMEDY_IN_TEXT)


def test_mistakes_are_status_2(capsys):
    for argv, message in (
        (["nothing"], "unknown preset 'nothing'"),
        ([], "needs a preset or an experiment"),
        (["tiny", "--expect-devices", "-1"], "expect-devices"),
        (["tiny", "--stepz", "3"], "--stepz"),
    ):
        assert main(["preflight", *argv]) == 2
        assert message in capsys.readouterr().err


# ---- without processes and devices


def test_rows_of_several_processes():
    row = Row("disk", "PASS", "much")
    low = Row("disk", "WARN", "little")
    only = Row("wandb", "PASS", "offline")
    merged = merge([[row, only], [low], [low]], ["a", "b", "c"])
    assert [(each.name, each.status, each.where) for each in merged] == [
        ("disk", "WARN", "process 1 on b, and 1 more"),
        ("wandb", "PASS", ""),
    ]


def pod(platform="cpu", **fields):
    """A run on this host alone."""
    return Pod(with_fields(preset("tiny"), fields), Choice(platform, "as requested"), ["here"])


def test_who_holds_the_tpu(tmp_path, monkeypatch):
    """In a /proc with two processes: 7 has a TPU open, 8 has none."""
    for pid, device in ((7, "/dev/vfio/0"), (8, "/dev/null")):
        (tmp_path / "proc" / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "fd" / "3").symlink_to(device)
        (tmp_path / "proc" / str(pid) / "comm").write_text("python\n")
    lockfile = tmp_path / "lockfile"
    monkeypatch.setattr(hosts, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(hosts, "_LOCKFILE", lockfile)
    row = hosts.check_holders(pod("tpu"))
    assert (row.status, row.measured) == ("FAIL", "/dev/vfio/0 is open in python (pid 7)") and "kill 7" in row.remedy
    assert hosts.check_holders(pod("gpu")).status == "WARN"
    assert hosts.check_holders(pod("cpu")).status == "PASS"
    monkeypatch.setattr(os, "getpid", lambda: 7)
    assert hosts.check_holders(pod("tpu")).status == "PASS", "the processes of the run may hold it"
    lockfile.touch()
    row = hosts.check_holders(pod("tpu"))
    assert row.status == "WARN" and str(lockfile) in row.measured


def test_the_run_folder_on_one_host(tmp_path):
    run_dir = str(tmp_path / "runs" / "one")
    assert hosts.check_folder(pod("gpu", run_dir=run_dir)).status == "PASS" and not list(tmp_path.iterdir())
    row = hosts.check_folder(pod("tpu", run_dir=run_dir))
    assert row.status == "WARN" and "deleted with it" in row.measured


@pytest.mark.parametrize(("size", "status"), [(2**30, "FAIL"), (1, "PASS")])
def test_room_for_checkpoints(tmp_path, size, status):
    of_run = pod(run_dir=str(tmp_path))
    training: Any = SimpleNamespace(initial_state=lambda: jnp.zeros((size, size)))
    of_run.training = training
    assert hosts.check_disk(of_run).status == status


def test_a_key_of_wandb_is_not_shown(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine")
    assert hosts.check_wandb(pod(wandb="auto")).measured == "online, with the key of WANDB_API_KEY"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", "/nowhere")
    assert hosts.check_wandb(pod(wandb="online")).status == "WARN"
    assert "offline" in hosts.check_wandb(pod(wandb="auto")).measured
