"""`trm preflight` on one machine: a story that passes, and faults that are planted one at a time."""

import json
import os
import subprocess

import pytest
from support.markers import slow_or_campaign
from support.presets import with_fields
from support.scripts import ENVIRONMENT, ROOT, script

from train_jax.__main__ import main
from train_jax.pod.preflight import hosts
from train_jax.pod.preflight.hosts import check_holders, check_other_processes
from train_jax.pod.preflight.rows import Row, merge
from train_jax.run.presets import preset


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
    assert {"model beside PyTorch", "memory", "all-reduce"} <= rows.keys()
    assert "2 x cpu" in rows["devices"]["measured"] and "sum over 2 devices is 3" in rows["collective"]["measured"]


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
        (["tiny", "--tpu", "--zone=x"], "--tpu"),
        (["tiny", "--tpu", "a", "--zone", "x;rm"], "--zone 'x;rm': expected a zone such as us-central2-b"),
        (["tiny", "--tpu", "a"], "--tpu and --zone belong together"),
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


@pytest.fixture
def proc(tmp_path):
    """A /proc with two processes: 7 has a TPU open, 8 has JAX loaded."""
    folder = tmp_path / "proc"
    for pid, name, device, library in (
        (7, "python", "/dev/vfio/0", "/lib/libc.so"),
        (8, "jupyter", "/dev/null", "/x/jaxlib/libjax_common.so"),
    ):
        (folder / str(pid) / "fd").mkdir(parents=True)
        (folder / str(pid) / "exe").symlink_to("/usr/bin/python3.11")
        (folder / str(pid) / "fd" / "3").symlink_to(device)
        (folder / str(pid) / "comm").write_text(f"{name}\n")
        (folder / str(pid) / "maps").write_text(f"7f00-7f01 r-xp 00000000 00:00 0 {library}\n")
    return folder


def test_who_holds_the_tpu(proc, tmp_path):
    lockfile = tmp_path / "lockfile"
    row = check_holders("tpu", {1}, proc, lockfile)
    assert (row.status, row.measured) == ("FAIL", "/dev/vfio/0 is open in python (pid 7)") and "kill 7" in row.remedy
    assert check_holders("gpu", {1}, proc, lockfile).status == "WARN"
    assert check_holders("cpu", {1}, proc, lockfile).status == "PASS"
    assert check_holders("tpu", {7}, proc, lockfile).status == "PASS", "the processes of the run may hold it"
    lockfile.touch()
    row = check_holders("tpu", {7}, proc, lockfile)
    assert row.status == "WARN" and str(lockfile) in row.measured


def test_other_processes_with_jax(proc):
    assert check_other_processes({1}, proc).measured == "1 with JAX or libtpu on this host: jupyter (pid 8)"
    assert check_other_processes({8}, proc).status == "PASS"


def test_a_process_whose_memory_map_cannot_be_read(proc, monkeypatch):
    """As of a process that is changing it: nobody waits for that."""
    monkeypatch.setattr("train_jax.pod.preflight.hosts._MAPS_SECONDS", 0.1)
    (proc / "8" / "maps").unlink()
    os.mkfifo(proc / "8" / "maps")  # blocks a reader
    row = check_other_processes(set(), proc)
    assert (row.status, row.measured) == ("PASS", "0 with JAX or libtpu on this host, and not all could be asked")


def test_a_folder_in_memory(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    (tmp_path / "nfs").mkdir()
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\nserver:/x {tmp_path}/nfs nfs4 rw 0 0\n")
    monkeypatch.setattr(hosts, "_MOUNTS", mounts)
    row = hosts.check_folder(str(tmp_path / "run"), "cpu", ["here"])
    assert row.status == "WARN" and "tmpfs" in row.measured
    assert hosts.check_folder(str(tmp_path / "nfs" / "run"), "tpu", ["here"]).status == "PASS"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n")
    assert "deleted with it" in hosts.check_folder(str(tmp_path / "run"), "tpu", ["here"]).measured
    assert hosts.check_folder(str(tmp_path / "run"), "gpu", ["here"]).status == "PASS"
    config = with_fields(preset("tiny"), {"run_dir": str(tmp_path / "run")})
    assert (hosts.check_disk(config, 2**60).status, hosts.check_disk(config, 1).status) == ("FAIL", "PASS")


def test_the_state_of_the_tpu(tmp_path, monkeypatch):
    """A stand-in for gcloud prints its arguments into a file, and what it is told to."""
    program = tmp_path / "gcloud"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/said\ncat {tmp_path}/answer\nexit $(cat {tmp_path}/status)\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for answer, status, expected in (
        ({"state": "READY", "health": "HEALTHY", "acceleratorType": "v4-64"}, 0, "PASS"),
        ({"state": "READY"}, 0, "WARN"),
        ({"state": "PREEMPTED", "health": "HEALTHY"}, 0, "FAIL"),
        ({"state": "READY", "health": "UNHEALTHY_MAINTENANCE"}, 0, "FAIL"),
        ({}, 1, "FAIL"),
    ):
        (tmp_path / "answer").write_text(json.dumps(answer))
        (tmp_path / "status").write_text(str(status))
        assert hosts.check_tpu("mine", "us-central2-b").status == expected
    said = "compute tpus tpu-vm describe mine --zone=us-central2-b --format=json\n"
    assert (tmp_path / "said").read_text() == said


def test_a_key_of_wandb_is_not_shown(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine")
    row = hosts.check_wandb(with_fields(preset("tiny"), {"wandb": "auto"}))
    assert row.measured == "online, with the key of WANDB_API_KEY"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", "/nowhere")
    assert hosts.check_wandb(with_fields(preset("tiny"), {"wandb": "online"})).status == "WARN"
    assert "offline" in hosts.check_wandb(with_fields(preset("tiny"), {"wandb": "auto"})).measured
