"""Damaged run folders, paths that are no files, closed streams and Ctrl-C: one line each, and nothing is written."""

import dataclasses
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support.scripts import ROOT

from train_jax.__main__ import main
from train_jax.errors import StorageError, UserError, os_error
from train_jax.language.text_set import sampled
from train_jax.run.choices import read_choices
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.run.resume import decide_start
from train_jax.run.tracking import read_metrics
from train_jax.runtime.compilation import check_program
from train_jax.runtime.feed import Batches
from train_jax.storage.files import append_text, check_output, local_copy, whole_file, write_text
from train_jax.storage.lines import LineFile
from train_jax.storage.untrusted import DamagedError, map_array, read_arrays

NO_TEXT = b"\xff{"
NESTED = b"[" * 100_000
FIGURES = {"train_steps": 60, "train_seconds": 1.0, "summary": "done", "count": 8.0}
BEAT = {"session": 1, "time": 1.0, "kind": "steps", "step": 1, "step_time": 1.0, "seconds": {}}
WHOLE = "expected a whole number from 0"
NO_NUMBER = "expected a number"
REFUSED = [
    # file, content, command, reason
    ("FINISHED", b"", "summary", "Expecting value"),
    ("FINISHED", b"\xff", "summary", "codec can't decode"),
    ("FINISHED", b"[1]", "summary", "it is [1], expected an object"),
    ("FINISHED", FIGURES | {"train_steps": "many"}, "summary", f"train_steps is 'many', {WHOLE}"),
    ("FINISHED", FIGURES | {"train_steps": 10**400}, "summary", WHOLE),
    ("FINISHED", FIGURES | {"train_seconds": float("nan")}, "summary", "train_seconds is nan"),
    ("FINISHED", FIGURES | {"exact_accuracy": [1]}, "summary", f"exact_accuracy is [1], {NO_NUMBER}"),
    ("FINISHED", FIGURES, "summary", "exact_accuracy is missing"),
    ("config.json", NO_TEXT, "evaluate", "config.json cannot be read"),
    ("config.json", NESTED, "evaluate", "maximum recursion depth"),
    ("config.json", NESTED, "status", "maximum recursion depth"),
    ("config.json", {"model": "trm"}, "evaluate", "task is missing"),
    ("config.json", {"seed": "one"}, "evaluate", "seed is 'one'; use a whole number"),
    ("config.json", {"data_dir": 3}, "evaluate", "data_dir is 3; use text"),
    ("config.json", {"model": ["trm"]}, "evaluate", "model is ['trm'], expected text"),
    ("config.json", {"optim": {"ema_decay": None}}, "summary", "optim is a dict, expected an object"),
    ("dataset.json", NESTED, "evaluate", "maximum recursion depth"),
    ("machine.json", b"[]", "report", "machine.json cannot be read"),
    ("machine.json", {"parameters": "many"}, "report", f"parameters is 'many', {WHOLE}"),
    ("evaluation/test.json", {"count": 8, "exact_accuracy": "all"}, "report", f"exact_accuracy is 'all', {NO_NUMBER}"),
    ("evaluation/export_check.json", {"puzzles": 8}, "summary", "agree is missing"),
    ("evaluation/test_halting_curve.json", {"by_threshold": [], "by_steps": []}, "report", "expected a list of points"),
    ("evaluation/test_halted_early.json", {"steps": "few"}, "report", f"steps is 'few', {NO_NUMBER}"),
]  # fmt: skip
LEFT_OUT = [
    ("heartbeat.json", {}),
    ("heartbeat.json", BEAT | {"time": "now"}),
    ("heartbeat.json", BEAT | {"seconds": {"naps": 1.0}}),
    ("heartbeat.json", NESTED),
    ("events.jsonl", {"event": "start"}),
    ("events.jsonl", {"event": "end", "session": 9, "time": 2.0, "step": 60, "seconds": {}}),
    ("events.jsonl", NESTED),
    ("metrics.jsonl", {"step": "two"}),
    ("metrics.jsonl", {"step": 3, "train/lm_loss": "low"}),
    ("metrics.jsonl", {"step": 3, "train/skipped_steps": float("nan")}),
    ("metrics.jsonl", NESTED),
]


@pytest.fixture
def run(tmp_path, finished_run):
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(("name", "content", "command", "reason"), REFUSED)
def test_a_damaged_file_is_one_line(name, content, command, reason, run, capsys):
    path = run / name
    if name == "config.json" and isinstance(content, dict) and len(content) == 1 and "task" not in reason:
        content = json.loads(path.read_text()) | content
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    before = listing(run)
    assert main([command, str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trm: ") and error.count("\n") == 1
    assert reason in error and str(path) in error
    assert listing(run) == before


@pytest.mark.parametrize(("name", "content"), LEFT_OUT)
def test_damaged_lines_and_heartbeats_are_left_out(name, content, run, capsys):
    """They describe the run; nothing depends on them."""
    metrics = read_metrics(RunFolder(run))
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path = run / name
    path.write_bytes(b"%s%s\n" % (path.read_bytes() if name.endswith(".jsonl") else b"", text))
    for command in (["status"], ["status", "--json"], ["summary"]):
        assert main([*command, str(run)]) == 0
    assert read_metrics(RunFolder(run)) == metrics
    assert not capsys.readouterr().err


def test_facts_that_a_task_needs_are_named(tmp_path, language_run, capsys):
    path = Path(shutil.copytree(language_run, tmp_path / "run")) / "dataset.json"
    for content, reason in (({}, "vocab_size is missing"), ({"vocab_size": None}, f"vocab_size is None, {WHOLE}")):
        path.write_text(json.dumps(content))
        assert main(["generate", str(path.parent), "--prompt", "1"]) == 2
        assert f"{path} cannot be read ({reason})" in capsys.readouterr().err


# ---- paths


def test_a_wrong_path_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, reason in (("d" * 300, "File name too long; use a shorter name"), ("a\0b", "")):
        assert main(["status", path]) == 2
        error = capsys.readouterr().err
        assert error.startswith("trm: ") and error.count("\n") == 1 and reason in error
    assert os_error(ConnectionResetError(104, "Connection reset by peer")) is None
    forbidden = os_error(PermissionError(13, "Permission denied", "set/all.npy"))
    assert str(forbidden) == "set/all.npy: Permission denied; use another path, or change its permissions"
    full = os_error(OSError(28, "No space left on device", "x"))
    assert isinstance(full, StorageError) and full.STATUS == 74


def test_outputs_go_through_links_and_into_pipes(tmp_path):
    target = tmp_path / "target"
    link = tmp_path / "link"
    pipe = tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "through")
    reader.join(10)
    assert received == ["through"] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]
    write_text(tmp_path / ("ñ" * 125), "a name that leaves no room for another one beside it")


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "weights") as scratch:
            scratch.unlink()
            os.close(os.open(scratch, os.O_CREAT, 0o600))  # as safetensors writes it
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == 0o640


def test_a_folder_where_a_file_should_be_is_no_failure_of_the_disk(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "file" / "run", "Not a directory|File exists")):
        with pytest.raises(UserError, match=reason) as error:
            write_text(path, "")
        assert error.value.STATUS == 2


def test_an_output_is_checked_before_the_computation(tmp_path):
    for path, reason in (
        (tmp_path / "no" / "x.json", "no is not a folder; give a file in an existing folder"),
        (tmp_path, "is a folder; give a file"),
        ("gs://", "names no bucket"),
    ):
        with pytest.raises(UserError, match=reason):
            check_output(path)
    check_output(tmp_path / "new.json")
    check_output("new.json")


def test_a_pipe_is_no_file(tmp_path):
    """To open one blocks until somebody writes into it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for read in (map_array, lambda path: read_arrays(path, (), largest_bytes=9)):
        with pytest.raises(DamagedError, match="not a regular file"):
            read(pipe)

    def copied(path):
        with local_copy(path):
            pass

    for read in (copied, LineFile, lambda path: read_choices(str(path)), lambda path: check_program(path, None, [])):
        with pytest.raises(UserError, match="not a regular file"):
            read(pipe)


def test_lines_are_added_to_damaged_ones(tmp_path):
    path = tmp_path / "changes.jsonl"
    path.write_bytes(b"\xff\n")
    append_text(path, "{}\n")
    assert path.read_bytes() == b"\xff\n{}\n"


# ---- streams and signals


@pytest.mark.parametrize(("arguments", "status"), [("--version >&-", 0), ("nothing 2>&-", 2), ("x <&- >&- 2>&-", 2)])
def test_closed_streams_are_no_error(arguments, status):
    command = f"{sys.executable} -m train_jax {arguments}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status and "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ("trm._load = interrupt", 130),
        ("trm.main = lambda argv: 0; atexit.register(interrupt, '')", 0),
    ],
    ids=["while modules are imported", "while the process ends"],
)
def test_an_interrupt_has_no_traceback(change, status):
    code = f"""
import atexit, os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from train_jax import __main__ as trm
def interrupt(_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
{change}
trm.command(["status", "none"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, "trm: interrupted\n" * (status == 130))


def test_an_interrupt_that_is_ignored_stays_so():
    """Under `nohup`, and in the background of a script."""
    code = f"""
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from train_jax import __main__ as trm
trm.main = lambda argv: 0
trm.command()
assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN == {signal.SIG_IGN.value}
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- before a run folder is made


def test_a_token_out_of_the_vocabulary_is_found_before_the_run(tmp_path, language_run, capsys):
    data = Path(shutil.copytree(language_run.removesuffix("run") + "set", tmp_path / "set"))
    shard = data / "test" / "tokens-00000.npy"
    tokens = np.load(shard)
    tokens[-1] = 5000
    np.save(shard, tokens)
    options = ["--arch.seq-len", "16", "--global-batch-size", "2", "--eval-batch-size", "2", "--wandb", "disabled"]
    assert main(["train", "chat-tiny", "--data-dir", str(data), "--run-dir", str(tmp_path / "run"), *options]) == 2
    assert "set/test contains the token 5000, expected less than 280; build it again" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_large_data_is_sampled(monkeypatch):
    shards = [np.arange(100_000), np.arange(70_000)]
    assert sum(map(len, sampled(shards))) == 170_000
    monkeypatch.setattr("train_jax.language.text_set.SCANNED_BYTES", shards[0].nbytes)
    assert [len(part) for part in sampled(shards)] == [65_536, 65_536]


def test_a_run_folder_has_a_name_that_orbax_can_write(tmp_path, monkeypatch):
    for folder in (f"{tmp_path}/r\udcff", f"{tmp_path}/r\udcff/run"):
        with pytest.raises(UserError, match=r"udcff.*is not UTF-8; use another folder"):
            decide_start(dataclasses.replace(preset("tiny"), run_dir=folder), 10, "")
    assert not list(tmp_path.iterdir())


# ---- long runs


@pytest.mark.parametrize(("first", "total", "size"), [(0, 10, 1), (0, 10, 4), (5, 10, 4), (8, 10, 4), (10, 10, 4)])
def test_the_dispatches_of_a_run(first, total, size):
    batches: Batches = Batches(None, None, total_steps=total, steps_per_dispatch=size)  # pyright: ignore
    steps = [step for dispatch in batches.dispatches(first) for step in dispatch]
    assert steps == list(range(first, total))
    assert all(each.stop % size == 0 or each.stop == total for each in batches.dispatches(first))


def test_dispatches_take_no_memory():
    batches: Batches = Batches(None, None, total_steps=10**12, steps_per_dispatch=3)  # pyright: ignore
    dispatches = batches.dispatches(4)
    assert (dispatches[0], dispatches[1], dispatches[-1]) == (range(4, 6), range(6, 9), range(10**12 - 1, 10**12))
    assert len(dispatches) > 3 * 10**11
