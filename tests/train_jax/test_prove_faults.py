"""`trm prove` with one fault at a time: its own row fails, and the others are as they were."""

import dataclasses
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from support.markers import slow_or_campaign
from support.processes import run_processes
from support.scripts import ROOT, script

from train_jax.pods.check import runs as proof_runs
from train_jax.pods.check import steps
from train_jax.pods.check.context import Context
from train_jax.pods.check.parts import PREFLIGHT
from train_jax.pods.check.record import Record
from train_jax.pods.check.runner import run_checks
from train_jax.pods.check.runs import Runs
from train_jax.run.presets import preset
from train_jax.runtime.backend import Choice
from train_jax.runtime.compilation import ProgramKey, entries_apart
from train_jax.runtime.feed import Feed


@pytest.fixture
def context(tmp_path, data_dir):
    fields = {"data_dir": str(data_dir), "run_dir": str(tmp_path / "runs" / "preflight"), "wandb": "disabled"}
    config = dataclasses.replace(preset("tiny"), **fields)
    choice = Choice("cpu", "as requested")
    return Context("tiny", config, choice, tmp_path, ["--data-dir", str(data_dir)])


def failed(rows):
    return {row.name for row in rows if row.status == "FAIL"}


@pytest.mark.slow
def test_a_full_disk(context, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    rows = run_checks(PREFLIGHT, context, 120).rows
    assert failed(rows) == {"disk"} and {"model beside PyTorch", "memory"} <= {row.name for row in rows}


@pytest.mark.campaign
def test_a_slow_input(context, monkeypatch):
    def slow(make, *others):
        return Feed(lambda number: (time.sleep(0.3), make(number))[1], *others)

    assert failed(steps.input_rows(context)) == set()
    monkeypatch.setattr(steps, "Feed", slow)
    assert failed(steps.input_rows(context)) == {"input wait"}


@pytest.mark.campaign
def test_a_checkpoint_that_does_not_restore_and_a_program_of_another_version(context, monkeypatch):
    runs = Runs(context, time.monotonic() + 120, 60, first=True)
    assert failed(runs.rows("profile")) == set()
    running = runs._running

    def damaged(name, *fields):
        for path in context.folder.glob("runs/killed/checkpoints/*/model/**/*"):
            if path.is_file():
                path.write_bytes(b"?" * path.stat().st_size)
        return running(name, *fields)

    monkeypatch.setattr(runs, "_running", damaged)
    assert failed(runs.rows("kill and continuation")) == {"kill and continuation"}
    monkeypatch.setattr(runs, "_running", running)
    key = ProgramKey("0.0.1", "0.0.1", "", "cpu", 1, 1, "")
    context.program.write_text(f"trm-program-1\n{json.dumps(dataclasses.asdict(key))}\n")
    rows = runs.rows("program, loaded")
    assert failed(rows) == {"program, loaded"} and "compiled for jax '0.0.1'" in rows[0].measured


@pytest.fixture
def pretending(context, monkeypatch):
    """`pretending(script)`: the runs of a proof, with a script in the place of `trm train`."""

    def runs(script):
        monkeypatch.setattr(proof_runs, "COMMAND", (sys.executable, "-c", script))
        return Runs(context, time.monotonic() + 60, 20, first=True)

    return runs


@pytest.mark.parametrize(("source", "status"), [("from the compilation cache", "PASS"), ("into the cache", "FAIL")])
def test_a_shipped_program_is_the_only_one_that_its_run_can_find(pretending, tmp_path, monkeypatch, source, status):
    script = f"""
import os, sys
there = sorted(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]))
print("train step compiled in 0.1 s, {source}" if there == ["jit_step-1-cache", "shipped.json"] else there)
assert "--steps" not in sys.argv and "pmap" in sys.argv"""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
    (row,) = pretending(script).rows("program, shipped")
    assert row.status == "n/a" and "names no folder of `trm compile-pod --fill-cache`" in row.measured
    for name in ("jit_step-1-cache", "jit_other-2-cache"):
        (folder / name).write_text("a program")
    (folder / "shipped.json").write_text(json.dumps({"jit_step-1-cache": {}}))
    (row,) = pretending(script).rows("program, shipped")
    assert row.status == status and f"train step compiled in 0.1 s, {source}; " in row.measured


@pytest.mark.slow
def test_a_program_is_saved_before_its_first_step_and_a_run_loads_it(context):
    """Also if JAX's compilation cache has the program: XLA for CPUs writes it in part, when it was read from there."""
    plain = {"attention": "plain", "mlp": "plain", "choices": ""}
    with entries_apart():
        steps.Stepper(context.training("shard_map", **plain))
        training = context.training("shard_map", **plain)
        assert [row.status for row in steps.Stepper(training, context.program).saved] == ["PASS"]
    (row,) = Runs(context, time.monotonic() + 120, 100, first=True).rows("program, loaded")
    assert row.status == "PASS" and "s after the restore" in row.measured, row.measured


HANGS = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from train_jax.pods.check.parts import Part
from train_jax.pods.check.record import Record
from train_jax.pods.check.rows import row
from train_jax.pods.check.runner import Check
from train_jax.pods.check.worker import work

functions = {"hangs": lambda _: time.sleep(60), "rest": lambda _: row("right")}
parts = [Part(name, (Check(name, function, may_last=True),)) for name, function in functions.items()]
work(SimpleNamespace(hosts=["here"], has_data=True), Record(Path(sys.argv[1]), {"identity": "one"}), parts, 1.0)
"""


@pytest.mark.slow
def test_a_part_that_hangs(tmp_path):
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    statuses = [subprocess.run(command, cwd=ROOT, timeout=50).returncode for _ in range(2)]
    rows = Record(tmp_path, {"identity": "one"}).rows
    assert statuses == [86, 0] and [(row.name, row.status) for row in rows] == [("hangs", "FAIL"), ("rest", "PASS")]


@pytest.mark.parametrize("case", slow_or_campaign([("show_choices:0,1+wrong:1", "plain")], [("timings:0,1", "joined")]))
def test_two_processes_choose_the_same(tmp_path, data_dir, case):
    """The times of the processes contradict each other, or a kernel is wrong in one of them alone."""
    fault, choice = case
    arguments = ["prove", "tiny", "--data-dir", data_dir, "--output", tmp_path, "--choose", "--worker"]
    statuses, texts = run_processes([script("faulty_machine", fault, 1, *arguments)] * 2)
    assert statuses == [0, 0] and all(f"chosen: trm::mix_positions {choice}" in text for text in texts), texts
    choices = json.loads((tmp_path / "choices.json").read_text())["choices"]
    assert choices.get("trm::mix_positions", "plain") == choice
    assert bool(failed(Record(tmp_path).rows)) == ("wrong" in fault)
