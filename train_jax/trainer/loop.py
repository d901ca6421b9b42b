"""The training loop, for any task: restore, then step; hooks log, evaluate and save between the steps."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from train_jax.core.state import TrainState
from train_jax.run.checkpoint import Resumed
from train_jax.run.choices import with_choices
from train_jax.run.comparison import verified
from train_jax.run.config import RunConfig
from train_jax.run.events import Events, read_goodput
from train_jax.run.folder import write_text
from train_jax.run.resume import check_data, decide_start
from train_jax.run.tracking import NullTracker, Tracker
from train_jax.runtime.backend import chosen
from train_jax.runtime.clock import Clock
from train_jax.runtime.devices import Devices
from train_jax.runtime.exits import before_exit
from train_jax.runtime.feed import Feed, OnDemand
from train_jax.runtime.preemption import Preemption
from train_jax.runtime.processes import all_or_none, is_main_process, require_equal
from train_jax.runtime.supervisor import report_start
from train_jax.storage.cache import upload_working_files
from train_jax.storage.lease import check_writer
from train_jax.task import Periodic, Task
from train_jax.trainer.hooks.evaluating import Evaluating
from train_jax.trainer.hooks.log_lines import Logging
from train_jax.trainer.hooks.nan_debugging import NanDebugging, check_debugging
from train_jax.trainer.hooks.preempting import Preempting
from train_jax.trainer.hooks.profiling import Profiling
from train_jax.trainer.hooks.saving import Saving
from train_jax.trainer.opening import identity, open_folder
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
            require_equal(identity(training), f"fields, or other data in {config.data_dir}")
            return begin.finished
        remarks += training.placement.table()
        with all_or_none():
            if verify and not begin.continues and is_main_process():
                remarks += filter(None, [verified(config, training.task)])
            state = training.initial_state(continues=begin.continues, say=remarks.append)
        trainer = Trainer(training, evaluations, preemption, clock, closing)
        trainer.start(state, remarks)
        with clock.doing("steps"):
            for dispatch in trainer.dispatches:
                trainer.step(dispatch)
        return trainer.finish()


class Trainer:
    """A run in one process: `start`, then `step` for each of `dispatches`, then `finish`.

    `closing` closes what is opened, in the opposite order.
    """

    session: Session
    dispatches: Sequence[range]
    """The steps that remain, by dispatch."""

    def __init__(
        self,
        training: Training,
        evaluations: Sequence[Periodic],
        preemption: Preemption,
        clock: Clock,
        closing: contextlib.ExitStack,
    ):
        self._training = training
        self._preemption = preemption
        self._closing = closing
        self._folder = open_folder(training, closing)
        self._events = Events(self._folder if is_main_process() else None, clock, total_steps=training.total_steps)
        closing.enter_context(self._events.recorded())
        closing.enter_context(before_exit(self._events.end))
        self._logging = Logging(training)
        self._evaluating = Evaluating(evaluations)
        self._saving = self._closed_at_end(Saving(training, self._folder, self._logging))
        self._in_flight: deque[Any] = deque(maxlen=3)

    def _closed_at_end(self, resource: Any) -> Any:
        return self._closing.enter_context(contextlib.closing(resource))

    def start(self, state: TrainState, remarks: list[str]) -> None:
        """Begins at `state`, or at the newest checkpoint, and says so after the remarks."""
        state, resumed = self._restored(state, remarks)
        training = self._training
        clock = self._events.clock
        with clock.doing("restore"):
            placed = training.placement.place(state)
        first_step = 0 if resumed is None else resumed.step
        report_start(first_step)
        self._events.continues(first_step)
        tracker = NullTracker()
        if is_main_process():
            tracker = Tracker(training.config, self._folder, start_step=first_step, total_steps=training.total_steps)
        self._closed_at_end(tracker)
        programs = self._closing.enter_context(training.programs(clock))
        self.dispatches = training.batches.dispatches(first_step)
        self._feed = self._closed_at_end(_feed(training, self.dispatches))
        carry = self._carry(state, self._feed.peek(placed), resumed) if self.dispatches else ()
        done = range(first_step, first_step)
        self.session = Session(training, self._folder, clock, self._events, tracker, programs, placed, carry, done)
        self._hooks = self._hooks_in_order(first_step)
        self._key = training.devices.random_key(training.config.seed)
        self.session.say([*remarks, _heading(training, first_step)])

    def _hooks_in_order(self, first_step: int) -> list[Hook]:
        """Returns the hooks. After a dispatch they are called in this order; around it, the last one is outermost."""
        config = self._training.config
        return [
            Profiling(config, self._folder, first_step),  # innermost, so that the trace has the dispatch alone
            *([NanDebugging(self._training)] if config.debug_nans else []),  # before the metrics are logged as NaN
            self._logging,  # the line of a step stands above its evaluation
            self._evaluating,  # a checkpoint has the figure that `keep_best` compares
            self._saving,
            Preempting(self._preemption, self._logging, self._saving),  # outermost: holds its lock during all others
        ]

    def _restored(self, state: TrainState, remarks: list[str]) -> tuple[TrainState, Resumed | None]:
        """Returns the state to continue from, on the host, and its checkpoint; `state` if there is none."""
        training = self._training
        clock = self._events.clock
        with clock.doing("restore"):
            resumed = self._saving.restore(state)
            if resumed is None:
                return state, None
            check_data(training.config, resumed.notes["data"], training.task.fingerprint, resumed.step)
            clock.earlier_train_seconds = resumed.notes["train_seconds"]
            remarks += [f"{reason}; continuing from step {resumed.step}" for reason in resumed.damaged]
            return resumed.state, resumed

    def _carry(self, state: TrainState, batch: Any, resumed: Resumed | None) -> Any:
        """Returns the carry for a whole state and the first batch of the session, both of this process."""
        devices = self._training.devices
        batch = devices.to_host(batch)
        if self._training.config.compute.steps_per_dispatch > 1:
            batch = {name: values[:, 0] for name, values in batch.items()}
        carry = self._training.initial_carry(state, batch)
        if resumed is not None:
            carry = devices.from_rows(resumed.carry_like(devices.to_rows(carry)), carry)
        return devices.shard(carry)

    def step(self, dispatch: range) -> None:
        """Trains the steps of one dispatch, and calls the hooks before, around and after it."""
        session = self.session
        clock = self.session.clock
        session.dispatch = dispatch
        session.events.check()
        session.metrics = {}
        with clock.doing("data"):
            batch = self._feed.next(session.state)
        self._training.devices.limit_dispatch(self._in_flight)
        for hook in self._hooks:
            hook.before(session, batch)
        arguments = (session.state, session.carry, batch, self._key)
        program = session.programs.get(dispatch.start, len(dispatch), arguments)
        session.say(session.programs.news())
        with contextlib.ExitStack() as around:
            for hook in reversed(self._hooks):
                around.enter_context(hook.around(session))
            session.state, session.carry, metrics = program(*arguments)
        clock.dispatched(session.step)
        self._in_flight.append(metrics)
        for hook in self._hooks:
            hook.after(session, metrics)

    def finish(self) -> dict[str, Any]:
        """Calls the ends of the hooks, which evaluate and save; returns the figures of the run, and writes them."""
        session = self.session
        folder = self._folder
        session.clock.switch("end")
        for hook in self._hooks:
            hook.end(session)
        evaluation = self._evaluating.final
        figures: dict[str, Any] = dict(session.metrics)
        figures |= {"train_seconds": session.clock.train_seconds, "train_steps": session.step}
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


def _heading(training: Training, first_step: int) -> str:
    config = training.config
    size = sum(p.size for p in training.objective.params.values())
    continuing = f", continuing at step {first_step}" if first_step else ""
    return (
        f"{config.model} with {size:,} parameters on {training.devices.kind}; {training.task.description}; "
        f"{training.total_steps} steps of {config.global_batch_size}, metrics every {config.log_every_steps} steps"
        f"{continuing}"
    )


def _feed(training: Training, dispatches: Sequence[range]) -> OnDemand:
    batches = training.batches
    devices = training.devices
    whole = training.placement.whole
    if training.task.needs_state:
        return OnDemand(lambda number, state: devices.shard(batches.from_step(dispatches[number].start, whole(state))))
    ahead = training.config.compute.batches_ahead
    return Feed(lambda number: devices.shard(batches.from_step(dispatches[number].start)), len(dispatches), ahead)
