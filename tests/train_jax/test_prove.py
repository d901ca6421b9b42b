"""`trm prove`: its bookkeeping with parts that are stubs, the choice of kernels, and one fault at a time."""

import dataclasses
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import pytest
from support.scripts import ROOT

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.pod.prove import kernels as proved
from train_jax.pod.prove import steps
from train_jax.pod.prove.context import Context
from train_jax.pod.prove.parts import Part, preflight_rows
from train_jax.pod.prove.rows import NO_TIME, Record, absent, passed
from train_jax.pod.prove.runner import close, supervise, work
from train_jax.pod.prove.runs import Runs
from train_jax.pod.unbuilt import task_of
from train_jax.run import performance
from train_jax.run.choices import choices_for, inline, read_choices
from train_jax.run.config import ComputeConfig
from train_jax.run.kernels import CANDIDATES, kernels
from train_jax.run.presets import preset
from train_jax.runtime.compilation import ProgramKey
from train_jax.runtime.feed import Feed

CONTEXT: proved.Context = SimpleNamespace()  # pyright: ignore[reportAssignmentType]


def record_in(folder, identity="one"):
    return Record(folder, {"identity": identity, "devices": "none"})


def raises(_):
    raise ValueError("a device | is gone")


def test_a_part_that_fails_is_named_and_the_rest_runs(tmp_path):
    rows = [passed("speed", "3 ms", ms=3.0), absent("MFU", "no peak")]
    parts = [Part("first", raises), Part("second", lambda _: rows)]
    work(CONTEXT, record_in(tmp_path), parts, 60)
    there = record_in(tmp_path)
    assert [(row.part, row.name, row.status) for row in there.rows] == [
        ("first", "first", "FAIL"),
        ("second", "speed", "PASS"),
        ("second", "MFU", "n/a"),
    ]
    assert there.failed and there.running == "" and there.rows[1].figures == {"ms": 3.0}
    assert "a device \\| is gone" in (tmp_path / "prove.md").read_text()
    assert "<td>ValueError: a device | is gone" in (tmp_path / "prove.html").read_text()


def test_it_goes_on_where_it_was_and_names_what_ended_the_process(tmp_path):
    calls = []
    parts = [Part(name, lambda _, name=name: calls.append(name) or [passed(name, "right")]) for name in "abc"]
    record = record_in(tmp_path)
    record.end("a", [passed("a", "right")])
    record.begin("b")
    work(CONTEXT, record_in(tmp_path), parts, 60)
    assert calls == ["c"]
    assert [row.status for row in record_in(tmp_path).rows] == ["PASS", "FAIL", "PASS"]
    work(CONTEXT, record_in(tmp_path, "another"), parts, 60)
    assert calls == ["c", *"abc"], "another proof begins anew"


def test_the_time_is_over(tmp_path):
    record = record_in(tmp_path)
    record.end("a", [passed("a", "right")])
    record.begin("b")
    close(record_in(tmp_path), ["a", "b", "c"])
    there = record_in(tmp_path)
    assert [(row.name, row.measured) for row in there.rows] == [("a", "right"), ("b", NO_TIME), ("c", NO_TIME)]
    assert [there.has(part) for part in "abc"] == [True, False, False] and not there.failed


def test_workers_end_with_the_time_and_start_again_after_a_crash(tmp_path):
    count = tmp_path / "count"
    crash = f"import os; f = open({str(count)!r}, 'a'); f.write('x'); f.flush(); os._exit(86 if f.tell() < 3 else 0)"
    assert supervise([sys.executable, "-c", crash], time.monotonic() + 60, 5) == 0
    assert count.read_text() == "xxx"
    begin = time.monotonic()
    assert supervise([sys.executable, "-c", "import time; time.sleep(60)"], begin + 2.5, 5) == 0, "the time is over"
    assert time.monotonic() - begin < 10
    assert supervise([sys.executable, "-c", "import os; os._exit(9)"], time.monotonic() + 60, 2) == 9


SMALL = proved.Case("trm::mix_positions", (proved._bf16(2, 9, 32), proved._bf16(64, 9), proved._bf16(9, 32)))


@pytest.fixture
def choosing(tmp_path, monkeypatch):
    """Returns the choices and rows after `choose_rows` with other implementations of one operation."""

    def choose(candidates, milliseconds=lambda call: 1.0):
        monkeypatch.setitem(CANDIDATES["cpu"], SMALL.operation, candidates)
        monkeypatch.setattr(proved, "calls_of", lambda _: [SMALL])
        monkeypatch.setattr(proved, "milliseconds", milliseconds)
        local = [SimpleNamespace(device_kind="cpu")]
        context = SimpleNamespace(devices=SimpleNamespace(platform="cpu", local=local), choices=tmp_path / "choices")
        rows = proved.choose_rows(context)  # pyright: ignore[reportArgumentType]
        return json.loads(context.choices.read_text())["choices"], rows

    return choose


def falling():
    """Times of which each is half of the one before: a later implementation is the faster one."""
    times = [8.0]
    return lambda call: times.append(times[-1] / 2) or times[-1]


def one_gradient_wrong(x, gate_up, down):
    right = proved.plain_of(SMALL.operation)(x, gate_up, down)
    return right + 0.5 * (gate_up[3, 4] - jax.lax.stop_gradient(gate_up[3, 4]))


def test_the_faster_right_kernel_is_chosen(choosing):
    joined = CANDIDATES["cpu"][SMALL.operation]["joined"]
    choices, rows = choosing({"joined": joined}, falling())
    assert choices == {SMALL.operation: "joined"} and {row.status for row in rows} == {"PASS"}


@pytest.mark.slow
def test_a_slower_kernel_is_not_chosen(choosing):
    assert choosing({"joined": CANDIDATES["cpu"][SMALL.operation]["joined"]})[0] == {}


def test_a_wrong_kernel_is_named_and_never_chosen(choosing):
    choices, rows = choosing({"wrong": one_gradient_wrong}, falling())
    assert choices == {} and rows[0].status == "FAIL"
    assert "wrong is wrong: gradient 1 differs by" in rows[0].measured


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_named(choosing):
    def refused(*_):
        raise NotImplementedError("no such unit")

    choices, rows = choosing({"refused": refused}, falling())
    assert choices == {} and "NotImplementedError: no such unit" in rows[0].measured


def test_choices_in_a_configuration(tmp_path):
    file = tmp_path / "choices.json"
    file.write_text(json.dumps({"platform": "cpu", "choices": {SMALL.operation: "joined"}}))
    text = read_choices(str(file))
    assert text == inline("cpu", {SMALL.operation: "joined"}) == read_choices(text)
    assert choices_for(text, "cpu") == {SMALL.operation: "joined"} and choices_for(text, "tpu") == {}
    assert set(kernels(ComputeConfig(choices=text, mlp="fused"), "cpu")["lowerings"]) == {SMALL.operation}
    assert kernels(ComputeConfig(choices=text), "gpu") == {"lowerings": {}, "functions": {}}
    for content in ("[]", "{}", "not JSON", '{"platform": "abacus", "choices": {}}'):
        file.write_text(content)
        with pytest.raises(UserError, match="no choices are in it"):
            read_choices(str(file))
    with pytest.raises(UserError, match="is not known on a cpu"):
        kernels(ComputeConfig(choices="cpu/trm::mix_positions=magic"), "cpu")


@pytest.mark.slow
def test_a_run_keeps_its_choices(tmp_path, data_dir):
    file = tmp_path / "choices.json"
    file.write_text(json.dumps({"platform": "cpu", "choices": {SMALL.operation: "joined"}}))
    arguments = ["train", "tiny", "--data-dir", data_dir, "--run-dir", tmp_path / "run", "--wandb", "disabled"]
    arguments += ["--compute.choices", file, "--checkpoint-every-steps", "1"]
    assert main([*map(str, arguments), "--steps", "1"]) == 0
    file.write_text(json.dumps({"platform": "cpu", "choices": {}}))
    assert main([*map(str, arguments), "--steps", "2"]) == 0
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["compute"]["choices"]
    assert kept == inline("cpu", {SMALL.operation: "joined"})


@pytest.mark.campaign
def test_a_tiny_proof(tmp_path, data_dir):
    """It runs in a process of its own, because the minutes count from the start of the process."""
    arguments = ["--data-dir", data_dir, "--output", tmp_path / "proof", "--minutes", "4", "--foreign", "1"]
    subprocess.run([sys.executable, "-m", "train_jax", "prove", "tiny", *map(str, arguments)], cwd=ROOT)
    content = json.loads((tmp_path / "proof" / "prove.json").read_text())
    rows = [row for part in content["parts"].values() for row in part]
    assert {row["status"] for row in rows} <= {"PASS", "n/a"}, [row for row in rows if row["status"] == "FAIL"]
    assert {"model beside PyTorch", "choices", "step, plain, pmap", "input wait"} <= {row["name"] for row in rows}


# ---- one fault at a time: its own row fails, and the others are as they were


@pytest.fixture
def context(tmp_path, data_dir):
    config = dataclasses.replace(
        preset("tiny"), data_dir=str(data_dir), run_dir=str(tmp_path / "runs" / "preflight"), wandb="disabled"
    )
    return Context("tiny", config, task_of(config), tmp_path, ["--data-dir", str(data_dir)])


def failed(rows):
    return {row.name for row in rows if row.status == "FAIL"}


@pytest.mark.slow
def test_a_full_disk(context, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    rows = preflight_rows(context)
    assert failed(rows) == {"disk"} and {"model beside PyTorch", "memory"} <= {row.name for row in rows}


@pytest.mark.slow
def test_a_slow_input(context, monkeypatch):
    def slow(make, *others):
        return Feed(lambda number: (time.sleep(0.3), make(number))[1], *others)

    assert failed(steps.input_rows(context)) == set()
    monkeypatch.setattr(steps, "Feed", slow)
    assert failed(steps.input_rows(context)) == {"input wait"}


@pytest.mark.campaign
def test_a_peak_that_is_too_low(context, monkeypatch):
    monkeypatch.setattr(steps, "WINDOW_SECONDS", 0.05)
    monkeypatch.setitem(performance.PEAK_BF16_FLOPS, "cpu", 1e18)
    rows = steps.step_rows(context)
    shares = {row.name: row.figures["mfu"] for row in rows if row.name.startswith("MFU")}
    assert len(shares) >= 4 and failed(rows) == set()
    slowest = min(shares.values())
    monkeypatch.setitem(performance.PEAK_BF16_FLOPS, "cpu", 1e18 * slowest / 10)
    assert failed(steps.step_rows(context)) == set(shares)


@pytest.mark.campaign
def test_a_checkpoint_that_does_not_restore_and_a_program_of_another_version(context, monkeypatch):
    runs = Runs(context, time.monotonic() + 120, 60, first=True)
    assert failed(runs.rows("profile")) == set()
    start = runs._start

    def damaged(name, *fields):
        for path in context.folder.glob("runs/killed/checkpoints/*/model/**/*"):
            if path.is_file():
                path.write_bytes(b"?" * path.stat().st_size)
        return start(name, *fields)

    monkeypatch.setattr(runs, "_start", damaged)
    assert failed(runs.rows("kill and continuation")) == {"kill and continuation"}
    monkeypatch.setattr(runs, "_start", start)
    key = ProgramKey("0.0.1", "0.0.1", "", "cpu", 1, 1, "")
    context.program.write_text(f"trm-program-1\n{json.dumps(dataclasses.asdict(key))}\n")
    rows = runs.rows("program, loaded")
    assert failed(rows) == {"program, loaded"} and "compiled for jax '0.0.1'" in rows[0].measured


HANGS = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from train_jax.pod.prove.parts import Part
from train_jax.pod.prove.rows import Record, passed
from train_jax.pod.prove.runner import work

parts = [Part("hangs", lambda _: time.sleep(60)), Part("rest", lambda _: [passed("rest", "right")])]
work(SimpleNamespace(), Record(Path(sys.argv[1]), {"identity": "one"}), parts, 1.0)
"""


@pytest.mark.slow
def test_a_part_that_hangs(tmp_path):
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    statuses = [subprocess.run(command, cwd=ROOT, timeout=50).returncode for _ in range(2)]
    rows = Record(tmp_path, {"identity": "one"}).rows
    assert statuses == [86, 0] and [(row.name, row.status) for row in rows] == [("hangs", "FAIL"), ("rest", "PASS")]
