"""The order of events in a run: restore, then step, log, evaluate, save; and once more from where it stopped."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from train_jax.checkpoint import Checkpoints
from train_jax.config import RunConfig
from train_jax.devices import Devices
from train_jax.errors import UserError
from train_jax.evaluate import Evaluation, evaluate, save_evaluation
from train_jax.machine import write_machine
from train_jax.modelling import build_objective
from train_jax.optim import dense_optimizer, trained
from train_jax.puzzles.batches import epochs_to_steps, train_batch
from train_jax.puzzles.format import PuzzleSet, load_split
from train_jax.run_folder import open_run, write_text
from train_jax.state import Trainee, new_learner
from train_jax.step import make_eval_step, make_train_step
from train_jax.step_metrics import Groups, parameter_groups, window_means
from train_jax.tracking import Tracker, duration


def train(config: RunConfig, devices: Devices | None = None) -> dict[str, float]:
    """Train until the run is finished; returns the figures of the last evaluation. A finished run returns at once."""
    devices = devices or Devices()
    train_set, test_set = load_split(config.data_dir, "train"), load_split(config.data_dir, "test")
    local_batch = devices.local_batch_size(config.global_batch_size)
    devices.local_batch_size(config.eval_batch_size)
    total_steps = config.steps or epochs_to_steps(train_set, config.epochs, config.global_batch_size)
    folder = open_run(config)
    if folder.finished.exists():
        return json.loads(folder.finished.read_text())
    write_text(folder.data, json.dumps(dataclasses.asdict(train_set.metadata), indent=1))

    # ---- model, optimizer, steps
    objective = build_objective(config, train_set.metadata, local_batch)
    optimizer = dense_optimizer(config.optim, total_steps)
    scales_loss = getattr(config.arch, "forward_dtype", None) == "float16"
    write_machine(folder, devices=devices.kind, parameters=sum(p.size for p in objective.params.values()))
    train_step = devices.train(
        make_train_step(
            objective,
            optimizer,
            config.optim,
            total_steps=total_steps,
            global_batch_size=config.global_batch_size,
            device_count=devices.count,
            halt_max_steps=config.arch.halt_max_steps,
            scales_loss=scales_loss,
        )
    )
    eval_step = devices.evaluate(make_eval_step(objective, config.arch.halt_max_steps))

    # ---- state: fresh, or where the run stopped
    def batch_at(step: int) -> dict[str, np.ndarray]:
        return devices.split(
            train_batch(
                train_set, seed=config.seed, step=step, batch_size=config.global_batch_size, shard=devices.shard()
            )
        )

    learner = new_learner(objective.params, objective.buffers, optimizer, scales_loss=scales_loss)
    carry = devices.for_each(objective.initial_carry)(learner.params, learner.buffers, batch_at(0))
    checkpoints = Checkpoints(folder)
    start, seconds = checkpoints.latest_step() or 0, 0.0
    if start:
        (learner, carry), notes = checkpoints.restore(start, Trainee(learner, carry))
        seconds = notes["train_seconds"]
    learner, carry = devices.replicate(learner), devices.spread(carry)

    # ---- the loop
    tracker = Tracker(config, folder, start_step=start, total_steps=total_steps)
    tracker.say(_banner(config, devices, objective.params, train_set, test_set, start, total_steps))
    score = Scorer(config, devices, eval_step, test_set, tracker)
    key = jax.random.key(config.seed)
    window: list[tuple[int, Any]] = []
    clock = Stopwatch(seconds)
    groups = parameter_groups(trained(objective.params, config.optim))
    report = partial(_report, tracker, clock, groups, config)
    batch = batch_at(start)
    for step in range(start + 1, total_steps + 1):
        learner, carry, metrics = train_step(learner, carry, batch, key)
        window.append((step, metrics))
        if step < total_steps:
            batch = batch_at(step)  # made while the devices are busy
        # A full window is fetched one step late: the devices always have a step to do.
        if window[0][0] <= step - 1 and (step - 1) % config.log_every_steps == 0:
            report(window[:-1])
            window = window[-1:]
        last = step == total_steps
        if not last and config.eval_every_steps and step % config.eval_every_steps == 0:
            with clock.paused(learner):
                score(step, learner, config.eval_examples, clock.seconds)
        if last or step % config.checkpoint_every_steps == 0:
            # Last, so that everything up to a checkpoint is on record; a continued run starts a window of its own.
            with clock.paused(learner):
                report(window)
                window = []
                checkpoints.save(step, Trainee(learner, carry), {"train_seconds": clock.seconds})
    with clock.paused(learner):
        evaluation = score(total_steps, learner, 0, clock.seconds)
        figures = evaluation.metrics | {"train_seconds": clock.seconds, "train_steps": total_steps}
        save_evaluation(folder, "test", evaluation)
        checkpoints.wait()
        write_text(folder.finished, json.dumps(figures, indent=1))
    checkpoints.close()
    tracker.close()
    return figures


class Stopwatch:
    """Seconds of training: compilation counts, evaluation and saving do not. Goes on where a checkpoint left it."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter):
        self._now, self._before = now, seconds
        self._since: float | None = now()
        self._lap = seconds

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else self._now() - self._since)

    def lap(self, steps: int) -> float:
        """Seconds per step since the last lap."""
        lap, self._lap = self.seconds - self._lap, self.seconds
        return lap / steps

    def paused(self, until_ready: Any) -> _Pause:
        """Waits for the steps under way, then stands still inside the `with`."""
        jax.block_until_ready(until_ready)
        return _Pause(self)


class _Pause:
    def __init__(self, watch: Stopwatch):
        self._watch = watch

    def __enter__(self) -> None:
        self._watch._before, self._watch._since = self._watch.seconds, None

    def __exit__(self, *_exception) -> None:
        self._watch._since = self._watch._now()


class Scorer:
    """Evaluates the learner and records what came out."""

    def __init__(self, config: RunConfig, devices: Devices, eval_step: Any, puzzles: PuzzleSet, tracker: Tracker):
        self._config, self._devices, self._step = config, devices, eval_step
        self._puzzles, self._tracker = puzzles, tracker

    def __call__(self, step: int, learner: Any, limit: int, train_seconds: float) -> Evaluation:
        found = evaluate(
            self._step, learner, self._puzzles, self._devices, batch_size=self._config.eval_batch_size, limit=limit
        )
        metrics = {f"eval/{name}": value for name, value in found.metrics.items()}
        self._tracker.log(step, metrics | {"train_seconds": train_seconds})
        self._tracker.say(
            f"step {step}: exact accuracy {found.metrics['exact_accuracy']:.4f}, token accuracy "
            f"{found.metrics['accuracy']:.4f} on {found.metrics['count']:.0f} held-out puzzles "
            f"after {duration(train_seconds)} of training"
        )
        return found


def _report(
    tracker: Tracker, clock: Stopwatch, groups: Groups, config: RunConfig, window: list[tuple[int, Any]]
) -> None:
    """Records a window of steps. Raises `UserError` when too many in a row had to be left out."""
    fetched = [metrics for _, metrics in jax.device_get(window)]
    figures = window_means(fetched, groups, config.global_batch_size)
    metrics = {f"train/{name}": value for name, value in figures.items()}
    step_seconds = clock.lap(len(window))
    step = window[-1][0]
    tracker.log(step, metrics | {"train_seconds": clock.seconds, "step_seconds": step_seconds})
    tracker.progress(step, metrics, step_seconds=step_seconds, examples=config.global_batch_size)
    in_a_row = max(int(metrics["consecutive_skipped"]) for metrics in fetched)
    if in_a_row >= config.optim.max_skipped_steps:
        raise UserError(
            f"{in_a_row} steps in a row up to step {step} had a loss or gradient that is not finite, "
            f"{config.optim.max_skipped_steps} are too many; start another --run-dir with a lower --optim.lr than "
            f"{config.optim.lr}, with --optim.clip-norm 1, or with --arch.forward-dtype float32"
        )


def _banner(
    config: RunConfig, devices: Devices, params: dict, train_set: PuzzleSet, test_set: PuzzleSet, start: int, total: int
) -> str:
    size = sum(p.size for p in params.values())
    resumed = f", continuing at step {start}" if start else ""
    return (
        f"{config.model} with {size:,} parameters on {devices.kind}; {train_set.num_groups:,} puzzles "
        f"({train_set.num_examples:,} examples), {test_set.num_examples:,} held out; "
        f"{total} steps of {config.global_batch_size}{resumed}"
    )
