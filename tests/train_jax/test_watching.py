"""The state of a run as its folder has it: `trm status`, goodput, events and metrics that survive kills; the metrics of
a window of steps: rates by parameter group, speed in the unit of the task, utilization."""

import dataclasses
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest

from train_jax.__main__ import main
from train_jax.core.optim.chain import logged_learning_rates
from train_jax.core.optim.config import ParameterGroup
from train_jax.errors import PreemptedError, UserError
from train_jax.run import performance
from train_jax.run.events import DOWN, LOST, Events, goodput_of, read_events, read_goodput
from train_jax.run.folder import RunFolder, write_text
from train_jax.run.presets import preset
from train_jax.run.status import find_runs, read_status
from train_jax.runtime.clock import Clock
from train_jax.storage.lines import LineFile, read_lines
from train_jax.storage.storage import path_of
from train_jax.task import OneVariant, Task
from train_jax.trainer.hooks import log_lines
from train_jax.trainer.hooks.log_lines import Logging
from train_jax.trainer.session import Session


class FakeTime:
    def __init__(self, start=1000.0):
        self.time = start

    def __call__(self):
        return self.time


CONFIG = json.dumps({"steps": 100, "global_batch_size": 16, "optim": {"ema_decay": 0.9}})


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path / "config.json", CONFIG)
    return RunFolder(tmp_path)


# ---- lines


def test_a_torn_line_is_left_out_and_takes_no_other_with_it(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert read_lines(path) == [{"step": 1}]
    for step in (3, 4):
        file = LineFile(path)
        file.write({"step": step, "loss": float("nan")})
        file.close()
    assert [record["step"] for record in read_lines(path)] == [1, 3, 4]
    assert path.read_bytes().startswith(b'{"step": 1}\n{"step": 2, "lo\n'), "the file was written again"
    path.write_bytes(b"\0\0\0\n[1]\n" + b'{"step": 5}')
    assert read_lines(path) == [{"step": 5}], "a whole line that only lacks its end"


# ---- goodput


def session(number, start, *events):
    first = {"event": "start", "session": number, "time": start, "total_steps": 100}
    return [first, *({"session": number} | event for event in events)]


def test_goodput_of_a_run_that_was_killed():
    """Steps 21 to 30 and a half of a dispatch of ten steps are computed again; one session ends before it restores."""
    events = [
        *session(
            1, 0.0,
            {"event": "continue", "time": 10.0, "step": 0, "seconds": {"start": 9.0, "restore": 1.0}},
            {"event": "progress", "time": 50.0, "step": 20, "seconds": {"compile": 18.0, "steps": 20.0, "data": 2.0}},
            {"event": "progress", "time": 61.0, "step": 30, "seconds": {"steps": 10.0, "data": 1.0}},
            {"event": "killed", "time": 62.0, "step": 30, "seconds": {"evaluation": 0.5, "steps": 0.5}},
        ),
        *session(2, 70.0, {"event": "killed", "time": 72.0, "step": 0, "seconds": {"start": 2.0}}),
        *session(
            3, 80.0,
            {"event": "continue", "time": 85.0, "step": 20, "seconds": {"start": 5.0}},
            {"event": "progress", "time": 105.0, "step": 40, "seconds": {"steps": 20.0}},
            {"event": "end", "time": 106.0, "step": 40, "seconds": {"saving": 1.0}, "reason": "preempted"},
        ),
        *session(
            4, 110.0,
            {"event": "continue", "time": 111.0, "step": 35, "seconds": {"start": 1.0}},
            {"event": "progress", "time": 116.0, "step": 40, "seconds": {"steps": 5.0}},
        ),
    ]  # fmt: skip
    goodput = goodput_of(events)
    assert goodput is not None and goodput.seconds == pytest.approx(
        {"steps": 20 + 15 + 5, "data": 2, "compile": 18, "start": 17, "restore": 1, "evaluation": 0.5, "saving": 1,
         LOST: 11.5 + 5, DOWN: 8 + 8 + 4}
    )  # fmt: skip
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall_seconds) == 116
    assert (goodput.sessions, goodput.lost_steps) == (4, 10 + 5)
    shares = "down 17.2 %, compile 15.5 %, start 14.7 %, lost steps 14.2"
    assert goodput.line().startswith(f"goodput 34.5 % of 116 s: {shares}")
    assert goodput_of([]) is None
    end = {"event": "end", "time": 50.0, "step": 1, "seconds": {}, "reason": "finished"}
    clock_set_back = goodput_of(session(1, 100.0, end))
    assert clock_set_back is not None and clock_set_back.wall_seconds == 50


def test_a_killed_session_is_completed_from_its_heartbeat(folder):
    """The next session does it, and only once."""
    clock = FakeTime()
    killed = Events(folder, Clock(999.0, clock), total_steps=100)
    killed.continues(0)
    killed.clock.switch("steps")
    clock.time += 4
    killed.clock.dispatched(3)
    killed._ended.set()  # SIGKILL: no further event
    killed._thread.join()
    folder.heartbeat.write_text(json.dumps(killed._beat_now()))
    completed = {"event": "killed", "session": 1, "time": 1004, "step": 3, "seconds": {"steps": 4}}
    assert read_events(folder)[-1] == completed
    for number in (2, 3):
        later = Events(folder, Clock(1010.0, FakeTime(1010.0)), total_steps=100)
        with pytest.raises(PreemptedError), later.recorded():
            raise PreemptedError(0)
        assert [event["session"] for event in read_lines(folder.events)].count(number) == 2
    kinds = [event["event"] for event in read_events(folder)]
    assert kinds == ["start", "continue", "killed", "start", "end", "start", "end"]
    assert read_goodput(folder).seconds == {"start": 1, "steps": 4, DOWN: 6}
    with Events(None, Clock(), total_steps=3).recorded() as events:  # of a process that writes no files
        events.continues(0)
        events.progress()


# ---- status


def beat(time, kind="steps", step_time=None):
    step_time = time if step_time is None else step_time
    return {"session": 1, "time": time, "kind": kind, "step": 40, "step_time": step_time, "seconds": {"steps": 1.0}}


@pytest.mark.parametrize(
    ("reason", "heartbeat", "health", "why"),
    [
        (None, None, "silent", "not written for 1:30: killed, frozen"),
        (None, beat(1085.0), "running", ""),
        (None, beat(1085.0, "compile", 100.0), "running", "compile"),
        (None, beat(1085.0, "data", 700.0), "stalled", "no step for 6:30"),
        (None, beat(9999.0), "silent", "in the future"),
        ("preempted", None, "preempted", ""),
        ("error: 7 consecutive steps", None, "stopped", "7 consecutive steps"),
        ("finished", None, "finished", ""),
    ],
)
def test_health(folder, reason, heartbeat, health, why):
    events = session(1, 900.0, {"event": "continue", "time": 1000.0, "step": 0, "seconds": {"start": 100.0}})
    if reason is not None:
        events.append({"event": "end", "session": 1, "time": 1001.0, "step": 40, "seconds": {}, "reason": reason})
    folder.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    if heartbeat is not None:
        folder.heartbeat.write_text(json.dumps(heartbeat))
    if reason == "finished":
        folder.finished.write_text("{}")
    status = read_status(folder, now=1090.0)
    assert status.health == health and why in status.why and bool(why) == bool(status.why)


def test_status_of_runs(folder, tmp_path, finished_run, capsys):
    """One run is in training and one is finished; a folder has both."""
    shutil.copytree(finished_run, tmp_path / "runs" / "a-run-with-a-name-that-is-longer-than-the-others")
    running = shutil.copytree(finished_run, tmp_path / "runs" / "b")
    folder = RunFolder(running)
    folder.finished.unlink()
    step = {"step": 40, "train/lm_loss": float("nan"), "train/skipped_steps": 3.0, "step_seconds": 0.5}
    folder.metrics.write_text(json.dumps(step) + "\n")
    events = session(1, 900.0, {"event": "continue", "time": 1000.0, "step": 0, "seconds": {"start": 100.0}})
    folder.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    folder.heartbeat.write_text(json.dumps(beat(1003.0)))
    status = read_status(folder, now=1004.0)
    assert (status.health, status.step, status.steps, status.seconds_left) == ("running", 40, 100, 30.0)
    assert (status.examples_per_second, status.skipped_steps, status.checkpoint_step) == (32, 3, 60)
    assert main(["status", str(tmp_path / "runs")]) == 0
    head, finished, killed, *remarks = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "step", "loss", "exact", "examples/s", "left", "checkpoint", "health"]
    assert finished.startswith("…") and "60/60" in finished and finished.endswith("finished")
    remarks = " ".join(" ".join(remarks).split())  # wrapped
    assert "silent" in killed and "not written for" in remarks and "3 steps skipped" in remarks
    assert main(["status", str(finished_run), str(running), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [each["health"] for each in shown] == ["finished", "silent"] and shown[1]["loss"] is None
    assert 0 < shown[0]["goodput"]["share"] < 1
    for paths in ([], [str(tmp_path / "nothing")]):
        with pytest.raises(UserError, match="run"):
            find_runs(paths)


def test_status_needs_neither_torch_nor_jax(finished_run):
    code = f"""import sys, train_jax.__main__ as trm
assert trm.main(['status', {str(finished_run)!r}]) == 0
print({{'torch', 'jax', 'numpy', 'orbax', 'wandb'}} & set(sys.modules))"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "set()" and "finished" in output


def test_status_counts_complete_checkpoints_only(remote):
    folder = RunFolder(path_of(remote))
    write_text(folder.config, CONFIG)
    for name in ("10/_CHECKPOINT_METADATA", "10/commit_success.txt", "20/_CHECKPOINT_METADATA"):
        write_text(folder.checkpoints / name, "{}")
    assert read_status(folder).checkpoint_step == 10


# ---- the metrics of a window of steps

STEP = {"loss": 2.0, "skipped_steps": 0, "consecutive_skipped": 0, "param_norm": 1.0, "sparse_grad_norm": 0.0}
STEP |= {"grad_norm": np.ones(2), "update_norm": np.ones(2)}
ONE = STEP | {"lr": np.array([0.1])}
GROUPS = {"a": ("a.w",), "b": ("b.w",)}


def logged(task=None, step=ONE, **fields):
    """Returns the metrics of a window of two steps of one second and 16 examples each, and the speed on the console."""
    config = dataclasses.replace(preset("tiny"), global_batch_size=16, **fields)
    attributes = {"console": {}, "figures": lambda sums, examples: sums, "variants": lambda _: OneVariant()}
    task = SimpleNamespace(**attributes | {"unit": Task.unit} | (task or {}))
    now = [0.0]
    console = MagicMock()
    devices = SimpleNamespace(to_host=lambda metrics: metrics, count=1, per_replica=1)
    rates = logged_learning_rates(dict.fromkeys(name for names in GROUPS.values() for name in names), config.optim, 1)
    training = SimpleNamespace(
        config=config,
        task=task,
        devices=devices,
        groups=GROUPS,
        total_steps=10,
        own_optimizer=SimpleNamespace(rates=rates),
    )
    clock = Clock(now=lambda: now[0])
    clock.switch("steps")
    session = MagicMock(training=training, tracker=console, clock=clock)
    session.programs.flops.return_value = 3e12
    logging = Logging(training)
    for number in (1, 2):
        session.step = number
        logging.after(session, step)
    now[0] += 2
    logging.flush(session)
    return console.log.call_args.args[1], console.progress.call_args.kwargs["speed"]


def test_rates_have_the_names_of_their_groups_and_a_run_that_diverges_needs_lower_ones():
    def groups_of(**fields):
        return {"optim": dataclasses.replace(preset("tiny").optim, groups=(ParameterGroup("b.*", **fields),))}

    two = STEP | {"lr": np.array([0.1, 0.2])}
    metrics, _ = logged(step=two, **groups_of(lr=0.2))
    assert (metrics["train/lr/default"], metrics["train/lr/group_0"]) == (0.1, 0.2) and "train/lr" not in metrics
    assert logged(**groups_of(beta1=0.5))[0]["train/lr"] == 0.1
    for step, fields, text in ((two, groups_of(lr=0.2), ", and lower ones in --optim.groups"), (ONE, {}, "")):
        with pytest.raises(UserError, match=f"lower --optim.lr than 0.001{text}, with"):
            logged(step=step | {"consecutive_skipped": 99}, **fields)


def test_steps_without_targets_and_the_unit_of_the_task():
    seen = []
    figures = {"figures": lambda sums, examples: seen.append(examples) or sums}
    metrics, speed = logged(figures, step=ONE | {"empty_steps": np.array(True)})
    assert metrics["train/empty_steps"] == 2 and metrics["train/skipped_steps"] == 0 and seen == [32]
    assert speed == "16 examples/s" and metrics["perf/examples_per_s"] == 16 and "perf/mfu" not in metrics
    metrics, speed = logged({"unit": ("tokens", 256)})
    assert speed == "4,096 tokens/s" and "train/empty_steps" not in metrics
    assert (metrics["perf/examples_per_s"], metrics["perf/tokens_per_s"]) == (16, 4096)


def test_utilization_of_the_hardware_counts_recomputation_and_of_the_model_does_not(monkeypatch):
    for module in (log_lines, performance):
        monkeypatch.setattr(module, "peak_flops", lambda: 1e13)
    monkeypatch.setattr(log_lines, "model_flops", lambda *_: 2e12)
    metrics, _ = logged()
    assert (metrics["perf/hfu"], metrics["perf/mfu"]) == pytest.approx((0.3, 0.2))
    compute = dataclasses.replace(preset("tiny").compute, accumulation_steps=2)
    metrics, _ = logged(compute=compute)  # XLA counts one of the two parts
    assert "perf/hfu" not in metrics and metrics["perf/mfu"] == pytest.approx(0.2)
    changing = SimpleNamespace(after=lambda step: "another")
    assert "perf/mfu" not in logged({"variants": lambda _: changing})[0]


def test_a_pause_counts_neither_as_training_nor_as_a_step():
    now = [100.0]
    clock = Clock(now=lambda: now[0])
    clock.earlier_train_seconds = 50.0
    now[0] += 6
    assert clock.train_seconds == 50, "the start"
    clock.switch("steps")
    now[0] += 5
    with clock.doing("data"):
        now[0] += 1
    assert clock.train_seconds == 56 and clock.lap() == {"steps": 5, "compile": 0, "data": 1}
    now[0] += 4
    session = Session(*[SimpleNamespace(clock=clock)] * 6, state=jnp.zeros(()), carry=(), dispatch=range(3))
    session.clock = clock
    with session.pausing("evaluation"):
        now[0] += 1000
        assert clock.train_seconds == 60
    now[0] += 4
    assert clock.train_seconds == 64 and clock.lap() == {"steps": 8, "compile": 0, "data": 0}
    assert clock.spent()[2] == {"steps": 13, "start": 6, "data": 1, "evaluation": 1000}
