"""The training loop, for any task: restore, then step; hooks log, evaluate and save between the steps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.checkpoint import Resumed
from train_jax.run.choices import with_choices
from train_jax.run.comparison import verified
from train_jax.run.config import RunConfig, to_json
from train_jax.run.events import Events, read_goodput
from train_jax.run.folder import RunFolder, write_text
from train_jax.run.host_log import host_log
from train_jax.run.machine import hash_of_all, source_hashes, write_machine
from train_jax.run.resume import check_data, decide_start, open_run, sole_writer
from train_jax.run.tracking import NullTracker, Tracker
from train_jax.runtime.backend import chosen
from train_jax.runtime.clock import Clock
from train_jax.runtime.devices import Devices
from train_jax.runtime.feed import Feed, OnDemand
from train_jax.runtime.peers import before_exit
from train_jax.runtime.preemption import Preemption
from train_jax.runtime.processes import all_or_none, is_main_process, of_main_process, process_shard, require_equal
from train_jax.runtime.supervisor import report_start
from train_jax.storage.cache import continued_file, upload_working_files
from train_jax.storage.lease import check_writer
from train_jax.task import Periodic, Task
from train_jax.trainer.hooks import Evaluating, Logging, NanDebugging, Preempting, Profiling, Saving, check_debugging
from train_jax.trainer.session import Hook, Session
from train_jax.trainer.start import Training, start


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
    clock = Clock(since)
    with contextlib.ExitStack() as closing:
        preemption = closing.enter_context(Preemption().watching())
        with all_or_none():
            check_debugging(config)
        config = with_choices(config)
        with all_or_none():
            training = start(config, task, devices)
            evaluations = training.evaluations()
        remarks = [f"platform: {chosen()}"] if chosen() else []
        begin = decide_start(config, training.total_steps, training.task.fingerprint)
        if begin.finished is not None:
            require_equal(_identity(training), f"fields, or other data in {config.data_dir}")
            return begin.finished
        with all_or_none():
            if verify and not begin.continues and is_main_process():
                remarks += filter(None, [verified(config, training.task)])
            state = training.initial_state(continues=begin.continues, say=remarks.append)
        folder = _open(training, closing)
        events = Events(folder if is_main_process() else None, clock, total_steps=training.total_steps)
        closing.enter_context(events.recorded())
        closing.enter_context(before_exit(events.end))
        return _Run(training, evaluations, folder, events, closing).train(state, preemption, remarks)


class _Run:
    """The second half of `train`; `closing` closes what was opened, in the opposite order."""

    def __init__(
        self,
        training: Training,
        evaluations: Sequence[Periodic],
        folder: RunFolder,
        events: Events,
        closing: contextlib.ExitStack,
    ):
        self._training, self._folder, self._events, self._closing = training, folder, events, closing
        self._logging, self._evaluating = Logging(training), Evaluating(evaluations)
        self._saving = self._closed_at_end(Saving(training, folder, self._logging))

    def _closed_at_end(self, resource: Any) -> Any:
        return self._closing.enter_context(contextlib.closing(resource))

    def train(self, state: TrainState, preemption: Preemption, remarks: list[str]) -> dict[str, Any]:
        """Trains from `state`, or from the newest checkpoint. Returns the figures of the run."""
        session, feed, dispatches = self._begin(state, remarks)
        config = self._training.config
        hooks: list[Hook] = [Profiling(config, self._folder, session.step)]
        hooks += [NanDebugging(self._training)] if config.debug_nans else []
        hooks += [self._logging, self._evaluating, self._saving]
        hooks += [Preempting(preemption, self._logging, self._saving)]
        with session.clock.doing("steps"):
            run_steps(session, feed, dispatches, hooks)
        session.clock.switch("end")
        for hook in hooks:
            hook.end(session)
        return self._figures(session)

    def _begin(self, state: TrainState, remarks: list[str]) -> tuple[Session, OnDemand, Sequence[range]]:
        """Returns the session at the given state or at the newest checkpoint, its batches and its dispatches."""
        training, config, clock = self._training, self._training.config, self._events.clock
        devices, total_steps = training.devices, training.total_steps
        with clock.doing("restore"):
            resumed = self._saving.restore(state)
            if resumed is not None:
                check_data(config, resumed.notes["data"], training.task.fingerprint, resumed.step)
                state, clock.earlier_train_seconds = resumed.state, resumed.notes["train_seconds"]
                remarks += [f"{reason}; continuing from step {resumed.step}" for reason in resumed.damaged]
            placed = training.placement.place(state)
        first_step = 0 if resumed is None else resumed.step
        report_start(first_step)
        self._events.continues(first_step)
        tracker = NullTracker()
        if is_main_process():
            tracker = Tracker(config, self._folder, start_step=first_step, total_steps=total_steps)
        self._closed_at_end(tracker)
        programs = self._closing.enter_context(training.programs(clock))
        dispatches = training.batches.dispatches(first_step)
        feed = self._closed_at_end(_feed(training, dispatches))
        carry = self._carry(state, feed.peek(placed), resumed) if dispatches else ()
        done = range(first_step, first_step)
        session = Session(training, self._folder, clock, self._events, tracker, programs, placed, carry, done)
        size = sum(p.size for p in training.objective.params.values())
        continuing = f", continuing at step {first_step}" if first_step else ""
        session.say(
            [
                *remarks,
                f"{config.model} with {size:,} parameters on {devices.kind}; {training.task.description}; "
                f"{total_steps} steps of {config.global_batch_size}, metrics every {config.log_every_steps} steps"
                f"{continuing}",
            ]
        )
        return session, feed, dispatches

    def _carry(self, state: TrainState, batch: Any, resumed: Resumed | None) -> Any:
        """Returns the carry for a whole state and the first batch of the session, both of this process."""
        devices, batch = self._training.devices, self._training.devices.to_host(batch)
        if self._training.config.compute.steps_per_dispatch > 1:
            batch = {name: values[:, 0] for name, values in batch.items()}
        carry = self._training.initial_carry(state, batch)
        if resumed is not None:
            carry = devices.from_rows(resumed.carry_like(devices.to_rows(carry)), carry)
        return devices.shard(carry)

    def _figures(self, session: Session) -> dict[str, Any]:
        """Returns the figures of the finished run, and writes them."""
        folder, evaluation = self._folder, self._evaluating.final
        figures = session.metrics | {"train_seconds": session.clock.train_seconds, "train_steps": session.step}
        figures |= {"summary": evaluation.summary} if evaluation is not None else {}
        if is_main_process():
            check_writer(folder.path)
            session.tracker.sync()
            upload_working_files(folder.path)
            write_text(folder.finished, json.dumps(figures | {"data": self._training.task.fingerprint}, indent=1))
            self._events.progress()
            goodput = read_goodput(folder)
            session.say([goodput.line() if goodput else ""])
        return figures


def run_steps(session: Session, feed: OnDemand, dispatches: Sequence[range], hooks: Sequence[Hook]) -> None:
    """Runs the dispatches of a session, and hooks between them; the last hook is the outermost around a dispatch."""
    training, clock = session.training, session.clock
    key = training.devices.random_key(training.config.seed)
    in_flight: deque[Any] = deque(maxlen=3)
    for session.dispatch in dispatches:
        session.events.check()
        session.metrics = {}
        with clock.doing("data"):
            batch = feed.next(session.state)
        training.devices.limit_dispatch(in_flight)
        for hook in hooks:
            hook.before(session, batch)
        program = session.programs.get(
            session.dispatch.start, len(session.dispatch), (session.state, session.carry, batch, key)
        )
        session.say(session.programs.news())
        with contextlib.ExitStack() as around:
            for hook in reversed(hooks):
                around.enter_context(hook.around(session))
            session.state, session.carry, metrics = program(session.state, session.carry, batch, key)
        clock.dispatched(session.step)
        in_flight.append(metrics)
        for hook in hooks:
            hook.after(session, metrics)


def _feed(training: Training, dispatches: Sequence[range]) -> OnDemand:
    batches, devices, whole = training.batches, training.devices, training.placement.whole
    if training.task.needs_state:
        return OnDemand(lambda number, state: devices.shard(batches.from_step(dispatches[number].start, whole(state))))
    ahead = training.config.compute.batches_ahead
    return Feed(lambda number: devices.shard(batches.from_step(dispatches[number].start)), len(dispatches), ahead)


def _identity(training: Training) -> str:
    return to_json(training.config) + training.task.fingerprint


def _open(training: Training, closing: contextlib.ExitStack) -> RunFolder:
    """Returns the run's folder with the files that describe the run, checked to be the same for every process."""
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
    opened = folder
    folder = dataclasses.replace(folder, **of_main_process(lambda: {"run_id": opened.run_id}))
    closing.callback(upload_working_files, folder.path)  # after the last line of the log
    closing.enter_context(before_exit(lambda _reason: upload_working_files(folder.path)))
    number, count = process_shard()
    closing.enter_context(host_log(continued_file(folder.host_log(number)), f"process {number} of {count} of the run"))
    return folder
