"""Hooks of the training loop: profiles, a search for NaN, log lines, evaluations, checkpoints, SIGTERM."""

from __future__ import annotations

import contextlib
import copy
import gzip
import itertools
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

import bridge
from train_jax.core.metrics import optimizer_figures, window_sums
from train_jax.core.optim.chain import learning_rates
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.checkpoint import Checkpoints, Resumed, Retention
from train_jax.run.config import RunConfig
from train_jax.run.folder import PROFILED_PROGRAM, PROFILED_STEP, RunFolder
from train_jax.run.performance import model_flops, peak_flops, performance
from train_jax.run.tracking import duration
from train_jax.runtime.preemption import Preemption
from train_jax.runtime.processes import any_process, is_main_process, process_shard
from train_jax.storage.cache import working_folder
from train_jax.storage.files import upload_folder
from train_jax.storage.lease import check_writer
from train_jax.task import Evaluation, Periodic
from train_jax.trainer.session import Hook, Session
from train_jax.trainer.start import Training

MEMORY_BEFORE, MEMORY_AFTER = "memory-before.prof", "memory-after.prof"
"""Names of the profiles of the device memory before and after the traced steps, for pprof."""
_DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"


class Logging(Hook):
    """Logs the metrics of a window of `log_every_steps` steps.

    A full window is fetched one dispatch late, so that the devices always have a step to run.
    """

    def __init__(self, training: Training):
        self._window: list[tuple[int, Any]] = []
        self._rates = list(learning_rates(itertools.chain(*training.groups.values()), training.config.optim, 1))
        self._model_flops: float | None = None
        """FLOPs of a step on one device; None if no peak is known, or for a model that changes during the run."""
        constant = training.task.variants(training.total_steps).after(0) is None
        if constant and peak_flops() is not None:
            self._model_flops = model_flops(training.config, training.task, training.devices.count)

    def after(self, session: Session, metrics: Any) -> None:
        self._window.append((session.step, metrics))
        if len(self._window) > 1 and self._window[-2][0] % session.training.config.log_every_steps == 0:
            self._log(session, self._window[:-1])
            del self._window[:-1]

    def flush(self, session: Session) -> None:
        """Logs the metrics in the window; the next step starts a new window."""
        if self._window:
            self._log(session, self._window)
            self._window.clear()

    def _log(self, session: Session, window: list[tuple[int, Any]]) -> None:
        """Logs the metrics of a window. Raises `UserError` if too many consecutive steps were skipped."""
        training, config = session.training, session.training.config
        fetched = training.devices.to_host([metrics for _, metrics in window])
        if config.compute.steps_per_dispatch > 1:  # stacked
            fetched = [{n: v[i] for n, v in stack.items()} for stack in fetched for i in range(len(stack["lr"]))]
        step, size, count = window[-1][0], config.global_batch_size, len(fetched)
        sums = window_sums(fetched)
        left_out = {name: float(sums.pop(name)) for name in ("skipped_steps", "empty_steps") if name in sums}
        figures = training.task.figures(sums, size * (count - int(left_out["skipped_steps"])))
        figures |= optimizer_figures(fetched[-1], training.groups, self._rates) | left_out
        lap = session.clock.lap()
        seconds = max(sum(lap.values()), 1e-9)
        metrics = {f"train/{name}": value for name, value in figures.items()}
        metrics |= {"data_wait_share": lap["data"] / seconds}
        unit, per_example = training.task.unit
        per_second = {"examples": size * count / seconds}
        per_second[unit] = per_example * per_second["examples"]
        flops = {"hfu": session.programs.flops(), "mfu": self._model_flops}
        if config.compute.accumulation_steps > 1:  # XLA counts the parts, which are a scan, once
            del flops["hfu"]
        metrics |= performance(per_second=per_second, flops=flops, step_seconds=seconds / count)
        metrics |= {"train_seconds": session.clock.train_seconds, "step_seconds": seconds / count}
        session.tracker.log(step, metrics)
        shown = [text.format(figures[name]) for name, text in training.task.console.items() if name in figures]
        speed = f"{per_second[unit]:,.0f} {unit}/s"
        session.tracker.progress(step, "  ".join(shown), step_seconds=seconds / count, speed=speed)
        _check_finite(config, step, max(int(metrics["consecutive_skipped"]) for metrics in fetched))
        session.events.progress()


def _check_finite(config: RunConfig, step: int, in_a_row: int) -> None:
    if in_a_row >= config.optim.max_skipped_steps:
        groups = ", and lower ones in --optim.groups" * any(group.lr is not None for group in config.optim.groups)
        raise UserError(
            f"{in_a_row} consecutive steps up to step {step} had a loss or gradient that is not finite "
            f"(optim.max_skipped_steps is {config.optim.max_skipped_steps}); start another --run-dir with a lower "
            f"--optim.lr than {config.optim.lr}{groups}, with --optim.clip-norm 1, or with --arch.forward-dtype float32"
        )


class Evaluating(Hook):
    """Evaluates at the steps of each evaluation, and at the end on all examples."""

    def __init__(self, evaluations: Sequence[Periodic]):
        self._evaluations = evaluations
        self.final: Evaluation | None = None
        """The main evaluation at the end of the run."""

    def after(self, session: Session, metrics: Any) -> None:
        due = [each for each in self._evaluations if each.every and session.step % each.every == 0]
        if not due or session.step == session.total_steps:
            return
        with session.pausing("evaluation"):
            whole = session.training.placement.whole(session.state)
            for each in due:
                self._evaluate(session, each, each.evaluator(whole, limit=each.limit, metrics_only=True))

    def end(self, session: Session) -> None:
        with session.pausing("evaluation"):
            whole = session.training.placement.whole(session.state)
            for each in self._evaluations:
                evaluation = each.evaluator(whole)
                self._evaluate(session, each, evaluation)
                if is_main_process():
                    evaluation.save(session.folder, each.name or "test")
                if not each.name:
                    self.final = evaluation

    def _evaluate(self, session: Session, which: Periodic, evaluation: Evaluation) -> None:
        prefix = f"{which.name}/" if which.name else ""
        metrics = {f"{prefix}{name}": value for name, value in evaluation.metrics.items()}
        session.metrics |= metrics
        seconds = session.clock.train_seconds
        session.tracker.log(session.step, {f"eval/{n}": v for n, v in metrics.items()} | {"train_seconds": seconds})
        what = f"{which.name}: " if which.name else ""
        said = f"step {session.step}: {what}{evaluation.summary} after {duration(seconds)} of training"
        session.say([said, *evaluation.details])
        if is_main_process():
            check_writer(session.folder.path)
            evaluation.record(session.folder, session.step)


class Saving(Hook):
    """Writes the checkpoints of a run, and restores the newest one."""

    def __init__(self, training: Training, folder: RunFolder, logging: Logging):
        config = training.config
        self._training, self._logging = training, logging
        self._checkpoints = Checkpoints(folder, Retention(config.keep_checkpoints, config.keep_every_steps))
        self._last: float | None = None
        self.lock: contextlib.AbstractContextManager = contextlib.nullcontext()
        """Held while a save begins, so that no other thread begins one that the other processes do not."""

    def restore(self, state: TrainState) -> Resumed | None:
        """Returns what the run continues from, on the host; None if there is no checkpoint. Collective.

        `state` gives structure, shapes and dtypes. Raises `UserError` for a checkpoint of another model.
        """
        return self._checkpoints.restore_newest(state, self._training.devices.row_sharding)

    def after(self, session: Session, metrics: Any) -> None:
        if self.due(session.step, session.clock.now(), metrics):
            # Last, so that everything up to a checkpoint is logged.
            self._logging.flush(session)
            with self.lock, session.pausing("saving"):
                self.start(session)
            session.events.progress()

    def due(self, step: int, now: float, until_ready: Any) -> bool:
        """Returns whether to save after this step; `until_ready` are results of the step. Collective.

        The first process decides by its clock. Log lines then end at the steps where they end without a checkpoint.
        """
        config = self._training.config
        self._last = now if self._last is None else self._last
        if step == self._training.total_steps or step % config.checkpoint_every_steps == 0:
            self._last = now
            return True
        if not config.checkpoint_every_minutes or step % config.log_every_steps:
            return False
        jax.block_until_ready(until_ready)  # virtual devices cannot run another collective beside the step
        due = any_process(is_main_process() and now - self._last >= 60 * config.checkpoint_every_minutes)
        self._last = now if due else self._last
        return due

    def start(self, session: Session) -> None:
        """Starts to save in the background. Collective."""
        training = self._training
        session.tracker.sync()  # a checkpoint has the metrics of all steps before it
        notes = {"train_seconds": session.clock.train_seconds, "data": training.task.fingerprint}
        value, problem = None, None
        try:
            value = figure_of_best(session.metrics, training.config.keep_best)
        except UserError as error:  # a task may not name its metrics; the checkpoint is saved all the same
            problem = error
        whole, rows = training.placement.to_checkpoint(session.state), training.devices.to_rows(session.carry)
        self._checkpoints.save(session.step, whole, rows, notes, value)
        if problem is not None:
            self.wait()
            raise problem

    def wait(self) -> None:
        """Blocks until everything that is being saved is on disk."""
        self._checkpoints.wait()

    def end(self, session: Session) -> None:
        with session.clock.doing("saving"):
            self.wait()

    def close(self) -> None:
        self._checkpoints.close()


def figure_of_best(metrics: Mapping[str, float], name: str) -> float | None:
    """Returns the value that selects the best checkpoint, higher is better; None if there are no metrics.

    `name` is that of a metric, with a minus in front if lower is better. Raises `UserError` for an unknown one.
    """
    if not name or not metrics:
        return None
    if name.removeprefix("-") not in metrics:
        raise UserError(f"keep_best is {name}, which no evaluation has; use one of {', '.join(metrics)}")
    value = metrics[name.removeprefix("-")]
    return -value if name.startswith("-") else value


class Preempting(Hook):
    """Saves and ends the process after a notice that the machine will be taken away."""

    def __init__(self, preemption: Preemption, logging: Logging, saving: Saving):
        self._preemption, self._logging, self._saving = preemption, logging, saving
        saving.lock = preemption.lock

    @contextlib.contextmanager
    def around(self, session: Session) -> Iterator[None]:
        self._preemption.before_step(session.step, lambda: self._logging.flush(session))
        with self._preemption.lock:
            yield
            self._preemption.after_step(session.step, partial(self._save, copy.copy(session)))

    def _save(self, session: Session) -> None:
        with session.clock.doing("saving"):
            self._saving.start(session)
            self._saving.wait()
        session.events.end("preempted")

    def after(self, session: Session, metrics: Any) -> None:
        self._preemption.check()


class Profiling(Hook):
    """Traces `config.profile` optimizer steps of a session, after its first `config.profile_skip` ones.

    Every process writes a folder of its own: `plugins/profile/…` for XProf with `perfetto_trace.json.gz` for Perfetto,
    and a snapshot of the memory before and after the traced steps. With `config.profile_server`, XProf connects.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, first_step: int):
        self._serves = config.profile_server > 0
        if self._serves:
            _check_port(config.profile_server)
            jax.profiler.start_server(config.profile_server)  # XProf can connect until JAX drops the server
        self._begin = first_step + config.profile_skip
        self._end = self._begin + config.profile
        self._waits, self._traced_from = config.profile > 0, -1
        self.folder = folder.profile(process_shard()[0])
        self._local: Path | None = None

    @contextlib.contextmanager
    def around(self, session: Session) -> Iterator[None]:
        if self._waits and session.dispatch.start >= self._begin:
            self._start(session)
        if self._local is None:
            yield
            return
        with jax.profiler.StepTraceAnnotation(PROFILED_STEP, step_num=session.step):
            yield

    def after(self, session: Session, metrics: Any) -> None:
        if self._local is not None and session.step >= self._end:
            self._stop(session)

    def end(self, session: Session) -> None:
        if self._serves:
            jax.profiler.stop_server()
        if self._local is not None:
            self._stop(session)
        elif self._waits:
            session.say([f"no step was profiled: the run ended at step {session.step}; lower --profile-skip"])

    def _start(self, session: Session) -> None:
        self._waits, self._traced_from = False, session.dispatch.start + 1
        self._local = working_folder(self.folder)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a line for every call of Python would be most of the file
        with session.pausing("profile"):  # until earlier steps have ended: they are not in the trace
            self._local.mkdir(parents=True, exist_ok=True)
            jax.profiler.save_device_memory_profile(self._local / MEMORY_BEFORE)
            jax.profiler.start_trace(self._local, create_perfetto_trace=True, profiler_options=options)

    def _stop(self, session: Session) -> None:
        assert self._local is not None
        with session.pausing("profile"):
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(self._local / MEMORY_AFTER)
            (self._local / PROFILED_PROGRAM).write_bytes(gzip.compress(session.programs.text().encode()))
            if self._local != self.folder:
                upload_folder(self._local, self.folder, last=())
        self._local = None
        session.say([f"profile of steps {self._traced_from} to {session.step} in {self.folder}"])


def _check_port(port: int) -> None:
    """Raises `UserError` for a port that is taken, as JAX does not."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run that was killed leaves connections behind
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(f"--profile-server {port}: {error.strerror}; give another port") from None


def check_debugging(config: RunConfig) -> None:
    """Raises `UserError` if `deterministic` needs an XLA flag that is not set, if `debug_nans` conflicts, or if the
    port of `profile_server` is taken."""
    if config.profile_server:
        _check_port(config.profile_server)
    needs_flag = config.deterministic and jax.default_backend() == "gpu"
    if needs_flag and _DETERMINISTIC_FLAG not in os.environ.get("XLA_FLAGS", ""):
        raise UserError(
            "deterministic needs an XLA flag that must be set before the start; run again with "
            f"XLA_FLAGS={_DETERMINISTIC_FLAG}"
        )
    for name in ("steps_per_dispatch", "accumulation_steps"):
        if config.debug_nans and getattr(config.compute, name) > 1:
            raise UserError(
                f"debug_nans repeats single steps, and compute.{name} is {getattr(config.compute, name)}; use 1"
            )


class NanDebugging(Hook):
    """Checks every step, and repeats a non-finite step operation by operation (`--debug-nans`).

    This is slow: every step waits for its result and copies carry and batch to the host.
    """

    def __init__(self, training: Training):
        self._training = training
        self._carry: Any = None
        self._batch: Any = None

    def before(self, session: Session, batch: Any) -> None:
        self._carry, self._batch = self._training.devices.to_host((session.carry, batch))

    def after(self, session: Session, metrics: Any) -> None:
        """Raises `UserError` with the operation and the submodule if the step was skipped."""
        if bool(jax.device_get(metrics["skipped_steps"])):
            step = int(session.state.step)
            whole = jax.device_get(self._training.placement.whole(session.state))
            raise UserError(f"step {step + 1} is not finite: {self._locate(whole)}")

    def _locate(self, state: TrainState) -> str:
        config, objective = self._training.config, self._training.objective
        devices = self._training.devices
        key = jax.random.fold_in(jax.random.key(config.seed), state.step + state.guard.skipped_steps - 1)
        for replica in range(len(devices.local)):
            carry, batch = jax.tree.map(lambda x, at=replica: x[at], (self._carry, self._batch))
            rows = config.global_batch_size // devices.count
            rng = bridge.ShardedKey(key, replica, devices.count, rows)
            arguments = (objective.local_rows, state.buffers, carry, batch, rng)

            def loss(params: Any, arguments: Any = arguments) -> jax.Array:
                return objective(params, *arguments).loss

            functions: dict[str, Callable[[Any], Any]] = {"forward": loss, "backward": jax.grad(loss)}
            for what, function in functions.items():
                try:
                    with jax.debug_nans(True), jax.debug_infs(True):
                        function(state.params)
                except FloatingPointError as error:
                    return f"{str(error).splitlines()[0]}, in the {what} pass, {_submodule(error)}"
        return "every operation of the forward and backward pass is finite, so the sum over devices overflows"


def _submodule(error: BaseException) -> str:
    """Returns the innermost PyTorch submodule and source line in the traceback of the error."""
    modules: list[Any] = []
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if hasattr(owner, "named_modules"):
            modules.append(owner)
            if os.sep + "torch" + os.sep not in frame.f_code.co_filename:
                line = f"{frame.f_code.co_filename}:{number}"
    if not modules:
        return "outside of the module's code"
    names = {id(module): name for name, module in modules[0].named_modules()}
    name = names.get(id(modules[-1]), "")
    return f"in {name or 'the module itself'} ({type(modules[-1]).__name__}), at {line}"
