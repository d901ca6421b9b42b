"""The state of sweeps on disk: plans, claims, failures and results, beside the run folders in one root.

ROOT/<group>/<id>/seed-N/       the runs
ROOT/sweep/plans/<hash>.json    the runs of every sweep that was started here
ROOT/sweep/claims/<run>/lock    held by the sweeper that trains the run
ROOT/sweep/failures/<run>.json  the last failure of a run that is not finished
ROOT/batch_results.json         the state and the figures of all planned runs
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from train_jax.errors import UserError
from train_jax.run.files import copy_folder, write_text
from train_jax.run.folder import RunFolder
from train_jax.run.status import RunStatus, read_status
from train_jax.run.storage import path_of

State = Literal["finished", "running", "failed", "stopped", "waiting"]
STATES: tuple[State, ...] = ("finished", "running", "failed", "stopped", "waiting")
ALIVE = ("running", "stalled")


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
                for fields in _read_json(path) or ():
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

    def write_failure(self, name: str, status: int, output: str) -> None:
        failure = {"status": status, "reason": _reason(output), "output": output, "token": secrets.token_hex(8)}
        failure["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_text(self._failure(name), json.dumps(failure, indent=1))

    def failure(self, name: str) -> dict[str, Any] | None:
        return _read_json(self._failure(name))

    def remove_failure(self, name: str) -> None:
        self._failure(name).unlink(missing_ok=True)

    def _failure(self, name: str) -> Path:
        return self._folder / "failures" / f"{name.replace('/', '--')}.json"

    # ---- states

    def is_finished(self, work: Work) -> bool:
        """Whether the run has all its steps."""
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
        if status is not None and status.health in ALIVE:
            return "running", status
        if self.failure(work.name) is not None:
            return "failed", status
        return ("stopped" if status is not None else "waiting"), status

    def write_results(self) -> dict[str, int]:
        """Writes batch_results.json from what is on disk; returns the number of runs in each state."""
        results = [self._result(work) for work in self.planned()]
        counts = Counter(result["state"] for result in results)
        ordered = {state: counts[state] for state in STATES if counts[state]}
        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        content = {"written": written, "counts": ordered, "runs": results}
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
    figures = _read_json(folder.finished)
    return figures if isinstance(figures, dict) and isinstance(figures.get("train_steps"), int | float) else None


def done_elsewhere(path: str) -> set[str]:
    """The finished runs in a results.csv of `trm analyze`, by name. Raises `UserError` if it is not one."""
    try:
        rows = list(csv.DictReader(io.StringIO(path_of(path).read_text())))
        return {f"{row['group']}/{row['experiment']}/seed-{row['seed']}" for row in rows if row["state"] == "finished"}
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise UserError(f"--done {path} cannot be read ({error!r}); give a results.csv of `trm analyze`") from None


def _reason(output: str) -> str:
    """The last line of an error, which `trm` begins with its name."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("trm: ")]
    return (own or lines or ["no output"])[-1].removeprefix("trm: ")


def _json_files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if path.name.endswith(".json"))


def _read_json(path: Path) -> Any:
    """None for a file that is not there, or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
