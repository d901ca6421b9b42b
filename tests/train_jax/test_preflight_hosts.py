"""`trm preflight` in two processes with two virtual devices each: faults of one host, planted one at a time."""

import json
import shutil

import pytest
from support.markers import slow_or_campaign
from support.processes import own_lines, run_processes
from support.scripts import ROOT, script

PACKAGES = ("bridge", "models_torch", "train_jax", "tests")


@pytest.fixture
def hosts(tmp_path, data_dir):
    """The folders of two hosts, each with the data."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        shutil.copytree(data_dir, folder / "data")
    return folders


def preflight(folders, run_dir, *options, fault="none", commands=2, **more):
    """Exit statuses, the rows by name that process 0 prints, and what the last process prints."""
    arguments = ["tiny", "--data-dir", "data", "--run-dir", run_dir, "--json", "--quick", *options]
    command = script("preflight_process", fault, 2, *arguments)
    statuses, texts = run_processes([command] * commands, folders, **more)
    assert "{" in texts[0], texts[0][-3000:]
    figures = json.loads(texts[0][texts[0].index("{") : texts[0].rindex("}") + 1])
    assert figures["ok"] == (set(statuses) == {0})
    return statuses, {each["name"]: each for each in figures["rows"]}, texts[-1], figures["not_checked"]


def failed(rows):
    return {name for name, each in rows.items() if each["status"] == "FAIL"}


@pytest.mark.parametrize("runner", slow_or_campaign(["pmap"], ["shard_map"]))
def test_two_hosts_that_are_ready(hosts, tmp_path, runner):
    statuses, rows, text, left_out = preflight(
        hosts, tmp_path / "run", "--no-quick", "--compute.runner", runner, "--expect-devices", "4"
    )
    assert (statuses, failed(rows), left_out) == ([0, 0], set(), [])
    assert "4 x cpu" in rows["devices"]["measured"] and "sum over 4 devices is 10; " in rows["collective"]["measured"]
    assert (
        "written and read by 2 processes" in rows["run folder"]["measured"] and "MiB of" in rows["memory"]["measured"]
    )
    assert own_lines(text) == [], "only process 0 prints"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_host_with_other_code(hosts, tmp_path):
    copy = tmp_path / "copy"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "train_jax" / "loop.py").open("a") as file:
        file.write("# older\n")
    other = {"PYTHONPATH": f"{copy}:{copy / 'tests'}"}
    statuses, rows, _, left_out = preflight(hosts, tmp_path / "run", environments=({}, other))
    assert (statuses, failed(rows)) == ([1, 1], {"code"})
    assert rows["code"]["measured"].endswith("differs from most in train_jax/loop.py")
    assert "collective" in left_out


@pytest.mark.slow
def test_a_host_with_other_data(hosts, tmp_path):
    for split in ("train", "test"):
        labels = hosts[1] / "data" / split / "all__labels.npy"
        content = bytearray(labels.read_bytes())
        content[-1] = content[-2]
        labels.write_bytes(content)
    (hosts[1] / "data" / "recipe.json").unlink()
    statuses, rows, _, left_out = preflight(hosts, tmp_path / "run")
    assert (statuses, failed(rows)) == ([1, 1], {"data"})
    assert "process 1 on" in rows["data"]["measured"] and "configuration trains" in left_out


@pytest.mark.slow
def test_a_host_without_data(hosts, tmp_path):
    shutil.rmtree(hosts[1] / "data")
    statuses, rows, _, _ = preflight(hosts, tmp_path / "run")
    assert (statuses, failed(rows)) == ([1, 1], {"data"})


@pytest.mark.slow
def test_a_host_that_is_missing(hosts, tmp_path):
    statuses, rows, _, left_out = preflight(hosts, tmp_path / "run", "--timeout", "15", commands=1, count=2)
    assert (statuses, failed(rows)) == ([1], {"processes"})
    assert "process 1 did not connect" in rows["processes"]["measured"] and "collective" in left_out


@pytest.mark.slow
def test_a_host_on_another_backend(hosts, tmp_path):
    nothing = {"JAX_PLATFORMS": ""}
    statuses, rows, text, _ = preflight(hosts, tmp_path / "run", fault="tpu:1", environments=(nothing, nothing))
    assert (statuses, failed(rows)) == ([1, 1], {"devices"})
    assert "computes on the" in rows["devices"]["measured"] and "computes on the" in text


@pytest.mark.slow
def test_a_folder_that_the_hosts_do_not_share(hosts):
    statuses, rows, _, _ = preflight(hosts, "run")
    assert (statuses, failed(rows)) == ([1, 1], {"run folder"})
    assert "the file that process 1 on" in rows["run folder"]["measured"]
    assert not any((folder / "run").exists() for folder in hosts)


@pytest.mark.slow
def test_a_folder_that_one_host_cannot_write(hosts):
    (hosts[1] / "run").write_text("a file")
    statuses, rows, _, _ = preflight(hosts, "run")
    assert (statuses, failed(rows)) == ([1, 1], {"run folder"})


@pytest.mark.slow
def test_a_clock_that_is_wrong(hosts, tmp_path):
    statuses, rows, _, _ = preflight(hosts, tmp_path / "run", fault="clock:1")
    assert (statuses, failed(rows)) == ([1, 1], {"clock"})
    assert "process 1 on" in rows["clock"]["measured"]


@pytest.mark.slow
def test_a_host_with_another_command_line(hosts, tmp_path):
    commands = [
        script("preflight_process", "none", 2, "tiny", "--data-dir", "data", "--run-dir", tmp_path / "run", *options)
        for options in (["--quick", "--json"], ["--quick", "--json", "--seed", "3"])
    ]
    statuses, texts = run_processes(commands, hosts)
    assert statuses == [1, 1] and "differs from most in seed" in texts[0]
