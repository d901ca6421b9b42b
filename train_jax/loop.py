"""The order of events in a run: restore, then step, log, evaluate, save; and once more from where it stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from train_jax.core.metrics import parameter_groups
from train_jax.core.state import Learner, Trainee, new_learner
from train_jax.core.step import make_eval_step
from train_jax.errors import UserError
from train_jax.optim.optimizer import dense_optimizer, trained
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.config import RunConfig, to_json
from train_jax.run.folder import RunFolder, open_run, write_text
from train_jax.run.machine import write_machine
from train_jax.run.record import Record
from train_jax.run.tracking import Silence, Tracker
from train_jax.runtime.devices import Devices
from train_jax.runtime.feed import Batches, Feed
from train_jax.runtime.programs import Programs, objective_for, programs_for, scales_loss
from train_jax.runtime.stopwatch import Stopwatch
from train_jax.tasks.puzzles.batches import epochs_to_steps
from train_jax.tasks.puzzles.evaluation import Evaluation, save_evaluation
from train_jax.tasks.puzzles.mixture import Mixture, check_augmentable, load_mixture


def train(config: RunConfig, devices: Devices | None = None) -> dict[str, float]:
    """Train until the run is finished; returns the figures of the last evaluation. A finished run returns at once."""
    devices = devices or Devices(runner=config.compute.runner)
    with devices.together():
        train_set, test_set = (load_mixture(config.data_dir, split, config.data_weights) for split in ("train", "test"))
        size = config.global_batch_size
        for each in (size, config.eval_batch_size):
            devices.local_batch_size(each)
        total_steps = config.steps or epochs_to_steps(train_set.examples_per_epoch, config.epochs, size)
        # What cannot be trained is said before a folder of the run is made.
        train_set.rows_of_parts(size)
        if config.augment:
            check_augmentable(config.data_dir, train_set)
        objective = objective_for(config, train_set, devices)
        optimizer = dense_optimizer(config.optim, total_steps)
        programs = programs_for(config, objective, optimizer, train_set, devices, total_steps)
    folder = _opened(config, train_set, sum(p.size for p in objective.params.values()), devices)
    if folder.finished.exists():
        return json.loads(folder.finished.read_text())
    eval_step = devices.evaluate(make_eval_step(objective, config.arch.halt_max_steps))
    batches = Batches(config, train_set, devices, total_steps)

    # ---- state: fresh, or where the run stopped
    learner = new_learner(objective.params, objective.buffers, optimizer, scales_loss=scales_loss(config))
    carry = devices.for_each(objective.initial_carry)(learner.params, learner.buffers, devices.spread(batches.at(0)))
    with contextlib.ExitStack() as closing:
        checkpoints = closing.enter_context(contextlib.closing(Checkpoints(folder)))
        start, seconds = checkpoints.latest_step() or 0, 0.0
        if start:
            (learner, carry), notes = checkpoints.restore(start, Trainee(learner, devices.spanning(carry, 0)))
            carry, seconds = devices.own_part(carry), notes["train_seconds"]
        state = Trainee(devices.replicate(learner), devices.spread(carry))

        # ---- the loop
        recorded = Tracker(config, folder, start_step=start, total_steps=total_steps) if devices.writes else Silence()
        tracker = closing.enter_context(contextlib.closing(recorded))
        clock = Stopwatch(seconds)
        starts = range(start, total_steps, config.compute.steps_per_dispatch)
        feed = closing.enter_context(
            Feed(lambda n: devices.spread(batches.from_step(starts[n])), len(starts), config.compute.batches_ahead)
        )
        record = Record(
            config, devices, tracker, clock, feed, parameter_groups(trained(objective.params, config.optim))
        )
        record.begin(objective.params, train_set, test_set, start, total_steps)
        score = partial(record.score, eval_step=eval_step, puzzles=test_set)
        with programs:
            learner = _steps(config, devices, programs, feed, checkpoints, score, clock, record, state, starts)
        with clock.paused(learner):
            evaluation = score(total_steps, learner, limit=0)
            figures = evaluation.metrics | {"train_seconds": clock.seconds, "train_steps": total_steps}
            checkpoints.wait()
            if devices.writes:
                save_evaluation(folder, "test", evaluation)
                write_text(folder.finished, json.dumps(figures, indent=1))
    return figures


def _steps(
    config: RunConfig,
    devices: Devices,
    programs: Programs,
    feed: Feed,
    checkpoints: Checkpoints,
    score: Callable[..., Evaluation],
    clock: Stopwatch,
    record: Record,
    state: Trainee,
    starts: range,
) -> Learner:
    """Every step of the run, with what happens between them; returns what was learned."""
    learner, carry = state
    key = devices.key(config.seed)
    window: list[tuple[int, Any]] = []
    for first in starts:
        step = min(first + starts.step, starts.stop)
        batch = feed.next()
        devices.keep_pace([metrics for _, metrics in window])
        learner, carry, metrics = programs(first, step - first, learner, carry, batch, key)
        window.append((step, metrics))
        # A full window is fetched one dispatch late: the devices always have a step to do.
        if len(window) > 1 and window[-2][0] % config.log_every_steps == 0:
            record.window(window[:-1])
            window = window[-1:]
        last = step == starts.stop
        if not last and config.eval_every_steps and step % config.eval_every_steps == 0:
            with clock.paused(learner):
                score(step, learner, limit=config.eval_examples)
        if last or step % config.checkpoint_every_steps == 0:
            # Last, so that everything up to a checkpoint is on record; a continued run starts a window of its own.
            with clock.paused(learner):
                record.window(window)
                window = []
                whole = Trainee(devices.spanning(learner, None), devices.spanning(carry, 0))
                checkpoints.save(step, whole, {"train_seconds": clock.seconds})
    return learner


def _opened(config: RunConfig, train_set: Mixture, parameters: int, devices: Devices) -> RunFolder:
    """The run's folder with what says what the run is, seen by every process."""
    devices.agree(to_json(config) + str(train_set.metadata), f"fields, or other data in {config.data_dir}")
    with devices.together():
        folder = open_run(config, writes=devices.writes)
        if devices.writes and not folder.finished.exists():
            write_text(folder.data, json.dumps(dataclasses.asdict(train_set.metadata), indent=1))
            write_machine(folder, devices=devices.kind, parameters=parameters)
    with devices.together():
        if not folder.machine.exists():
            raise UserError(f"{folder.path} is not what the first process sees there; give a --run-dir that all share")
    return folder
