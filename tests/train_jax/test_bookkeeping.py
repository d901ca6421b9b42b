"""The steps at which a run logs, evaluates and saves, its files and events; a stopped run; the search for a NaN."""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from support.presets import with_fields
from support.toy_language import ToyLanguage, toy_run, write_tokens

from train_jax.errors import PreemptedError, UserError
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.events import read_events
from train_jax.run.folder import RunFolder, complete_steps
from train_jax.run.presets import preset
from train_jax.run.restore import choose
from train_jax.run.tracking import read_metrics
from train_jax.runtime.clock import TRAINING
from train_jax.runtime.devices import Devices
from train_jax.storage.lease import LostFolderError
from train_jax.trainer.hooks.evaluating import Evaluating
from train_jax.trainer.hooks.nan_debugging import check_debugging
from train_jax.trainer.loop import train

STEPS = 18
TRAIN = "train"
EVAL = "eval"
RECORDS = [(2, TRAIN), (4, EVAL), (4, TRAIN), (6, TRAIN), (8, EVAL), (8, TRAIN), (10, TRAIN), (12, EVAL), (12, TRAIN),
           (14, TRAIN), (16, EVAL), (16, TRAIN), (18, TRAIN), (18, EVAL)]  # fmt: skip
"""Log lines every 2 steps, evaluations every 4. A window is fetched one step late, or before a checkpoint."""
FILES = {"FINISHED", "checkpoints", "config.json", "dataset.json", "evaluation", "events.jsonl", "heartbeat.json",
         "lock", "logs", "machine.json", "metrics.jsonl"}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder)
    return toy_run(
        folder, run_dir=str(folder / "whole"), warmup_steps=4, lr=1e-2, ema_decay=0.9, steps=STEPS, eval_batch_size=32,
        eval_every_steps=4, eval_examples=16, log_every_steps=2, checkpoint_every_steps=6, keep_checkpoints=1,
        keep_best="-loss",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(config):
    """The figures of a run that is not stopped, with two steps in a dispatch."""
    return train(with_fields(config, {"steps_per_dispatch": 2}))


def kind(record):
    return record["step"], EVAL if "eval/loss" in record else TRAIN


def losses(records):
    return {kind(record): record.get("eval/loss", record.get("train/loss")) for record in records}


def training_seconds(events):
    return sum(event.get("seconds", {}).get(name, 0.0) for event in events for name in TRAINING)


def test_a_run_writes_its_records_files_and_checkpoints(config, whole):
    folder = RunFolder(Path(config.run_dir))
    assert {path.name for path in folder.path.iterdir()} == FILES
    records = read_metrics(folder)
    assert [kind(record) for record in records] == RECORDS
    assert [r["eval/count"] for r in records if "eval/count" in r] == [16 * 12] * 4 + [32 * 12]
    assert all(50 < r["train/tokens"] / 2 < 8 * 12 for r in records if "train/tokens" in r), "of two steps of 8 rows"
    seconds = [record["train_seconds"] for record in records]
    assert seconds == sorted(seconds) and seconds[-1] == whole["train_seconds"] > 0
    last = {name.removeprefix("eval/"): value for name, value in records[-1].items() if name.startswith("eval/")}
    assert whole == last | {"train_seconds": seconds[-1], "train_steps": STEPS, "summary": whole["summary"]}
    assert complete_steps(folder.checkpoints) == [12, 18]
    with contextlib.closing(Checkpoints(folder, writes=False)) as checkpoints:
        assert choose(checkpoints, "best") == 12, "the last one that is both evaluated and saved, with the lowest loss"
        assert checkpoints.notes(12)["best"]["value"] == -losses(records)[12, EVAL]


def test_a_run_writes_its_events_and_its_log_and_is_not_touched_when_it_is_finished(config, whole):
    folder = RunFolder(Path(config.run_dir))
    start, first, *others, end = read_events(folder)
    assert (start["event"], first["event"], end["event"]) == ("start", "continue", "end")
    assert (first["step"], end["step"], end["reason"]) == (0, STEPS, "finished")
    assert {event["event"] for event in others} == {"progress"} and {event["session"] for event in others} == {1}
    steps = [event["step"] for event in others]
    assert steps == sorted(steps) and {6, 12, 18} <= {*steps}
    kinds = {name for event in [first, *others, end] for name in event["seconds"]}
    assert kinds == {"start", "restore", "compile", "data", "steps", "evaluation", "saving", "end"}
    assert training_seconds([first, *others, end]) == pytest.approx(whole["train_seconds"], abs=0.01)
    compilation = sum(event["seconds"].get("compile", 0.0) for event in [first, *others, end])
    stepping = sum(2 * record["step_seconds"] for record in read_metrics(folder) if kind(record)[1] == TRAIN)
    assert compilation > 0 and stepping <= whole["train_seconds"] - compilation + 0.01, "a log line has two steps"
    lines = folder.host_log(0).read_text().splitlines()
    model = "support.toy_language:TokenModel with 624 parameters on 1 x cpu"
    first = f"{model}; 256 examples; 18 steps of 8, metrics every 2 steps"
    assert lines[lines.index(first) + 1].startswith("train step compiled in ") and lines[-1].startswith("goodput ")
    before = folder.events.read_bytes(), folder.config.read_bytes()
    assert train(config) == whole
    assert (folder.events.read_bytes(), folder.config.read_bytes()) == before


def test_a_run_that_was_stopped_records_the_same(config, whole, monkeypatch, tmp_path):
    stopped = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    calls = []
    figures = ToyLanguage.figures

    def with_a_notice(task, *args):
        """The fourth log line, of steps 7 and 8, is written when step 9 has begun."""
        calls.append(args)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return figures(task, *args)

    with monkeypatch.context() as patch, pytest.raises(PreemptedError, match="saved after step ") as preempted:
        patch.setattr(ToyLanguage, "figures", with_a_notice)
        train(stopped)
    step = int(str(preempted.value).partition("after step ")[2].partition(";")[0])
    folder = RunFolder(Path(stopped.run_dir))
    assert step >= 9 and complete_steps(folder.checkpoints) == [step] and not folder.finished.exists()
    assert kind(read_metrics(folder)[-1]) == (step, TRAIN)
    end = read_events(folder)[-1]
    assert (end["step"], end["reason"]) == (step, "preempted") and end["seconds"]["saving"] > 0
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"step": step + 1, "train/loss": 0.0}) + "\n")  # the step is computed again

    again = train(stopped)
    records = read_metrics(folder)
    expected = read_metrics(RunFolder(Path(config.run_dir)))
    assert sorted(map(kind, records)) == sorted({*RECORDS, (step, TRAIN)})
    cut = {step, step + 1}  # windows that end elsewhere
    ours, theirs = ({k: v for k, v in losses(r).items() if k[0] not in cut} for r in (records, expected))
    assert ours == pytest.approx(theirs, rel=1e-5) and again["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    seconds = [record["train_seconds"] for record in records]
    assert seconds == sorted(seconds) and seconds[-1] == again["train_seconds"]
    assert training_seconds(read_events(folder)) == pytest.approx(again["train_seconds"], abs=0.02)
    assert [event["step"] for event in read_events(folder) if event["event"] == "continue"] == [0, step]
    assert f"18 steps of 8, metrics every 2 steps, continuing at step {step}" in folder.host_log(0).read_text()


@pytest.mark.parametrize(("owner", "method"), [(ToyLanguage, "figures"), (Evaluating, "end")])
def test_a_run_whose_folder_is_replaced_writes_nothing_into_the_new_one(config, monkeypatch, tmp_path, owner, method):
    """Before a save, and after the last one: `FINISHED` would be that of another run."""
    run = tmp_path / "run"
    before = getattr(owner, method)

    def then_replaced(*args):
        result = before(*args)
        if not (tmp_path / "moved").exists():
            run.rename(tmp_path / "moved")
            run.mkdir()
        return result

    monkeypatch.setattr(owner, method, then_replaced)
    with pytest.raises(LostFolderError, match="run was removed or replaced while this process wrote it"):
        train(with_fields(config, {"run_dir": str(run), "steps": 4, "keep_best": "", "warmup_steps": 0}))
    assert not any(run.iterdir()) and not (tmp_path / "moved" / "FINISHED").exists()


def test_a_folder_that_is_replaced_during_a_save_is_lost(config, monkeypatch, tmp_path):
    """The save fails because its folder is gone, which is no fault of the disk."""
    run = tmp_path / "run"
    other = tmp_path / "run/checkpoints/2.orbax-checkpoint-tmp"

    def replaced(_manager):
        run.rename(tmp_path / "moved")
        other.mkdir(parents=True)  # the new run saves the same step
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(other))

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", replaced)
    with pytest.raises(LostFolderError, match="run was removed or replaced while this process wrote it"):
        train(with_fields(config, {"run_dir": str(run), "steps": 2, "keep_best": "", "warmup_steps": 0}))
    assert list(run.rglob("*")) == [run / "checkpoints", other]


def test_a_step_takes_the_memory_of_state_and_carry_alone():
    devices = Devices(1)
    step = devices.parallel_train_step(lambda state, carry, batch, key: (state + 1, carry * 2, {"sum": batch.sum()}))
    state, (carry, batch) = devices.replicate(jnp.ones(3)), devices.shard((jnp.ones((1, 4)), jnp.ones((1, 4))))
    after = step(state, carry, batch, devices.random_key(0))
    assert [array.is_deleted() for array in (state, carry, batch)] == [True, True, False]
    assert jax.tree.map(lambda x: x.shape, after) == ((3,), (1, 4), {"sum": ()})


def test_a_step_that_is_not_finite_is_skipped_or_with_debug_nans_located(config, tmp_path):
    fields = {"run_dir": str(tmp_path / "run"), "model": "support.toy_language:UnstableModel", "steps": 2}
    unstable = with_fields(config, fields | {"max_skipped_steps": 1, "keep_best": ""})
    with pytest.raises(UserError) as caught:
        train(dataclasses.replace(unstable, debug_nans=True))
    message = str(caught.value)
    assert message.startswith("step 1 is not finite: ") and "nan" in message
    assert "in the forward pass, in model.log (Logarithm), at " in message and "toy_language.py:" in message
    with pytest.raises(UserError, match="2 consecutive steps up to step 2 had a loss or gradient that is not finite"):
        train(unstable)
    assert [record["train/skipped_steps"] for record in read_metrics(RunFolder(tmp_path / "run"))] == [2]


@pytest.mark.parametrize(
    ("backend", "flags", "fields", "message"),
    [
        ("gpu", None, {"deterministic": True}, "run again with XLA_FLAGS=--xla_gpu_deterministic_ops=true"),
        ("gpu", "--xla_other --xla_gpu_deterministic_ops=true", {"deterministic": True}, ""),
        ("cpu", None, {"deterministic": True}, ""),
        ("cpu", None, {"debug_nans": True, "cpu_examples": 2}, ""),
        ("cpu", None, {"debug_nans": True, "accumulation_steps": 2}, "accumulation_steps is 2"),
        ("cpu", None, {"debug_nans": True, "steps_per_dispatch": 4}, "steps_per_dispatch is 4"),
    ],
)
def test_debugging_needs_flags_and_single_steps(monkeypatch, backend, flags, fields, message):
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    every = {"eval_every_steps": 4, "checkpoint_every_steps": 4, "log_every_steps": 4}
    config = with_fields(preset("tiny"), every | fields)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        check_debugging(config)


def test_the_port_of_the_profiler_is_checked_before_the_run():
    with socket.create_server(("", 0)) as taken:
        config = dataclasses.replace(preset("tiny"), profile_server=taken.getsockname()[1])
        with pytest.raises(UserError, match=r"--profile-server \d+: Address already in use; give another port"):
            check_debugging(config)
