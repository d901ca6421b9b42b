"""Trains the runs of a sweep one after another, in separate processes, beside other sweepers in the same root.

A sweeper claims a run before it trains it (`train_jax/storage/lease.py`): with a lock of the operating system on disk,
with a lease in storage. Both end with the process that holds them, so a run whose sweeper was killed is claimed by the
next one, which continues it. The run's own lock keeps a process apart that is still alive after its sweeper. Each
sweeper tries a run once: one that failed in another sweeper may pass on this machine.

ROOT/<group>/<id>/seed-N/       the runs
ROOT/sweep/claims/<run>/lock    held by the sweeper that trains the run
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train_jax.errors import PreemptedError, UserError
from train_jax.run.folder import RESTORE, RunFolder
from train_jax.run.status import read_status
from train_jax.storage.files import write_bytes, write_text
from train_jax.storage.json_files import COUNT, FINITE, Kind, find_object, optional, read_object
from train_jax.storage.lease import HeldError, sole_writer
from train_jax.storage.storage import path_of

POLL_SECONDS = 2.0
"""Seconds between two checks of runs that other sweepers train."""
INTERRUPTED = (PreemptedError.STATUS, 130, 143)
"""Exit statuses of SIGTERM and Ctrl-C."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One run of a sweep, as a command and its folder."""

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
    """Name of the run with the same configuration, whose results are copied instead of training it again."""


class SweepFiles:
    """The files of all sweeps in one root, which may be `gs://…`."""

    def __init__(self, root: str):
        self.root = path_of(root)
        self.root_text = root.rstrip("/")
        self._folder = self.root / "sweep"

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.root / name)

    def claim(self, name: str) -> Path:
        """Returns the folder whose only writer may train the run, or build the data set."""
        return self._folder / "claims" / name.replace("/", "--")

    def copy(self, work: Work) -> None:
        """Copies the results of the finished run with the same configuration, without its checkpoints.

        FINISHED, written last, names that run.
        """
        source = self.run(work.same_as)
        target = self.run(work.name)
        for file, copy in (
            (source.data, target.data), (source.machine, target.machine), (source.metrics, target.metrics)
        ):  # fmt: skip
            write_bytes(copy, file.read_bytes())
        group, label, seed = work.name.split("/")
        place = {"run_dir": f"{self.root_text}/{work.name}", "wandb_project": f"trm-{group}"}
        place |= {"wandb_group": label, "wandb_name": f"{label}/{seed}"}
        config = read_object(source.config, {}, remedy=RESTORE)
        write_text(target.config, json.dumps(config | place, indent=1))
        write_text(target.finished, json.dumps((finished_figures(source) or {}) | {"copied_from": work.same_as}))

    def is_finished(self, name: str, steps: int) -> bool:
        """Returns True if the run has all its steps."""
        figures = finished_figures(self.run(name))
        return figures is not None and figures["train_steps"] >= steps

    def state(self, name: str, steps: int) -> str:
        """Returns `finished`, `waiting` for a run that was not begun, otherwise its health in `trm status`."""
        if self.is_finished(name, steps):
            return "finished"
        try:
            health = read_status(self.run(name)).health
        except UserError:  # its config.json cannot be read
            return "waiting"
        return "stopped" if health == "finished" else health  # it has fewer steps than planned


def finished_figures(folder: RunFolder) -> dict[str, Any] | None:
    """Returns the figures of a finished run; None for one that is not finished, or whose FINISHED cannot be read."""
    return readable(folder.finished, {"train_steps": COUNT, "train_seconds": optional(FINITE)})


def readable(path: Path, fields: Mapping[str, Kind]) -> dict[str, Any] | None:
    """Returns the content of a file with these fields; None if there is none, or it is damaged."""
    with contextlib.suppress(UserError):
        return find_object(path, fields, remedy="")
    return None


# ---- training


class Sweeper:
    """Trains what is not finished; `run` runs the words after `trm` and returns the exit status."""

    def __init__(
        self,
        files: SweepFiles,
        works: Sequence[Work],
        *,
        say: Callable[[str], None],
        run: Callable[[Sequence[str]], int],
        continues_on_failure: bool = False,
    ):
        self._files = files
        self._works = works
        self._say = say
        self._run = run
        self._continues = continues_on_failure
        self._built: set[tuple[str, ...]] = set()
        self._steps = {work.name: work.steps for work in works}
        self._failed: set[str] = set()
        """Names of the runs that failed in this sweeper, and of those that need them."""

    def sweep(self) -> int:
        """Returns the exit status: 0 if all runs are finished, 1 if some failed, 75 after SIGTERM."""
        while pending := [work for work in self._works if not self._is_settled(work)]:
            if self._failed and not self._continues:
                break
            statuses = (self._try(work) for work in pending)
            status = next((status for status in statuses if status is not None), None)
            if status in INTERRUPTED:
                return PreemptedError.STATUS
            if status is None:
                time.sleep(POLL_SECONDS)
        return 1 if self._failed else 0

    def _is_settled(self, work: Work) -> bool:
        """Returns True if there is nothing left to do for the run: it is finished, or failed in this sweeper."""
        if work.name in self._failed or self._files.is_finished(work.name, work.steps):
            return True
        if lost := self._failed & {work.needs, work.same_as}:
            self._say(f"{work.name}: not trained, because {min(lost)} failed")
            self._failed.add(work.name)
        return bool(lost)

    def _try(self, work: Work) -> int | None:
        """Trains a run; returns the exit status, None if it has to wait for another run or another sweeper."""
        sources = [name for name in (work.needs, work.same_as) if name]
        if not all(self._files.is_finished(name, self._steps[name]) for name in sources):
            return None
        try:
            with sole_writer(self._files.claim(work.name)):
                folder = self._files.run(work.name).path
                if folder.exists():
                    with sole_writer(folder):  # a process without its sweeper may still be saving
                        pass
                # Another sweeper may have been faster.
                return None if self._is_settled(work) else self._train(work)
        except HeldError:
            return None

    def _train(self, work: Work) -> int:
        """Trains a run; returns the exit status. Raises `HeldError` if another sweeper builds a data set of the run."""
        if work.same_as and not self._files.run(work.name).config.is_file():
            self._files.copy(work)
            self._say(f"{work.name}: copied from {work.same_as}, which has the same configuration")
            return 0
        status = self._build(work)
        if status == 0:
            self._say(f"{work.name}: trm {shlex.join(work.command)}")
            status = self._run(work.command)
        if status in INTERRUPTED:
            self._say(f"{work.name}: stopped; the same command continues it")
        elif status or not self._files.is_finished(work.name, work.steps):
            self._failed.add(work.name)
            self._say(f"{work.name}: failed with status {status}")
        return status

    def _build(self, work: Work) -> int:
        """Builds the data sets of a run that this sweeper has not built yet; returns the exit status."""
        for command in work.builds:
            if command not in self._built:
                folder = command[-1].rstrip("/").rpartition("/")[2]
                with sole_writer(self._files.claim(f"data-{folder}")):
                    status = self._run(command)
                if status:
                    return status
                self._built.add(command)
        return 0
