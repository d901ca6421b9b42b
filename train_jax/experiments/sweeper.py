"""Trains the runs of a sweep one after another, in processes of their own, beside other sweepers in the same root.

A sweeper claims a run before it trains it (`train_jax/run/lease.py`): with a lock of the operating system on a disk,
with a lease in storage. Both end with the process that holds them, so a run whose sweeper was killed is claimed by the
next one, which continues it. The run's own lock keeps a process apart that is still alive after its sweeper.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from train_jax.errors import PreemptedError, UserError
from train_jax.experiments.sweep_files import SweepFiles, Work, finished_figures
from train_jax.run.lease import sole_writer
from train_jax.runtime.supervisor import PIPE, Supervisor

POLL_SECONDS = 2.0
"""Between two looks at runs that other sweepers train."""
KEPT_LINES = 40
"""Of the output of a run that failed."""
INTERRUPTED = (PreemptedError.STATUS, 130, 143)
"""Exit statuses of SIGTERM and Ctrl-C."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    output: str
    """The last lines."""


Runner = Callable[[Sequence[str]], Ended]


class Sweeper:
    """Trains what is not finished; returns when every run is finished or has failed."""

    def __init__(
        self,
        files: SweepFiles,
        works: Sequence[Work],
        *,
        say: Callable[[str], None],
        run: Runner,
        continues_on_failure: bool = False,
        builds_data: bool = True,
    ):
        self._files, self._works, self._say, self._run = files, works, say, run
        self._continues, self._builds_data = continues_on_failure, builds_data
        self._built: set[tuple[str, ...]] = set()
        self._failures_before = {work.name: self._failure_token(work) for work in works}
        self.failed: list[str] = []
        """Runs that failed since this sweeper started, here or in another one."""

    def sweep(self) -> int:
        """Returns the exit status: 0 if all runs are finished, 1 if some failed, 75 after SIGTERM."""
        pending = list(self._works)
        while pending:
            left = [work for work in pending if not self._is_settled(work)]
            if self.failed and not self._continues:
                return 1
            claimed = False
            for work in left:
                if not all(map(self._is_ready, work.sources)):
                    continue
                status = self._try(work)
                if status in INTERRUPTED:
                    return PreemptedError.STATUS
                claimed = status is not None
                if claimed:
                    break
            if left and not claimed:
                time.sleep(POLL_SECONDS)
            pending = left
        return 1 if self.failed else 0

    def _is_settled(self, work: Work) -> bool:
        """Whether there is nothing left to do for the run; a failed one is noted."""
        if self._files.is_finished(work):
            return True
        token = self._failure_token(work)
        lost = next((name for name in work.sources if name in self.failed), "")
        if (token and token != self._failures_before[work.name]) or lost:
            self.failed.append(work.name)
            if lost:
                self._say(f"{work.name}: not trained, because {lost} failed")
            return True
        return False

    def _failure_token(self, work: Work) -> str:
        return str((self._files.failure(work.name) or {}).get("token", ""))

    def _is_ready(self, name: str) -> bool:
        source = next(work for work in self._works if work.name == name)
        return self._files.is_finished(source)

    def _try(self, work: Work) -> int | None:
        """Trains a run unless another process does; returns the exit status, None if it was not this one."""
        with contextlib.ExitStack() as claims:
            try:
                claims.enter_context(sole_writer(self._files.claim(work.name)))
                folder = self._files.run(work).path
                if folder.exists():
                    with sole_writer(folder):  # a process without its sweeper may still be saving
                        pass
            except UserError as error:
                if error.STATUS != UserError.STATUS:
                    raise
                return None
            if self._files.is_finished(work) or self._failure_token(work) != self._failures_before[work.name]:
                return 0  # another sweeper was faster
            return self._train(work)

    def _train(self, work: Work) -> int:
        started = time.monotonic()
        if work.same_as and not self._files.run(work).config.is_file():
            self._files.copy(work)
            self._say(f"{work.name}: copied from {work.same_as}, which has the same configuration")
            self._files.write_results()
            return 0
        ended = self._build(work)
        if ended.status == 0:
            self._say(f"{work.name}: trm {shlex.join(work.command)}")
            ended = self._run(work.command)
        if ended.status in INTERRUPTED:
            self._say(f"{work.name}: stopped; the same command continues it")
        elif ended.status or not self._files.is_finished(work):
            self._files.write_failure(work.name, ended.status, ended.output)
            failure = self._files.failure(work.name) or {}
            self._say(f"{work.name}: failed with status {ended.status}: {failure.get('reason')}")
        else:
            self._files.remove_failure(work.name)
            summary = (finished_figures(self._files.run(work)) or {}).get("summary", "")
            self._say(f"{work.name}: finished in {time.monotonic() - started:.0f} s: {summary}")
        self._files.write_results()
        return ended.status

    def _build(self, work: Work) -> Ended:
        """Builds the data sets of a run that this sweeper has not built yet; one sweeper at a time builds a set."""
        for command in work.builds if self._builds_data else ():
            if command in self._built:
                continue
            folder = command[-1].rstrip("/").rpartition("/")[2]
            with self._waiting_claim(f"data-{folder}"):
                ended = self._run(command)
            if ended.status:
                return ended
            self._built.add(command)
        return Ended(0, "")

    @contextlib.contextmanager
    def _waiting_claim(self, name: str):
        while True:
            with contextlib.ExitStack() as claim:
                try:
                    claim.enter_context(sole_writer(self._files.claim(name)))
                except UserError as error:
                    if error.STATUS != UserError.STATUS:
                        raise
                else:
                    yield
                    return
            time.sleep(POLL_SECONDS)


def run_command(words: Sequence[str], restarts: int = 0) -> Ended:
    """Runs a command of `trm` in a process of its own, which ends if this one does; after a crash again."""
    with tempfile.TemporaryFile() as output:

        def say(line: str) -> None:
            output.write(f"trm: {line}\n".encode())
            output.flush()

        command = [sys.executable, "-m", "train_jax", *words]
        status = Supervisor(command, restarts, say, output=output.fileno()).run()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    return Ended(status, "\n".join(lines[-KEPT_LINES:]))


@contextlib.contextmanager
def other_sweepers(command: Sequence[str], count: int) -> Iterator[None]:
    """Starts other processes of a command of `trm` while the block runs, and waits for them after it.

    If the block fails, or this process is killed, they get SIGTERM: a run that one of them trains is saved.
    """
    read, write = os.pipe()
    arguments = [sys.executable, "-m", "train_jax", *command]
    # A process that finds the pipe closed ends itself, as under `trm train --restarts`.
    processes = [
        subprocess.Popen(arguments, env=os.environ | {PIPE: str(write)}, pass_fds=[write]) for _ in range(count)
    ]
    os.close(write)
    try:
        yield
    except BaseException:
        os.close(read)
        raise
    else:
        for process in processes:
            process.wait()
        os.close(read)
