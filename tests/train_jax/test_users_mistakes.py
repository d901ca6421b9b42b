"""Mistakes of a user are found before anything is computed, and named in one line."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.example_puzzles import ExamplePuzzles
from train_jax.__main__ import main
from train_jax.core.guard import new_guard
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.pod.launch.record import Source
from train_jax.run.config import RunConfig
from train_jax.run.events import goodput_of
from train_jax.run.folder import RunFolder
from train_jax.run.model import build_objective
from train_jax.run.presets import preset
from train_jax.run.restore import Restored, restore
from train_jax.run.resume import decide_start
from train_jax.run.status import read_status
from train_jax.run.untrusted import DamagedError, map_array, read_arrays, read_whole
from train_jax.start import _check_keep_best
from train_jax.task import Periodic
from train_jax.tasks.evaluate import EvaluateOptions, lines_of
from train_jax.tasks.language.documents import Skipped, TextFile, read_documents
from train_jax.tasks.language.generation import read_prompts
from train_jax.tasks.language.task import LanguageTask
from train_jax.tasks.new_dataset import _difference
from train_jax.tasks.puzzles.building import chunks_of
from train_jax.tasks.puzzles.task import PuzzleTask


def said(capsys, *argv):
    """Returns the status and the one line of a command."""
    status = main([*argv])
    return status, capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--max-hours", "-3"], "--max-hours is -3.0; use at least 0"),
        (["--restarts", "-3"], "--restarts is -3; use at least 0"),
        (["--price-per-hour", "-1"], "--price-per-hour is -1.0; use at least 0"),
        (["--type", "v4-63"], "--type v4-63: a v4 slice has a multiple of 8 cores; use v4-64"),
        (["--type", "v5litepod-12"], "use v5litepod-8"),
        (["--tpu", "9tpu"], "expected a name that begins with a letter"),
    ],
)
def test_a_launch_with_impossible_numbers_creates_no_node(capsys, options, text):
    place = ["--zone", "us-central2-b", "--dry-run"] + ([] if "--tpu" in options else ["--tpu", "one"])
    status, line = said(capsys, "launch", *place, *options, "--", "train", "tiny")
    assert status == 2 and text in line, line


EVALUATOR: Any = None


@pytest.mark.parametrize(("task", "figure"), [(PuzzleTask, "exact_accuracy"), (LanguageTask, "bits_per_byte")])
def test_the_figure_of_the_best_checkpoint_is_checked_before_the_run(task, figure):
    config = dataclasses.replace(preset("tiny"), keep_best="acc", eval_every_steps=3, checkpoint_every_steps=3)
    with pytest.raises(UserError, match=f"keep_best is acc, which no evaluation has; use one of {figure}"):
        _check_keep_best(config, task.evaluated, [Periodic(EVALUATOR, 3)], 9)
    _check_keep_best(dataclasses.replace(config, keep_best=f"-{figure}"), task.evaluated, [Periodic(EVALUATOR, 3)], 9)


@pytest.mark.parametrize(
    ("figure", "every", "passes"),
    [("loss", (0, 2), False), ("hard/loss", (0, 2), True), ("hard/loss", (2, 0), False), ("loss", (2, 0), True)],
)
def test_the_best_checkpoint_needs_the_evaluation_that_has_its_figure(figure, every, passes):
    """The cadence of a task's evaluation does not depend on `eval_every_steps`."""
    config = dataclasses.replace(preset("tiny"), keep_best=figure, eval_every_steps=5, checkpoint_every_steps=2)
    evaluations = [Periodic(EVALUATOR, every[0]), Periodic(EVALUATOR, every[1], "hard")]
    with contextlib.nullcontext() if passes else pytest.raises(UserError, match="its evaluation is every 0 steps"):
        _check_keep_best(config, (), evaluations, 9)


def config_at(folder, **fields) -> RunConfig:
    return dataclasses.replace(preset("tiny"), run_dir=str(folder), **fields)


def test_a_run_needs_a_folder_that_holds_no_data_set(tmp_path):
    with pytest.raises(UserError, match="--run-dir is empty"):
        decide_start(config_at(""), 10, "")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is a file; give a folder") as error:
        decide_start(config_at(tmp_path / "file"), 10, "")
    assert error.value.STATUS == 2
    (tmp_path / "set" / "train").mkdir(parents=True)
    (tmp_path / "set" / "train" / "dataset.json").write_text("{}")
    with pytest.raises(UserError, match="set is a data set"):
        decide_start(config_at(tmp_path / "set"), 10, "")


def test_a_finished_run_is_not_finished_on_other_data(tmp_path):
    folder = RunFolder(tmp_path)
    folder.finished.write_text(json.dumps({"train_steps": 10, "data": "one"}))
    assert decide_start(config_at(tmp_path), 10, "one").finished
    with pytest.raises(UserError, match="holds other data than the run was trained on up to step 10"):
        decide_start(config_at(tmp_path), 10, "two")
    folder.finished.write_text(json.dumps({"train_steps": 10}))  # as an older version wrote it
    assert decide_start(config_at(tmp_path), 10, "two").finished


def test_texts_that_are_not_utf8_are_counted_in_the_error(tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"caf\xe9 number")
    arguments = ["--source", str(tmp_path), "--output-dir", str(tmp_path / "set")]
    for size in ("280", "265"):  # with merges, and without
        status, line = said(capsys, "build-data", "text", *arguments, "--vocab-size", size)
        assert status == 2 and "3 of 3 documents are not UTF-8" in line and "iconv" in line


def test_prompts_end_at_line_feeds_only(tmp_path):
    (tmp_path / "p.txt").write_text("\ufeffone\u2028still one\x85and\x0cagain\r\ntwo\n", newline="")
    assert read_prompts(str(tmp_path / "p.txt")) == ["one\u2028still one\x85and\x0cagain", "two"]


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "train.csv"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text("source,question,answer,rating\na,1,2,0\n", encoding=encoding)
        assert list(chunks_of(path, rows=5, remedy="")) == [[(2, ["a", "1", "2", "0"])]]


def test_the_difference_of_two_recipes_is_shown():
    there, requested = ({"tables_sha256": {"train.csv": "same", "test.csv": test}} for test in ("1234", "5678"))
    assert _difference({"recipe": there}, requested).endswith("(tables_sha256.test.csv is '1234', requested '5678')")


def test_a_heartbeat_from_the_future_is_ignored(tmp_path):
    folder, now = RunFolder(tmp_path), 1e9
    folder.config.write_text(json.dumps({"steps": 10, "global_batch_size": 4, "optim": {"ema_decay": 0.9}}))
    events = [{"session": 1, "event": "start", "time": now, "step": 0}]
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    beat = {"session": 1, "time": now + 9999, "step": 2, "step_time": now, "kind": "steps", "seconds": {}}
    folder.heartbeat.write_text(json.dumps(beat))
    status = read_status(folder, now)
    assert status.health == "silent" and "in the future" in status.why
    back = [*events, {"session": 1, "event": "end", "time": now - 50, "step": 1, "seconds": {}, "reason": "finished"}]
    goodput = goodput_of(back)
    assert goodput is not None and goodput.wall_seconds == 50


def test_no_data_for_a_preset_names_its_vocabulary(capsys, tmp_path):
    status, line = said(capsys, "train", "d20", "--data-dir", str(tmp_path / "none"), "--run-dir", str(tmp_path / "r"))
    assert status == 2 and "trm build-data text --vocab-size 65536" in line


def test_output_in_an_encoding_without_every_character():
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-m", "train_jax", "--help"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_launch_needs_a_git_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is in no git checkout; start trm launch in one of this project"):
        Source.here()


ENDING = """
import atexit, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that started the tests may ignore it
from train_jax import __main__

def run(argv):
    def wait():
        print("ending", flush=True)
        time.sleep(60)

    if argv == ["at exit"]:
        atexit.register(wait)
    elif argv == ["a thread"]:
        threading.Thread(target=wait).start()
    else:
        try:
            raise KeyboardInterrupt
        finally:
            atexit.register(wait)

__main__._run = run
sys.exit(__main__.command())
"""


@pytest.mark.parametrize("ending", ["at exit", "a thread", "interrupted before"])
def test_an_interrupt_while_a_command_ends_is_one_line(ending):
    """Libraries wait for uploads and threads at exit."""
    process = subprocess.Popen([sys.executable, "-c", ENDING, ending], stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ending\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "trm: interrupted\n")


# ---- weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an untrained model, without files."""
    objective = build_objective(config := preset("tiny"), ExamplePuzzles(config), 1)
    state = TrainState(jnp.int32(4), objective.params, {}, (), objective.buffers, new_guard(scales_loss=False))
    return Restored(RunFolder(tmp_path_factory.mktemp("run")), config, ExamplePuzzles(config), objective, state, 4)


def test_the_weights_that_are_evaluated_are_named(trained):
    without_average = dataclasses.replace(trained.config.optim, ema_decay=0.0)
    other = dataclasses.replace(trained, config=dataclasses.replace(trained.config, optim=without_average))
    options = EvaluateOptions("runs/r")
    for run, name in (
        (trained, "averaged weights"),
        (other, "raw weights"),
        (other.with_weights(other.state_dict(), "a.pt"), "weights of a.pt"),
    ):
        assert lines_of(options, run, {}) == f"runs/r at step 4, test set, {name}:"


def test_weights_that_are_not_finite_are_named(trained):
    weights = trained.state_dict()
    names = [name for name in weights if name in trained.state.params][:2]
    for name, value in zip(names, (float("nan"), float("inf")), strict=True):
        weights[name].view(-1)[-1] = value
    with pytest.raises(UserError, match=rf"w.pt has NaN or infinity in 2 tensors: {names[0]}, {names[1]}; use an ear"):
        trained.with_weights(weights, "w.pt")


def test_a_run_whose_checkpoint_has_nan(finished_run, monkeypatch):
    def with_nan(weights, _tables):
        params, buffers = next(weights)
        return params | {name: array * np.nan for name, array in [*params.items()][:1]}, buffers

    monkeypatch.setattr("train_jax.run.restore.mean_weights", with_nan)
    with pytest.raises(UserError, match=r"run at step 60 has NaN or infinity in a tensor: "):
        restore(str(finished_run))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(POINTER)
    for read in (map_array, partial(read_whole, largest_bytes=999), partial(read_arrays, names=(), largest_bytes=999)):
        with pytest.raises(DamagedError, match="it is a pointer of Git LFS; run `git lfs pull`"):
            read(path)
    with pytest.raises(UserError, match=r"train.csv cannot be read: it is a pointer of Git LFS"):
        list(chunks_of(path, rows=5, remedy=""))
    pytest.importorskip("pyarrow")
    parquet = path.rename(tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"not a readable parquet file \(it is a pointer"):
        list(read_documents([TextFile("a", parquet)], "text", Skipped()))
