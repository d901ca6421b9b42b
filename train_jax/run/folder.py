"""A run on disk or in storage: the one place that knows the names of its files."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from train_jax.errors import UserError
from train_jax.storage.files import write_bytes, write_text
from train_jax.storage.json_files import COUNT, FINITE, TEXT, Kind, find_object, optional, read_object, record_of
from train_jax.storage.storage import RemotePath, path_of

if TYPE_CHECKING:  # importing it would import torch, which `trm summary` does not need
    from train_jax.run.config import RunConfig

__all__ = ["RunFolder", "find_run", "read_run", "write_bytes", "write_text"]


PROFILED_STEP = "train"
"""The name, in the trace of a profile, of the span around the dispatch of a step."""
PROFILED_PROGRAM = "train-step.txt.gz"
"""Name of the compiled train step in the folder of a profile, which maps each operation of the trace to its module."""
RUN_ID = "run_id"
"""Key of the run's random id in config.json; it is no field of the configuration."""
COMPLETE = "commit_success.txt"
"""The last object of a checkpoint in storage."""
RESTORE = "restore the file, or remove the run"
"""What to do about a damaged file that nothing but training writes."""


class _File:
    """The path of a file of a run; with `results`, of the checkpoint whose results are requested."""

    def __init__(self, *parts: str, results: bool = False):
        self._parts = parts
        self._results = results

    def __get__(self, folder: RunFolder, _: type) -> Path:
        return (folder.results if self._results else folder.path).joinpath(*self._parts)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path
    """Path of the folder, from `path_of`; it may be `gs://…`."""
    weights_of: str = ""
    """The checkpoint whose results are requested, such as `at-step-20`; empty for the newest one."""
    run_id: str = ""
    """The random id of the run, which its checkpoints name; empty if it is not known, or of an earlier version."""

    config = _File("config.json")
    changes = _File("changes.jsonl")
    """One line for each continuation of the run with other values of fields that may change."""
    lock = _File("lock")
    """Lock that is held by the process that writes the run's files."""
    data = _File("dataset.json")
    """`Task.facts`: the metadata that the model depends on, so that it can be built without the data."""
    machine = _File("machine.json")
    """Devices, software versions and model size of the run."""
    metrics = _File("metrics.jsonl")
    events = _File("events.jsonl")
    """The parts of the wall time of the run, one line for each event of each session."""
    heartbeat = _File("heartbeat.json")
    """The wall time since the last event, written every second while the run trains."""
    wandb_id = _File("wandb_id")
    checkpoints = _File("checkpoints")
    finished = _File("FINISHED")
    """Mark of a finished run, written after the final evaluation, with its metrics."""
    weights = _File("weights.safetensors", results=True)
    report = _File("report", "index.html", results=True)
    export_check = _File("evaluation", "export_check.json", results=True)
    samples = _File("evaluation", "samples.json", results=True)
    """Texts that a language model wrote at the end of the run or in `trm evaluate`."""

    @property
    def results(self) -> Path:
        return self.path / self.weights_of if self.weights_of else self.path

    def host_log(self, process: int) -> Path:
        """Returns the path of the log with everything that a process printed."""
        return self.path / "logs" / f"host-{process:02}.log"

    def profile(self, process: int) -> Path:
        """Returns the path of the folder with the profile of a process by `--profile`."""
        return self.path / "profile" / f"host-{process:02}"

    def samples_at(self, step: int) -> Path:
        """Returns the path of the texts that a language model wrote during training."""
        return self.path / "samples" / f"{step}.json"

    def evaluation(self, name: str) -> Path:
        """Returns the path of the metrics of a split, or of an evaluation with a name."""
        return self.results / "evaluation" / f"{name}.json"

    def write_metrics(self, name: str, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a split, or of an evaluation with a name."""
        write_text(self.evaluation(name), json.dumps(metrics, indent=1))

    def predictions(self, split: str) -> Path:
        return self.results / "evaluation" / f"{split}_predictions.npz"

    def halting_curve(self, split: str) -> Path:
        """Returns the path of the halting curve of an evaluation that ran to the halt limit."""
        return self.evaluation(f"{split}_halting_curve")

    def halted_early(self, split: str) -> Path:
        """Returns the path of the metrics of the last evaluation with early halting."""
        return self.evaluation(f"{split}_halted_early")

    def view_example(self, split: str) -> Path:
        """Returns the path of the puzzle that the report shows in several views."""
        return self.evaluation(f"{split}_views").with_suffix(".npz")

    def trajectories(self, split: str) -> Path:
        """Returns the path of the results of the last evaluation with several trajectories."""
        return self.evaluation(f"{split}_trajectories")


def complete_steps(checkpoints: Path) -> list[int]:
    """Returns the steps of the complete checkpoints, newest last. Raises `StorageError` if they cannot be listed.

    On a disk, the name of a folder is no number until it is complete. Orbax treats an object that it cannot reach as
    absent; a run would then start from the beginning.
    """
    if isinstance(checkpoints, RemotePath):
        names = (name.partition("/") for name in checkpoints.files())
        return sorted(int(step) for step, _, name in names if name == COMPLETE and step.isdecimal())
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted(int(path.name) for path in folders if path.name.isdecimal() and path.is_dir())


def find_run(run_dir: str) -> RunFolder:
    """Returns the folder of an existing run. Raises `UserError` if there is none, and names those below it."""
    folder = RunFolder(path_of(run_dir))
    if folder.config.is_file():
        return folder
    below: list[str] = []
    with contextlib.suppress(OSError):  # a folder that may not be listed
        below += [str(run.path) for run in itertools.islice(runs_below(folder.path), _RUNS_NAMED + 1)]
    if below:
        named = " or ".join(below[:_RUNS_NAMED]) + (" or …" if len(below) > _RUNS_NAMED else "")
        raise UserError(f"{run_dir} is a folder of runs; give one of them, such as {named}")
    raise UserError(
        f"no run at {run_dir} ({folder.config} is missing); train one with `trm train PRESET --run-dir {run_dir}`"
    )


_RUNS_NAMED = 3
"""Runs that the message about a folder of runs names."""


def runs_below(folder: Path, depth: int = 3) -> Iterator[RunFolder]:
    """Yields the run in a folder, otherwise those below it, as in the ROOT/GROUP/ID/seed-N of a sweep."""
    if (run := RunFolder(folder)).config.is_file():
        yield run
    elif depth and folder.is_dir():
        for each in sorted(folder.iterdir()):
            yield from runs_below(each, depth - 1)


_SUMMARY = {
    "task": optional(TEXT), "steps": COUNT, "global_batch_size": COUNT, "optim": record_of({"ema_decay": FINITE}),
}  # fmt: skip


def read_fields(folder: RunFolder) -> dict[str, Any]:
    """Returns `task`, `steps`, `global_batch_size` and `ema_decay` of config.json, without importing torch.

    Raises `UserError` if the file is damaged.
    """
    config = read_object(folder.config, _SUMMARY, remedy=RESTORE)
    fields = {name: config[name] for name in ("steps", "global_batch_size")}
    return fields | {"task": config.get("task", "puzzles"), "ema_decay": config["optim"]["ema_decay"]}


def read_finished(folder: RunFolder, figures: Mapping[str, Kind] = MappingProxyType({})) -> dict[str, Any]:
    """Returns the figures of a finished run, with those of its task. Raises `UserError` if FINISHED is damaged."""
    fields = {
        "train_steps": COUNT,
        "train_seconds": FINITE,
        "summary": optional(TEXT),
        "data": optional(TEXT),
        **figures,
    }
    remedy = "remove it, and the run makes it again from its checkpoint"
    return read_object(folder.finished, fields, remedy=remedy)


def is_run(where: str) -> bool:
    """Returns whether a path is a run folder, not a file of weights."""
    return (path_of(where) / "config.json").is_file()


def read_run(run_dir: str, *, needs_script: bool = True) -> tuple[RunFolder, RunConfig]:
    """Returns the folder of an existing run and its configuration. Raises `UserError` if there is none.

    `needs_script`: as for `read_config`.
    """
    from train_jax.run.config import read_config

    folder = find_run(run_dir)
    config = dataclasses.replace(read_config(folder.config, needs_script=needs_script), run_dir=str(run_dir))
    return dataclasses.replace(folder, run_id=read_id(folder)), config


def read_id(folder: RunFolder) -> str:
    """Returns the id in config.json; empty if there is no file, or it is of an earlier version."""
    config = find_object(folder.config, {RUN_ID: optional(TEXT)}, remedy="use a run folder that `trm train` wrote")
    return (config or {}).get(RUN_ID, "")
