"""The task of a run whose data set may not be built: its sizes alone."""

from __future__ import annotations

from pathlib import Path

from train_jax.experiments.table import recipes
from train_jax.run.config import RunConfig
from train_jax.task import Task, task_class
from train_jax.tasks.language.instructions.task import UnbuiltInstructions
from train_jax.tasks.language.task import UnbuiltText
from train_jax.tasks.puzzles.task import UnbuiltPuzzles

_UNBUILT = {"language": UnbuiltText, "instructions": UnbuiltInstructions}


def is_built(config: RunConfig) -> bool:
    """Returns whether all data sets of a run exist."""
    return all(Path(folder).exists() for folder in config.data_dir.split(","))


def task_of(config: RunConfig, kind: str = "", puzzle_identifiers: int = 1) -> Task:
    """Returns the task of the run with its data sets, or without them for puzzles and text that are not built.

    `kind` and `puzzle_identifiers` are those of `UnbuiltPuzzles`.
    """
    if config.task in _UNBUILT and not is_built(config):
        return _UNBUILT[config.task](config)
    if config.task != "puzzles" or (is_built(config) and not kind):
        return task_class(config.task)(config)
    return UnbuiltPuzzles(config, kind, puzzle_identifiers, recipes())
