"""Trains the runs of a sweep one after another, in processes of their own, beside other sweepers in the same root.

A sweeper claims a run before it trains it (`train_jax/run/lease.py`): with a lock of the operating system on a disk,
with a lease in storage. Both end with the process that holds them, so a run whose sweeper was killed is claimed by the
next one, which continues it. The run's own lock keeps a process apart that is still alive after its sweeper.

ROOT/<group>/<id>/seed-N/       the runs
ROOT/sweep/plans/<hash>.json    the runs of every sweep that was started here
ROOT/sweep/claims/<run>/lock    held by the sweeper that trains the run
ROOT/sweep/failures/<run>.json  the last failure of a run that is not finished
ROOT/batch_results.json         the state and the figures of all planned runs
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import io
import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from train_jax.errors import PreemptedError, UserError
from train_jax.run.files import copy_folder, write_text
from train_jax.run.folder import RunFolder
from train_jax.run.lease import sole_writer
from train_jax.run.status import RunStatus, read_status
from train_jax.run.storage import path_of
from train_jax.runtime.supervisor import PIPE, Supervisor

State = Literal["finished", "running", "failed", "stopped", "waiting"]
STATES: tuple[State, ...] = ("finished", "running", "failed", "stopped", "waiting")
POLL_SECONDS = 2.0
"""Between two looks at runs that other sweepers train."""
KEPT_LINES = 40
"""Of the output of a run that failed."""
INTERRUPTED = (PreemptedError.STATUS, 130, 143)
"""Exit statuses of SIGTERM and Ctrl-C."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One run of a plan, as a command and its folder."""

    name: str
    """`<group>/<id>/seed-N`, its folder in the root."""
    steps: int
    """Optimizer steps of the whole run; 0 if they are not known before it starts."""
    command: tuple[str, ...]
    """The words after `trm` that train it, or continue it."""
    builds: tuple[tuple[str, ...], ...] = ()
    """The commands that build its data sets, and do nothing if these are there."""
    needs: str = ""
    """The run whose weights it starts from."""
    same_as: str = ""
    """The run with the same configuration, whose files are copied instead of training it again."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The runs that must be finished before this one."""
        return tuple(filter(None, (self.needs, self.same_as)))


class SweepFiles:
    """The files of all sweeps in one root, which may be `gs://…`."""

    def __init__(self, root: str):
        self.root, self.root_text = path_of(root), root.rstrip("/")
        self._folder = self.root / "sweep"

    def run(self, work: Work) -> RunFolder:
        return RunFolder(self.root / work.name)

    def claim(self, name: str) -> Path:
        """The folder whose only writer may train the run, or build the data set."""
        return self._folder / "claims" / name.replace("/", "--")

    # ---- plans

    def write_plan(self, works: Sequence[Work]) -> None:
        content = json.dumps([dataclasses.asdict(work) for work in works], indent=1)
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        write_text(self._folder / "plans" / f"{digest}.json", content)

    def planned(self) -> list[Work]:
        """Every run of every plan, once. Raises `UserError` if no sweep was started in this root."""
        works: dict[str, Work] = {}
        for path in _json_files(self._folder / "plans"):
            try:
                for fields in read_json(path) or ():
                    builds = tuple(map(tuple, fields["builds"]))
                    works[fields["name"]] = Work(**(fields | {"command": tuple(fields["command"]), "builds": builds}))
            except (TypeError, KeyError) as error:
                raise UserError(f"{path} is not a plan of a sweep ({error!r}); remove it") from None
        if not works:
            raise UserError(
                f"no sweep was started in {self.root}; start one with `trm sweep NAME --runs-root {self.root}`"
            )
        return list(works.values())

    # ---- copies

    def copy(self, work: Work) -> None:
        """Makes a run of the finished run with the same configuration; FINISHED, written last, names that run."""
        source, target = RunFolder(self.root / work.same_as), self.run(work)
        own = (source.config, source.finished, source.lock, source.heartbeat, source.wandb_id)
        copy_folder(source.path, target.path, without=[path.name for path in own])
        group, label, _ = work.name.split("/")
        place = {"run_dir": f"{self.root_text}/{work.name}", "wandb_project": f"trm-{group}", "wandb_group": label}
        write_text(target.config, json.dumps(json.loads(source.config.read_text()) | place, indent=1))
        write_text(target.finished, json.dumps((finished_figures(source) or {}) | {"copied_from": work.same_as}))

    # ---- failures

    def write_failure(self, name: str, status: int, output: str) -> str:
        """Returns the reason: the last line of an error, which `trm` begins with its name."""
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith("trm: ")]
        reason = (own or lines or ["no output"])[-1].removeprefix("trm: ")
        failure = {"status": status, "reason": reason, "output": output, "token": secrets.token_hex(8), "time": _now()}
        write_text(self._failure(name), json.dumps(failure, indent=1))
        return reason

    def failure(self, name: str) -> dict[str, Any] | None:
        return read_json(self._failure(name))

    def remove_failure(self, name: str) -> None:
        self._failure(name).unlink(missing_ok=True)

    def _failure(self, name: str) -> Path:
        return self._folder / "failures" / f"{name.replace('/', '--')}.json"

    # ---- states

    def is_finished(self, work: Work) -> bool:
        """True if the run has all its steps."""
        figures = finished_figures(self.run(work))
        return figures is not None and figures["train_steps"] >= work.steps

    def state(self, work: Work) -> tuple[State, RunStatus | None]:
        folder = self.run(work)
        try:
            status = read_status(folder) if folder.config.is_file() else None
        except UserError:
            status = None
        if self.is_finished(work):
            return "finished", status
        if status is not None and status.health in ("running", "stalled"):
            return "running", status
        if self.failure(work.name) is not None:
            return "failed", status
        return ("stopped" if status is not None else "waiting"), status

    def write_results(self) -> dict[str, int]:
        """Writes batch_results.json from what is on disk; returns the number of runs in each state."""
        results = [self._result(work) for work in self.planned()]
        counts = Counter(result["state"] for result in results)
        ordered = {state: counts[state] for state in STATES if counts[state]}
        content = {"written": _now(), "counts": ordered, "runs": results}
        write_text(self.root / "batch_results.json", json.dumps(content, indent=1))
        return ordered

    def _result(self, work: Work) -> dict[str, Any]:
        state, _ = self.state(work)
        group, experiment, seed = work.name.split("/")
        result: dict[str, Any] = {"run": work.name, "group": group, "experiment": experiment}
        result |= {"seed": int(seed.removeprefix("seed-")), "state": state, "run_dir": str(self.run(work).path)}
        result |= {"command": shlex.join(("trm", *work.command))}
        if state == "finished":
            result["figures"] = finished_figures(self.run(work))
        elif state == "failed":
            failure = self.failure(work.name) or {}
            result |= {"status": failure.get("status"), "reason": failure.get("reason")}
        return result


def finished_figures(folder: RunFolder) -> dict[str, Any] | None:
    """The figures of a finished run; None for one that is not finished, or whose FINISHED cannot be read."""
    figures = read_json(folder.finished)
    return figures if isinstance(figures, dict) and isinstance(figures.get("train_steps"), int | float) else None


def done_elsewhere(path: str) -> set[str]:
    """The finished runs in a results.csv of `trm analyze`, by name. Raises `UserError` if it is not one."""
    try:
        rows = list(csv.DictReader(io.StringIO(path_of(path).read_text())))
        return {f"{row['group']}/{row['experiment']}/seed-{row['seed']}" for row in rows if row["state"] == "finished"}
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise UserError(f"--done {path} cannot be read ({error!r}); give a results.csv of `trm analyze`") from None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _json_files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if path.name.endswith(".json"))


def read_json(path: Path) -> Any:
    """Returns the content of a file; None for one that is not there, or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


# ---- training


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
            for work in left:
                if all(map(self._is_ready, work.sources)) and (status := self._try(work)) is not None:
                    if status in INTERRUPTED:
                        return PreemptedError.STATUS
                    break
            else:
                time.sleep(POLL_SECONDS if left else 0)
            pending = left
        return 1 if self.failed else 0

    def _is_settled(self, work: Work) -> bool:
        """True if there is nothing left to do for the run; a failed one is noted."""
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
        with _claim(self._files.claim(work.name)) as claimed:
            folder = self._files.run(work).path
            if claimed and folder.exists():
                with _claim(folder) as claimed:  # a process without its sweeper may still be saving
                    pass
            if not claimed:
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
            reason = self._files.write_failure(work.name, ended.status, ended.output)
            self._say(f"{work.name}: failed with status {ended.status}: {reason}")
        else:
            self._files.remove_failure(work.name)
            summary = (finished_figures(self._files.run(work)) or {}).get("summary", "")
            self._say(f"{work.name}: finished in {time.monotonic() - started:.0f} s: {summary}")
        self._files.write_results()
        return ended.status

    def _build(self, work: Work) -> Ended:
        """Builds the data sets of a run that this sweeper has not built yet; one sweeper at a time builds a set."""
        ended = Ended(0, "")
        for command in work.builds if self._builds_data else ():
            folder = command[-1].rstrip("/").rpartition("/")[2]
            while ended.status == 0 and command not in self._built:
                with _claim(self._files.claim(f"data-{folder}")) as claimed:
                    if claimed:
                        ended = self._run(command)
                if not claimed:
                    time.sleep(POLL_SECONDS)
                elif ended.status == 0:
                    self._built.add(command)
        return ended


@contextlib.contextmanager
def _claim(folder: Path) -> Iterator[bool]:
    """Is the only writer of a folder while the block runs; yields False if another process is."""
    with contextlib.ExitStack() as claim:
        claimed = True
        try:
            claim.enter_context(sole_writer(folder))
        except UserError as error:
            if error.STATUS != UserError.STATUS:
                raise
            claimed = False
        yield claimed


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
        for process in processes:
            process.wait()
    finally:
        os.close(read)
