"""The task of a run whose data set may not be built: its sizes alone."""

from __future__ import annotations

from train_jax.run.config import RunConfig
from train_jax.storage.storage import path_of
from train_jax.task import Task, task_class


def task_of(config: RunConfig, kind: str = "", puzzle_identifiers: int = 1) -> Task:
    """Returns the task of the run, without its data sets where these are not built or a `kind` of puzzles is given.

    `kind` and `puzzle_identifiers` are those of `Task.unbuilt`.
    """
    task = _unbuilt(config, kind, puzzle_identifiers) if _lacks_folder(config) or kind else None
    return task_class(config.task)(config) if task is None else task


def lacks_data(config: RunConfig) -> bool:
    """Returns whether a data set of a run is not built, for tasks whose sizes are known without it."""
    return _lacks_folder(config) and _unbuilt(config) is not None


def _unbuilt(config: RunConfig, kind: str = "", puzzle_identifiers: int = 1) -> Task | None:
    make = getattr(task_class(config.task), "unbuilt", None)
    return None if make is None else make(config, kind, puzzle_identifiers)


def _lacks_folder(config: RunConfig) -> bool:
    return not all(path_of(folder).exists() for folder in config.data_dir.split(","))
