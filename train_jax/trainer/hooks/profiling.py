"""Profiles of some steps, and the server that XProf connects to."""

from __future__ import annotations

import contextlib
import gzip
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.run.folder import PROFILED_PROGRAM, PROFILED_STEP, RunFolder
from train_jax.runtime.processes import process_shard
from train_jax.storage.cache import working_folder
from train_jax.storage.files import upload_folder
from train_jax.trainer.session import Hook, Session

MEMORY_BEFORE = "memory-before.prof"
MEMORY_AFTER = "memory-after.prof"
"""Names of the profiles of the device memory before and after the traced steps, for pprof."""


class Profiling(Hook):
    """Traces `config.profile` optimizer steps of a session, after its first `config.profile_skip` ones.

    Every process writes a folder of its own: `plugins/profile/…` for XProf with `perfetto_trace.json.gz` for Perfetto,
    and a snapshot of the memory before and after the traced steps. With `config.profile_server`, XProf connects.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, first_step: int):
        self._serves = config.profile_server > 0
        if self._serves:
            check_port(config.profile_server)
            jax.profiler.start_server(config.profile_server)  # XProf can connect until JAX drops the server
        self._begin = first_step + config.profile_skip
        self._end = self._begin + config.profile
        self._waits = config.profile > 0
        self._traced_from = -1
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
        self._waits = False
        self._traced_from = session.dispatch.start + 1
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


def check_port(port: int) -> None:
    """Raises `UserError` for a port that is taken, as JAX does not."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run that was killed leaves connections behind
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(f"--profile-server {port}: {error.strerror}; give another port") from None
