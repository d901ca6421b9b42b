"""The training loop, for any task: restore, then step, log, evaluate and save."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import Any

from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.cache import continued_file, upload_working_files
from train_jax.run.code import hash_of_all, source_hashes
from train_jax.run.comparison import verified
from train_jax.run.config import RunConfig, to_json
from train_jax.run.debugging import NanDebugger, check_debugging
from train_jax.run.events import Events
from train_jax.run.folder import RunFolder, write_text
from train_jax.run.goodput import read_goodput
from train_jax.run.host_log import host_log
from train_jax.run.machine import write_machine
from train_jax.run.profiling import Profiler
from train_jax.run.record import Record
from train_jax.run.resume import decide_start, open_run, sole_writer
from train_jax.run.saving import Saving
from train_jax.run.tracking import NullTracker, Tracker
from train_jax.runtime.backend import chosen
from train_jax.runtime.devices import Devices
from train_jax.runtime.feed import Feed, OnDemand
from train_jax.runtime.peers import before_exit
from train_jax.runtime.preemption import Preemption
from train_jax.runtime.processes import all_or_none, is_main_process, process_shard, require_equal
from train_jax.runtime.programs import Programs
from train_jax.runtime.stopwatch import Stopwatch
from train_jax.runtime.supervisor import report_start
from train_jax.runtime.timeline import Timeline
from train_jax.start import Training, start
from train_jax.tasks.task import Evaluator, Task


def train(
    config: RunConfig,
    devices: Devices | None = None,
    task: Task | None = None,
    *,
    since: float | None = None,
    verify: bool = False,
) -> dict[str, Any]:
    """Trains until the run is finished; returns the metrics of the final evaluation, at once for a finished run.

    `since`: when the work began, in seconds of the epoch, if the process is there only for this run; by default now.
    `verify`: a new run of a module of the user's is compared with PyTorch first, in the first process.
    Raises `UserError`, before a folder is created, for a configuration or data that cannot be trained.
    """
    with Preemption().watching() as preemption:
        return _run(config, devices, task, preemption, Timeline(since), verify)


def _run(
    config: RunConfig,
    devices: Devices | None,
    task: Task | None,
    preemption: Preemption,
    timeline: Timeline,
    verify: bool,
) -> dict[str, Any]:
    with all_or_none():
        check_debugging(config)
        training = start(config, task, devices)
    remarks = [f"platform: {chosen()}"] if chosen() else []
    begin = decide_start(config, training.total_steps, training.task.fingerprint)
    if begin.finished is not None:
        require_equal(_identity(training), f"fields, or other data in {config.data_dir}")
        return begin.finished
    with all_or_none():
        if verify and not begin.continues and is_main_process():
            remarks += filter(None, [verified(config, training.task)])
        state = training.initial_state(continues=begin.continues, say=remarks.append)
    with contextlib.ExitStack() as closing:
        folder = _open(training, closing)
        events = Events(folder if is_main_process() else None, timeline, total_steps=training.total_steps)
        closing.enter_context(events.recorded())
        closing.enter_context(before_exit(events.end))
        return _train(training, state, folder, events, preemption, remarks, closing)


def _train(
    training: Training,
    state: TrainState,
    folder: RunFolder,
    events: Events,
    preemption: Preemption,
    remarks: list[str],
    closing: contextlib.ExitStack,
) -> dict[str, Any]:
    config, task, devices, total_steps = training.config, training.task, training.devices, training.total_steps
    timeline = events.timeline
    evaluator = task.evaluator(training.objective, devices)
    batches = training.batches

    # ---- state: the given one, or from the latest checkpoint
    carry = training.initial_carry(state, batches.at(0, state))
    saving = closing.enter_context(contextlib.closing(Saving(training, folder)))
    with timeline.doing("restore"):
        state, carry = saving.restore(state, carry)
    first_step = saving.first_step
    report_start(first_step)
    events.continues(first_step)

    # ---- the loop
    make_tracker = partial(Tracker, config, folder, start_step=first_step, total_steps=total_steps)
    tracker = closing.enter_context(contextlib.closing(make_tracker() if is_main_process() else NullTracker()))
    clock = Stopwatch(saving.train_seconds)
    steps = range(first_step, total_steps, config.compute.steps_per_dispatch)
    feed = closing.enter_context(_feed(training, steps))
    record = Record(config, task, devices, tracker, clock, training.groups)
    record.say([*remarks, *(f"{reason}; continuing from step {first_step}" for reason in saving.damaged)])
    record.begin(training.objective.params, first_step, total_steps)
    with training.programs(timeline) as programs, timeline.doing("steps"):
        state = _steps(
            training, programs, feed, saving, evaluator, preemption, clock, record, events, state, carry, steps
        )
    timeline.switch("end")
    with clock.paused(state), timeline.doing("evaluation"):
        evaluation = record.evaluate(total_steps, training.placement.whole(state), evaluator)
        figures: dict[str, Any] = evaluation.metrics | {"train_seconds": clock.seconds, "train_steps": total_steps}
        figures |= {"summary": evaluation.summary}
        with timeline.doing("saving"):
            saving.wait()
        if is_main_process():
            evaluation.save(folder, "test")
            upload_working_files(folder.path)
            write_text(folder.finished, json.dumps(figures | {"data": task.fingerprint}, indent=1))
            events.progress()
            goodput = read_goodput(folder)
            tracker.say(goodput.line() if goodput else "")
    return figures


def _steps(
    training: Training,
    programs: Programs,
    feed: Feed | OnDemand,
    saving: Saving,
    evaluator: Evaluator,
    preemption: Preemption,
    clock: Stopwatch,
    record: Record,
    events: Events,
    state: TrainState,
    carry: Any,
    steps: range,
) -> TrainState:
    """Runs the remaining steps and the events between them; returns the last state."""
    config, devices, timeline = training.config, training.devices, events.timeline
    key = devices.random_key(config.seed)
    window: list[tuple[int, Any]] = []
    debugger = NanDebugger(training) if config.debug_nans else None
    profiler = Profiler(config, saving.folder, clock, steps.start, programs.text)

    def log(dispatches: list[tuple[int, Any]]) -> None:
        if dispatches:
            record.window(dispatches, wait_seconds=feed.wait_seconds(), step_flops=programs.flops())
            events.progress()

    def save_and_end(step: int, state: TrainState, carry: Any) -> None:
        with timeline.doing("saving"):
            saving.finish(step, state, carry, clock)
        events.end("preempted")

    for first in steps:
        step = min(first + steps.step, steps.stop)
        with timeline.doing("data"):
            batch = feed.next(state)
        devices.limit_dispatch([metrics for _, metrics in window])
        if debugger is not None:
            debugger.before_step(carry, batch)
        program = programs.get(first, step - first, (state, carry, batch, key))
        record.say(programs.news())
        preemption.before_step(step, partial(log, window))
        with preemption.lock, profiler.dispatch(first, step, state):
            state, carry, metrics = program(state, carry, batch, key)
            preemption.after_step(step, partial(save_and_end, step, state, carry))
        timeline.dispatched(step)
        record.say(profiler.after(step, state))
        if debugger is not None:
            debugger.after_step(state, metrics)
        window.append((step, metrics))
        # A full window is fetched one dispatch late, so that the devices always have a step to run.
        if len(window) > 1 and window[-2][0] % config.log_every_steps == 0:
            done = window[:-1]
            del window[:-1]
            log(done)
        last, figures = step == steps.stop, {}
        if not last and config.eval_every_steps and step % config.eval_every_steps == 0:
            with clock.paused(state), timeline.doing("evaluation"):
                whole = training.placement.whole(state)
                evaluation = record.evaluate(step, whole, evaluator, limit=config.eval_examples, metrics_only=True)
                figures = evaluation.metrics
        if saving.due(step, steps.stop, metrics):
            # Last, so that everything up to a checkpoint is logged; a continued run starts a new window.
            with clock.paused(state), preemption.lock:
                log(window)
                window.clear()
                with timeline.doing("saving"):
                    saving.start(step, state, carry, clock, figures)
            events.progress()
        preemption.check()
    record.say(profiler.finish(steps.stop, state))
    return state


def _feed(training: Training, steps: range) -> Feed | OnDemand:
    batches, devices, whole = training.batches, training.devices, training.placement.whole
    if training.task.needs_state:
        return OnDemand(lambda number, state: devices.shard(batches.from_step(steps[number], whole(state))))
    ahead = training.config.compute.batches_ahead
    return Feed(lambda number: devices.shard(batches.from_step(steps[number])), len(steps), ahead)


def _identity(training: Training) -> str:
    return to_json(training.config) + training.task.fingerprint


def _open(training: Training, closing: contextlib.ExitStack) -> RunFolder:
    """The run's folder with the files that describe the run, checked to be the same for every process."""
    config, task, devices = training.config, training.task, training.devices
    require_equal(_identity(training), f"fields, or other data in {config.data_dir}")
    if process_shard()[1] > 1:
        require_equal(hash_of_all(source_hashes(config)), "code (`trm preflight` names the files that differ)")
    with all_or_none():
        if is_main_process():
            closing.enter_context(sole_writer(config.run_dir))
        folder = open_run(config, writes=is_main_process())
        if is_main_process():
            folder.finished.unlink(missing_ok=True)  # there are more steps to train now
            write_text(folder.data, json.dumps(task.facts, indent=1))
            parameters = sum(p.size for p in training.objective.params.values())
            write_machine(folder, devices=devices.kind, parameters=parameters)
    with all_or_none():
        if not folder.machine.exists():
            raise UserError(
                f"{folder.path} does not contain the files that the first process wrote; use a --run-dir that all "
                "processes share"
            )
    closing.callback(upload_working_files, folder.path)  # after the last line of the log
    closing.enter_context(before_exit(lambda _reason: upload_working_files(folder.path)))
    number, count = process_shard()
    closing.enter_context(host_log(continued_file(folder.host_log(number)), f"process {number} of {count} of the run"))
    return folder
