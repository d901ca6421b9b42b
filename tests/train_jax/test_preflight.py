"""`trm preflight` on one machine and on two: runs that pass, and faults that are planted."""

import json
import os
import shutil
import subprocess

import pytest
from support.markers import slow_or_campaign
from support.presets import with_fields
from support.processes import other_code, own_lines, run_processes
from support.scripts import ENVIRONMENT, ROOT, script

from train_jax.__main__ import main
from train_jax.pods.check import hosts
from train_jax.pods.check.context import Context
from train_jax.run.presets import preset
from train_jax.runtime.backend import Choice


def rows_of(text):
    """Returns the rows by name that `--json` printed, and under "left out" the names of those that were not checked."""
    figures = json.loads(text[text.index("{") : text.rindex("}") + 1])
    rows = {each["name"]: each for each in figures["rows"]} | {"left out": figures["not_checked"]}
    assert figures["ok"] == (not failed(rows))
    return rows


def failed(rows):
    return {name for name, each in rows.items() if name != "left out" and each["status"] == "FAIL"}


def preflight(fault, devices, *options):
    """Runs the command in a process of its own; returns the rows by name."""
    command = script("faulty_machine", fault, devices, "preflight", "tiny", "--json", *options)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.startswith("{"), done.stderr[-2000:]
    rows = rows_of(done.stdout)
    assert done.returncode == bool(failed(rows))
    return rows


def on_hosts(folders, run_dir, *options, of_second=(), fault="none", **more):
    """Runs the command in a process for each folder, with two devices each; `of_second`: further options of process 1.

    Returns the rows that process 0 prints, and what the last process prints.
    """
    arguments = ["preflight", "tiny", "--data-dir", "data", "--run-dir", run_dir, "--json", "--quick", *options]
    command = script("faulty_machine", fault, 2, *arguments)
    statuses, texts = run_processes([command, [*command, *of_second]][: len(folders)], folders, **more)
    assert "{" in texts[0], texts[0][-3000:]
    rows = rows_of(texts[0])
    assert set(statuses) == {int(bool(failed(rows)))}
    return rows, texts[-1]


@pytest.fixture
def where(tmp_path, data_dir):
    return "--data-dir", data_dir, "--run-dir", tmp_path / "runs" / "one"


def test_a_machine_that_is_ready(where, capsys, tmp_path):
    assert main(["preflight", "tiny", *map(str, where), "--quick", "--wandb", "disabled"]) == 0
    text = capsys.readouterr().out
    assert "preflight: ready;" in text and "FAIL " not in text
    names = ["processes", "code", "data", "run folder", "devices", "collective", "matrix product", "disk"]
    assert [name for name in names if f"PASS  {name} " not in text] == []
    assert not (tmp_path / "runs").exists(), "everything that was made is removed"


@pytest.mark.campaign
@pytest.mark.parametrize("model", ["hrm", "transformer", "trm_hier6"])
def test_other_architectures_beside_pytorch(where, model):
    assert not failed(preflight("none", 1, *where, "--model", model, "--arch.forward-dtype", "bfloat16"))


@pytest.mark.parametrize(
    ("name", "message"), [("devices", "1 x cpu"), ("processes", "1 process")], ids=["devices", "processes"]
)
def test_another_number_than_expected_fails(where, capsys, name, message):
    with pytest.raises(SystemExit, match="1"):
        main(["preflight", "tiny", *map(str, where), "--quick", "--json", f"--expect-{name}", "8"])
    rows = rows_of(capsys.readouterr().out)
    assert failed(rows) == {name} and message in rows[name]["measured"]


def hosts_with_data(folder, data_dir):
    folders = [folder / "here", folder / "there"]
    for each in folders:
        shutil.copytree(data_dir, each / "data")
    return folders


@pytest.mark.parametrize("runner", slow_or_campaign(["pmap"], ["shard_map"]))
def test_two_hosts_that_are_ready(tmp_path, data_dir, runner):
    options = "--no-quick", "--compute.runner", runner, "--expect-devices", "4"
    rows, text = on_hosts(hosts_with_data(tmp_path, data_dir), tmp_path / "run", *options)
    assert (failed(rows), rows["left out"]) == (set(), [])
    assert "4 x cpu" in rows["devices"]["measured"] and "sum over 4 devices is 10; " in rows["collective"]["measured"]
    assert "written and read by 2 processes" in rows["run folder"]["measured"]
    assert "MiB of" in rows["memory"]["measured"]
    assert own_lines(text) == [], "only process 0 prints"
    assert not (tmp_path / "run").exists()


def on_a_weak_device(folder, data_dir):
    rows = preflight("memory+logistic", 1, "--data-dir", data_dir, "--run-dir", folder / "run")
    assert failed(rows) == {"memory", "model beside PyTorch"}
    return rows


def on_three_devices(folder, data_dir):
    rows = preflight("product", 3, "--data-dir", data_dir, "--run-dir", folder / "run", "--quick")
    assert failed(rows) == {"matrix product", "configuration trains"}
    return rows


def on_no_gpu(folder, data_dir):
    rows = preflight("none", 1, "--platform", "gpu", "--data-dir", "nowhere", "--run-dir", "README.md/run", "--quick")
    assert failed(rows) == {"devices", "data", "run folder"}
    return rows


def on_different_hosts(folder, data_dir):
    """Code, command line, data and clock of host 1 are others, and it does not see the run folder of host 0."""
    folders = hosts_with_data(folder, data_dir)
    for split in ("train", "test"):
        labels = folders[1] / "data" / split / "all__labels.npy"
        content = bytearray(labels.read_bytes())
        content[-1] = content[-2]
        labels.write_bytes(content)
    (folders[1] / "data" / "recipe.json").unlink()
    environments = {}, other_code(folder / "copy")
    rows, _ = on_hosts(folders, "run", of_second=("--seed", "3"), fault="clock:1", environments=environments)
    assert failed(rows) == {"code", "configuration", "data", "clock", "run folder"}
    assert {"collective", "configuration trains"} <= set(rows["left out"])
    assert not any((each / "run").exists() for each in folders)
    return rows


def on_different_backends(folder, data_dir):
    environments = [{"JAX_PLATFORMS": ""}] * 2
    hosts = hosts_with_data(folder, data_dir)
    rows, text = on_hosts(hosts, folder / "run", fault="tpu:1", environments=environments)
    assert failed(rows) == {"devices"} and "computes on the" in text
    return rows


def on_one_of_two_hosts(folder, data_dir):
    rows, _ = on_hosts(hosts_with_data(folder, data_dir)[:1], folder / "run", "--timeout", "5", count=2)
    assert failed(rows) == {"processes"} and "collective" in rows["left out"]
    return rows


@pytest.fixture
def planted(made_once, data_dir):
    """`planted(make)`: the rows of `make(folder, data_dir)`, which is called once for all tests."""

    def rows_with_faults(make):
        folder = made_once(make.__name__, lambda new: (new / "rows.json").write_text(json.dumps(make(new, data_dir))))
        return json.loads((folder / "rows.json").read_text())

    return rows_with_faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        pytest.param(on_a_weak_device, "memory", "of 1.0 MiB", id="memory"),
        pytest.param(on_a_weak_device, "model beside PyTorch", "differ, most", id="lowering"),
        pytest.param(on_three_devices, "matrix product", "bfloat16", id="product"),
        pytest.param(on_three_devices, "configuration trains", "16 does not divide over 3 devices", id="batch"),
        pytest.param(on_no_gpu, "run folder", "README.md/run cannot be written", id="unwritable"),
        pytest.param(on_different_hosts, "code", "differs from most in train_jax/trainer/loop.py", id="code"),
        pytest.param(on_different_hosts, "data", "process 1 on", id="other-data"),
        pytest.param(on_different_hosts, "clock", "process 1 on", id="clock"),
        pytest.param(on_different_hosts, "run folder", "the file that process 1 on", id="not-shared"),
        pytest.param(on_different_backends, "devices", "computes on the", id="backend"),
        pytest.param(on_one_of_two_hosts, "processes", "process 1 did not connect", id="missing"),
    ],
)
def test_a_fault_is_caught(planted, make, name, message):
    row = planted(make)[name]
    assert row["status"] == "FAIL" and message in row["measured"]


def pod(platform="cpu", **fields):
    return Context("tiny", with_fields(preset("tiny"), fields), Choice(platform, "as requested"))


def test_the_process_that_holds_the_tpu_is_named(tmp_path, monkeypatch):
    """/proc has two processes: 7 has a TPU open, 8 has none."""
    for pid, device in ((7, "/dev/vfio/0"), (8, "/dev/null")):
        (tmp_path / "proc" / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "fd" / "3").symlink_to(device)
        (tmp_path / "proc" / str(pid) / "comm").write_text("python\n")
    monkeypatch.setattr(hosts, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(hosts, "_LOCKFILE", tmp_path / "lockfile")
    row = hosts.check_holders(pod("tpu"))
    assert (row.status, row.measured) == ("FAIL", "/dev/vfio/0 is open in python (pid 7)") and "kill 7" in row.remedy
    assert hosts.check_holders(pod("gpu")).status == "WARN"
    monkeypatch.setattr(os, "getpid", lambda: 7)
    assert hosts.check_holders(pod("tpu")).status == "PASS", "the processes of the run may hold it"


def test_a_key_of_wandb_is_not_shown(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine")
    assert hosts.check_wandb(pod(wandb="auto")).measured == "online, with the key of WANDB_API_KEY"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", "/nowhere")
    assert hosts.check_wandb(pod(wandb="online")).status == "WARN"
    assert "offline" in hosts.check_wandb(pod(wandb="auto")).measured
