"""The metrics of a window of steps: rates by parameter group, speed in the unit of the task, utilization; the clock."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from train_jax import hooks
from train_jax.errors import UserError
from train_jax.optim.config import ParameterGroup
from train_jax.run import performance
from train_jax.run.presets import preset
from train_jax.run.tracking import NullTracker
from train_jax.runtime.clock import Clock
from train_jax.session import Session
from train_jax.task import OneVariant, Task

STEP = {"loss": 2.0, "skipped_steps": 0, "consecutive_skipped": 0, "param_norm": 1.0, "sparse_grad_norm": 0.0}
STEP |= {"grad_norm": np.ones(2), "update_norm": np.ones(2), "lr": np.array([0.1, 0.2])}
GROUPS = {"a": ("a.w",), "b": ("b.w",)}


class Console(NullTracker):
    def __init__(self):
        self.logged, self.speeds = [], []

    def log(self, step, metrics):
        self.logged.append(metrics)

    def progress(self, step, figures, *, step_seconds, speed):
        self.speeds.append(speed)


def logged(task=None, step=STEP, **fields):
    """Returns the metrics of a window of two steps of one second and 16 examples each, and the speed on the console."""
    config = dataclasses.replace(preset("tiny"), global_batch_size=16, **fields)
    attributes = {"console": {}, "figures": lambda sums, examples: sums, "variants": lambda _: OneVariant()}
    task = SimpleNamespace(**attributes | {"unit": Task.unit} | (task or {}))
    now, console = [0.0], Console()
    devices = SimpleNamespace(to_host=lambda metrics: metrics, count=1)
    training = SimpleNamespace(config=config, task=task, devices=devices, groups=GROUPS, total_steps=10)
    clock = Clock(now=lambda: now[0])
    clock.switch("steps")
    ignored = SimpleNamespace(progress=lambda: None, flops=lambda: 3e12)
    session = SimpleNamespace(training=training, tracker=console, clock=clock, events=ignored, programs=ignored)
    logging = hooks.Logging(training)
    for number in (1, 2):
        session.step = number
        logging.after(session, step)
    now[0] += 2
    logging.flush(session)
    return console.logged[0], console.speeds[0]


@pytest.fixture
def known_peak(monkeypatch):
    for module in (hooks, performance):
        monkeypatch.setattr(module, "peak_flops", lambda: 1e13)
    monkeypatch.setattr(hooks, "model_flops", lambda *_: 2e12)


def groups_of(**fields):
    optim = dataclasses.replace(preset("tiny").optim, groups=(ParameterGroup("b.*", **fields),))
    return {"optim": optim}


def test_rates_have_the_names_of_their_groups():
    metrics, _ = logged(**groups_of(lr=0.2))
    assert (metrics["train/lr/default"], metrics["train/lr/group_0"]) == (0.1, 0.2) and "train/lr" not in metrics
    metrics, _ = logged(step=STEP | {"lr": np.array([0.1])}, **groups_of(beta1=0.5))
    assert metrics["train/lr"] == 0.1


def test_the_remedy_for_a_run_that_diverges_names_the_rates_of_groups():
    for fields, text in ((groups_of(lr=0.2), "0.001, and lower ones in --optim.groups, with"), ({}, "0.001, with")):
        rates = np.zeros(2 if fields else 1)
        with pytest.raises(UserError, match=f"lower --optim.lr than {text}"):
            logged(step=STEP | {"consecutive_skipped": 99, "lr": rates}, **fields)


def test_steps_without_targets_are_logged_with_their_examples():
    step, seen = STEP | {"lr": np.array([0.1]), "empty_steps": np.array(True)}, []
    metrics, _ = logged({"figures": lambda sums, examples: seen.append(examples) or sums}, step=step)
    assert metrics["train/empty_steps"] == 2 and metrics["train/skipped_steps"] == 0 and seen == [32]
    assert "train/empty_steps" not in logged(step=STEP | {"lr": np.array([0.1])})[0]


def test_the_speed_is_in_the_unit_of_the_task():
    one_rate = STEP | {"lr": np.array([0.1])}
    metrics, speed = logged(step=one_rate)
    assert speed == "16 examples/s" and metrics["perf/examples_per_s"] == 16 and "perf/mfu" not in metrics
    metrics, speed = logged({"unit": ("tokens", 256)}, step=one_rate)
    assert speed == "4,096 tokens/s"
    assert (metrics["perf/examples_per_s"], metrics["perf/tokens_per_s"]) == (16, 4096)


def test_utilization_of_the_hardware_counts_recomputation_and_of_the_model_does_not(known_peak):
    one_rate = STEP | {"lr": np.array([0.1])}
    metrics, _ = logged(step=one_rate)
    assert (metrics["perf/hfu"], metrics["perf/mfu"]) == pytest.approx((0.3, 0.2))
    compute = dataclasses.replace(preset("tiny").compute, accumulation_steps=2)
    metrics, _ = logged(step=one_rate, compute=compute)  # XLA counts one of the two parts
    assert "perf/hfu" not in metrics and metrics["perf/mfu"] == pytest.approx(0.2)
    changing = SimpleNamespace(after=lambda step: "another")
    assert "perf/mfu" not in logged({"variants": lambda _: changing}, step=one_rate)[0]


# ---- the clock


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
