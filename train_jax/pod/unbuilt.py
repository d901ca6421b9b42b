"""The task of a run whose data set may not be built: its sizes alone."""

from __future__ import annotations

from train_jax.experiments.table import recipes
from train_jax.run.config import RunConfig
from train_jax.run.storage import path_of
from train_jax.task import Task, task_class
from train_jax.tasks.language.instructions.task import UnbuiltInstructions
from train_jax.tasks.language.task import UnbuiltText
from train_jax.tasks.puzzles.task import UnbuiltPuzzles

_UNBUILT = {"language": UnbuiltText, "instructions": UnbuiltInstructions}


def lacks_data(config: RunConfig) -> bool:
    """Returns whether a data set of a run is not built, for tasks whose sizes are known without it."""
    folders = config.data_dir.split(",")
    return config.task in ("puzzles", *_UNBUILT) and not all(path_of(folder).exists() for folder in folders)


def task_of(config: RunConfig, kind: str = "", puzzle_identifiers: int = 1) -> Task:
    """Returns the task of the run, without its data sets where these are not built or a `kind` of puzzles is given.

    `kind` and `puzzle_identifiers` are those of `UnbuiltPuzzles`.
    """
    lacking = lacks_data(config)
    if config.task == "puzzles" and (lacking or kind):
        return UnbuiltPuzzles(config, kind, puzzle_identifiers, recipes())
    return _UNBUILT[config.task](config) if lacking else task_class(config.task)(config)
