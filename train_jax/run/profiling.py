"""`--profile STEPS`: a trace of some train steps for XProf and Perfetto, and device memory before and after them."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from train_jax.run.cache import working_folder
from train_jax.run.config import RunConfig
from train_jax.run.files import upload_folder
from train_jax.run.folder import PROFILED_PROGRAM, PROFILED_STEP, RunFolder
from train_jax.runtime.processes import process_shard
from train_jax.runtime.stopwatch import Stopwatch

MEMORY_BEFORE, MEMORY_AFTER = "memory-before.prof", "memory-after.prof"
"""What holds the memory of the devices, for pprof."""


class Profiler:
    """Traces `config.profile` optimizer steps of a session, after its first `config.profile_skip` ones.

    Every process writes a folder of its own: `plugins/profile/…` for XProf with `perfetto_trace.json.gz` for Perfetto,
    and a snapshot of the memory before and after the traced steps.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, clock: Stopwatch, first_step: int, program: Callable[[], str]
    ):
        """`clock` is paused for what tracing itself takes; `program` returns the text of the compiled train step."""
        self._begin = first_step + config.profile_skip
        self._end = self._begin + config.profile
        self._waits, self._traced_from = config.profile > 0, -1
        self.folder = folder.profile(process_shard()[0])
        self._local: Path | None = None
        self._clock, self._program = clock, program

    @contextlib.contextmanager
    def dispatch(self, first: int, step: int, state: Any) -> Iterator[None]:
        """Surrounds the dispatch of the steps after `first` up to `step`, which donates `state`."""
        if self._waits and first >= self._begin:
            self._start(first, state)
        if self._local is None:
            yield
            return
        with jax.profiler.StepTraceAnnotation(PROFILED_STEP, step_num=step):
            yield

    def after(self, step: int, state: Any) -> list[str]:
        """Ends the trace behind its last step; returns lines for the log."""
        return self._stop(step, state) if self._local is not None and step >= self._end else []

    def finish(self, step: int, state: Any) -> list[str]:
        """Ends a trace that is longer than the run; returns lines for the log."""
        if self._local is not None:
            return self._stop(step, state)
        return [f"no step was profiled: the run ended at step {step}; lower --profile-skip"] if self._waits else []

    def _start(self, first: int, state: Any) -> None:
        self._waits, self._traced_from, self._local = False, first + 1, working_folder(self.folder)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a line for every call of Python would be most of the file
        with self._clock.paused(state):  # until earlier steps have ended: they are not in the trace
            self._local.mkdir(parents=True, exist_ok=True)
            jax.profiler.save_device_memory_profile(self._local / MEMORY_BEFORE)
            jax.profiler.start_trace(self._local, create_perfetto_trace=True, profiler_options=options)

    def _stop(self, step: int, state: Any) -> list[str]:
        assert self._local is not None
        with self._clock.paused(state):
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(self._local / MEMORY_AFTER)
            (self._local / PROFILED_PROGRAM).write_bytes(gzip.compress(self._program().encode()))
            if self._local != self.folder:
                upload_folder(self._local, self.folder, last=())
        self._local = None
        return [f"profile of steps {self._traced_from} to {step} in {self.folder}"]
