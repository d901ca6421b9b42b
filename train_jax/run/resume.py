"""Decides whether a run starts, continues or is finished, and with which fields it may continue."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train_jax.errors import UserError
from train_jax.run.config import RunConfig, differences_of_fields, read_config, to_json
from train_jax.run.folder import RunFolder, complete_steps, read_finished, read_id
from train_jax.runtime.processes import of_main_process
from train_jax.storage import lease
from train_jax.storage.files import append_text, write_text
from train_jax.storage.storage import absolute, path_of

OPERATIONAL = {
    "run_dir", "data_dir", "resume", "eval_every_steps", "eval_batch_size", "eval_examples", "checkpoint_every_steps",
    "checkpoint_every_minutes", "keep_checkpoints", "keep_every_steps", "keep_best", "log_every_steps", "wandb",
    "wandb_project", "wandb_group", "wandb_name", "profile", "profile_skip", "profile_server", "debug_nans",
    "deterministic", "optim.max_skipped_steps", "compute.", "platform", "task_config.sample_every_steps",
    "task_config.workers",
}  # fmt: skip
"""Fields that do not change what is learned, so that a run continues with other values; a name with a dot at its end
stands for all fields of that part. `data_dir` is among them because the data are compared by their content. All other
fields identify the run, except that `steps` and `epochs` may grow."""
LENGTH = ("steps", "epochs")


@dataclasses.dataclass(frozen=True)
class Start:
    """The state of the run's folder as read by the first process; the same on every process."""

    finished: dict[str, Any] | None
    """The figures of a run that has nothing left to do."""
    continues: bool
    """True if there is a checkpoint."""


def decide_start(config: RunConfig, total_steps: int, fingerprint: str) -> Start:
    """Reads the run's folder in the first process, for all processes. Collective. Writes nothing.

    `fingerprint`: of the data. Raises `UserError` where `config.resume` forbids to continue or to start, for a run with
    other fields, and for a finished run on other data.
    """

    def read() -> dict[str, Any]:
        folder = RunFolder(path_of(config.run_dir))
        if not config.run_dir.strip():
            raise UserError("--run-dir is empty; give the folder of the run, such as runs/mine")
        _check_folder(folder.path)
        changed_fields(folder, config)
        continues = bool(complete_steps(folder.checkpoints))
        finished = None
        if folder.finished.exists():
            figures = read_finished(folder)
            finished = figures if figures["train_steps"] >= total_steps else None
        if finished is not None:
            check_data(config, figures.pop("data", fingerprint), fingerprint, int(figures["train_steps"]))
        if config.resume == "never" and folder.config.exists():
            raise UserError(
                f"resume is never and {folder.path} holds a run already; use another --run-dir, or --resume auto"
            )
        if config.resume == "must" and not continues:
            raise UserError(f"resume is must and {folder.path} has no checkpoint; use --resume auto to start a run")
        return {"finished": finished, "continues": continues}

    return Start(**of_main_process(read))


def check_data(
    config: RunConfig, trained_on: str, given: str, step: int, remedy: str = "or use another --run-dir"
) -> None:
    """Raises `UserError` if a run meets other data than it was trained on; both are fingerprints of a task.

    Where a task has added to its fingerprint, that of an earlier version is its beginning.
    """
    if not given.startswith(trained_on):
        raise UserError(
            f"{config.data_dir} holds other data than the run was trained on up to step {step}; give --data-dir the "
            f"same data set, {remedy}"
        )


def _check_folder(path: Path) -> None:
    """Raises `UserError` if the path is a file or a data set, or has a name that Orbax cannot write."""
    try:
        absolute(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"--run-dir {absolute(path)!r} is not UTF-8; use another folder") from None
    if path.is_file():
        raise UserError(f"--run-dir {path} is a file; give a folder for the run, such as runs/mine")
    if any((path / name).is_file() for name in ("recipe.json", "train/dataset.json")):
        raise UserError(f"--run-dir {path} is a data set; give a folder of its own for the run, such as runs/mine")


def open_run(config: RunConfig, *, writes: bool = True) -> RunFolder:
    """Returns the run's folder with its config.json; a run that is started again with the same fields continues.

    `writes`: only one of several processes writes, and makes the random id of a new run. Other values of operational
    fields are recorded in changes.jsonl.
    Raises `UserError` if the folder holds a run with other fields, `StorageError` if it cannot be written.
    """
    folder = RunFolder(path_of(config.run_dir))
    changes = changed_fields(folder, config)
    if not writes:
        return folder
    run_id = read_id(folder) or secrets.token_hex(8)
    text = to_json(config, run_id)
    if not folder.config.exists() or folder.config.read_bytes() != text.encode():
        write_text(folder.config, text)
        if changes:
            record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "fields": changes}
            append_text(folder.changes, json.dumps(record) + "\n")
    return dataclasses.replace(folder, run_id=run_id)


def changed_fields(folder: RunFolder, config: RunConfig) -> dict[str, list[Any]]:
    """Returns the operational fields that differ from those of the run in the folder, by name: [there, requested].

    Raises `UserError` if a field differs that identifies the run.
    """
    if not folder.config.exists():
        return {}
    before = read_config(folder.config)
    changes = dict(differences_of_fields(dataclasses.asdict(before), dataclasses.asdict(config)))
    if before.model != config.model:  # fields of different architectures cannot be compared
        changes = {name: values for name, values in changes.items() if not name.startswith("arch.")}
    refused = [name for name, (there, now) in changes.items() if not _may_change(name, there, now)]
    if refused:
        shown = [f"{name.removeprefix('task_config.')} {changes[name][0]} there, {changes[name][1]} requested"
                 for name in refused]  # fmt: skip
        raise UserError(
            f"{folder.path} holds a run with other fields ({'; '.join(shown)}); use another --run-dir, or remove it"
        )
    return changes


def _may_change(name: str, there: Any, now: Any) -> bool:
    if name in LENGTH:
        return now > there > 0
    return name in OPERATIONAL or f"{name.split('.')[0]}." in OPERATIONAL


@contextlib.contextmanager
def sole_writer(run_dir: str) -> Iterator[None]:
    """Makes the run's folder and holds its lock or lease while the block runs.

    Raises `UserError` if another process holds it, `StorageError` for a folder that cannot be written.
    """
    with lease.sole_writer(path_of(run_dir)):
        yield
