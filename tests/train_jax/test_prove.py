"""`trm prove`: its bookkeeping with parts that are stubs, and the choice of kernels."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import pytest
from support.scripts import ROOT

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.pods.check import kernels as proved
from train_jax.pods.check.parts import Part
from train_jax.pods.check.record import NO_TIME, Record
from train_jax.pods.check.rows import absent, named
from train_jax.pods.check.runner import Check
from train_jax.pods.check.worker import close, supervise, work
from train_jax.pods.stages import prove as stage
from train_jax.run.choices import choices_for, inline, read_choices
from train_jax.run.config import ComputeConfig, from_json
from train_jax.run.folder import RunFolder
from train_jax.run.kernels import CANDIDATES, kernels

CONTEXT: proved.Context = SimpleNamespace(hosts=["here"], has_data=True)  # pyright: ignore[reportAssignmentType]


def part(name, function):
    return Part(name, (Check(name, function, may_last=True),))


def record_in(folder, identity="one"):
    return Record(folder, {"identity": identity, "devices": "none"})


def test_a_part_that_fails_is_named_and_the_rest_runs(tmp_path):
    def raises(_):
        raise ValueError("a device | is gone")

    rows = [named("speed", "3 ms", ms=3.0), absent("MFU", "no peak")]
    parts = [part("first", raises), part("second", lambda _: rows)]
    work(CONTEXT, record_in(tmp_path), parts, 60)
    there = record_in(tmp_path)
    of_second = [("second", "speed", "PASS"), ("second", "MFU", "n/a")]
    found = [(part, row.name, row.status) for part, rows in there.parts.items() for row in rows]
    assert found == [("first", "first", "FAIL"), *of_second]
    assert there.failed and there.running == "" and there.parts["second"][0].figures == {"ms": 3.0}
    assert "a device \\| is gone" in (tmp_path / "prove.md").read_text()


def test_it_goes_on_where_it_was_and_names_what_ended_the_process(tmp_path):
    calls = []
    parts = [part(name, lambda _, name=name: calls.append(name) or [named(name, "right")]) for name in "abc"]
    for folder in (tmp_path, tmp_path / "late"):
        record_in(folder).end("a", [named("a", "right")])
        record_in(folder).begin("b")
    work(CONTEXT, record_in(tmp_path), parts, 60)
    assert calls == ["c"]
    assert [row.status for row in record_in(tmp_path).rows] == ["PASS", "FAIL", "PASS"]
    work(CONTEXT, record_in(tmp_path, "another"), parts, 60)
    assert calls == ["c", *"abc"], "another proof begins anew"
    close(record_in(tmp_path / "late"), ["a", "b", "c"])
    late = record_in(tmp_path / "late")
    assert [(row.name, row.measured) for row in late.rows] == [("a", "right"), ("b", NO_TIME), ("c", NO_TIME)]
    assert [late.has(part) for part in "abc"] == [True, False, False] and not late.failed


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
    """Returns the choices and rows with other implementations, each `ratio` times as slow as the one before."""

    def choose(candidates, ratio=0.5):
        times = [8.0]
        monkeypatch.setitem(CANDIDATES["cpu"], SMALL.operation, candidates)
        monkeypatch.setattr(proved, "calls_of", lambda _: [SMALL])
        monkeypatch.setattr(proved, "milliseconds", lambda _: times.append(times[-1] * ratio) or times[-1])
        local = [SimpleNamespace(device_kind="cpu")]
        context = SimpleNamespace(devices=SimpleNamespace(platform="cpu", local=local), choices=tmp_path / "choices")
        rows = proved.choose_rows(context)  # pyright: ignore[reportArgumentType]
        return json.loads(context.choices.read_text())["choices"], rows

    return choose


def one_gradient_wrong(x, gate_up, down):
    right = proved.plain_of(SMALL.operation)(x, gate_up, down)
    return right + 0.5 * (gate_up[3, 4] - jax.lax.stop_gradient(gate_up[3, 4]))


@pytest.mark.parametrize(("ratio", "chosen"), [(0.5, {SMALL.operation: "joined"}), (1.0, {})])
def test_only_a_faster_kernel_is_chosen(choosing, ratio, chosen):
    choices, rows = choosing({"joined": CANDIDATES["cpu"][SMALL.operation]["joined"]}, ratio)
    assert choices == chosen and {row.status for row in rows} == {"PASS"}


def refused(*_):
    raise NotImplementedError("no such unit")


@pytest.mark.parametrize(
    ("candidate", "words"),
    [(one_gradient_wrong, "it is wrong: gradient 1 differs by"), (refused, "NotImplementedError: no such unit")],
)
def test_a_wrong_kernel_is_named_and_never_chosen(choosing, candidate, words):
    choices, rows = choosing({"it": candidate})
    assert choices == {} and rows[0].status == "FAIL" and words in rows[0].measured


JOINED = inline("cpu", {SMALL.operation: "joined"})


@pytest.fixture
def choices_file(tmp_path):
    """A file of choices, after whose reading a configuration has `JOINED`."""
    file = tmp_path / "given.json"
    file.write_text(json.dumps({"platform": "cpu", "choices": {SMALL.operation: "joined"}}))
    return file


def test_choices_in_a_configuration(choices_file):
    text = read_choices(str(choices_file))
    assert text == JOINED == read_choices(text)
    assert choices_for(text, "cpu") == {SMALL.operation: "joined"} and choices_for(text, "tpu") == {}
    assert set(kernels(ComputeConfig(choices=text, mlp="fused"), "cpu")["lowerings"]) == {SMALL.operation}
    assert kernels(ComputeConfig(choices=text), "gpu") == {"lowerings": {}, "functions": {}}
    for content in ("[]", "{}", "not JSON", '{"platform": "abacus", "choices": {}}'):
        choices_file.write_text(content)
        with pytest.raises(
            UserError, match=r"given\.json cannot be read \(.*; give --compute.choices a file of `trm prove --choose`"
        ):
            read_choices(str(choices_file))
    with pytest.raises(UserError, match="is not known on a cpu"):
        kernels(ComputeConfig(choices="cpu/trm::mix_positions=magic"), "cpu")


@pytest.mark.campaign
def test_a_run_keeps_its_choices_without_their_file_and_follows_another_one(choices_file, tmp_path, data_dir):
    folder = RunFolder(tmp_path / "run")
    arguments = ["train", "tiny", "--data-dir", data_dir, "--run-dir", folder.path, "--wandb", "disabled"]
    arguments += ["--compute.choices", choices_file, "--checkpoint-every-steps", "1"]

    def after(steps):
        assert main([*map(str, arguments), "--steps", str(steps)]) == 0
        return from_json(folder.config.read_text()).compute.choices

    assert after(1) == JOINED
    choices_file.unlink()
    assert after(2) == JOINED, "another machine does not have the file"
    choices_file.write_text(json.dumps({"platform": "cpu", "choices": {}}))
    assert after(3) == inline("cpu", {})
    changes = [json.loads(line)["fields"] for line in folder.changes.read_text().splitlines()]
    assert [each.get("compute.choices") for each in changes] == [None, [JOINED, inline("cpu", {})]]


def test_hosts_of_which_one_has_no_data_are_refused(monkeypatch, tmp_path, data_dir, capsys):
    monkeypatch.setattr(stage, "exchange", lambda *_: ["true", "true", "false"])
    monkeypatch.setattr(stage, "work", lambda *_: None)
    arguments = ["--data-dir", str(data_dir), "--output", str(tmp_path), "--worker"]
    assert main(["prove", "tiny", *arguments]) == 2
    assert "is there for process 0 and not for process 2; copy it to every host" in capsys.readouterr().err


def test_sigterm_ends_the_worker(tmp_path):
    before = signal.signal(signal.SIGTERM, stage._stopped)
    pid = tmp_path / "pid"
    writes = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))"
    try:
        with pytest.raises(SystemExit) as ended:
            worker = f"{writes}; os.kill({os.getpid()}, 15); time.sleep(60)"
            supervise([sys.executable, "-c", worker], time.monotonic() + 50, 5)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 75
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.slow
def test_a_tiny_proof(tmp_path, data_dir):
    """Runs in a process of its own: the minutes count from the start of the process."""
    arguments = ["--data-dir", data_dir, "--output", tmp_path / "proof", "--minutes", "8"]
    subprocess.run([sys.executable, "-m", "train_jax", "prove", "tiny", *map(str, arguments)], cwd=ROOT)
    content = json.loads((tmp_path / "proof" / "prove.json").read_text())
    rows = [row for part in content["parts"].values() for row in part]
    assert {row["status"] for row in rows} <= {"PASS", "n/a"}, [row for row in rows if row["status"] == "FAIL"]
    assert {"model beside PyTorch", "choices", "step, plain, pmap", "input wait"} <= {row["name"] for row in rows}


@pytest.mark.parametrize(
    ("words", "stage", "arguments"),
    [
        ("hosts tiny --quick", "preflight", "tiny --quick"),
        ("kernels tiny", "prove", "tiny --only kernels"),
        ("step tiny --steps 2", "prove", "tiny --steps 2 --only step"),
        ("tiny", "prove", "tiny --only step"),
        ("all tiny", "prove", "tiny"),
    ],
)
def test_check_is_one_command_for_its_parts(monkeypatch, words, stage, arguments):
    called = []
    for name in ("preflight", "prove"):
        target = f"train_jax.pods.stages.{name}.cli"
        monkeypatch.setattr(target, lambda argv, name=name: called.append((name, argv)))
    assert main(["check", *words.split()]) == 0
    assert called == [(stage, arguments.split())]


@pytest.mark.parametrize("words", [[], ["step"], ["hosts"], ["nothing"]])
def test_check_needs_something_to_check(capsys, words):
    assert main(["check", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
