"""Trains PyTorch modules in JAX.

    import train_jax

    config = dataclasses.replace(train_jax.preset("tiny"), run_dir="runs/mine", steps=200)
    figures = train_jax.train(config)
    model = train_jax.load_run("runs/mine")

The functions import JAX and PyTorch when they are called, which `trm --help` does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train_jax.run.config import RunConfig

__all__ = ["load_run", "preset", "train"]


def preset(name: str) -> RunConfig:
    """Returns the configuration of a preset or of an experiment, such as `tiny`, `sudoku9` or `exp01a`.

    Raises `train_jax.errors.UserError` for an unknown name.
    """
    from train_jax.experiments.runs import named_run

    return named_run(name)


def train(config: RunConfig) -> dict[str, Any]:
    """Trains a run, or continues it from its newest checkpoint; returns the metrics of its final evaluation.

    Like `trm train`, on all devices of JAX, but `config.platform` and the compilation cache are left to the caller. A
    finished run returns its metrics at once. Raises `train_jax.errors.UserError` for a configuration or data that
    cannot be trained, before a folder is made.
    """
    from train_jax.loop import train
    from train_jax.runtime.devices import Devices

    return train(config, Devices(runner=config.compute.runner))


def load_run(path: str, step: str | int = "newest") -> Any:
    """Loads the averaged weights of a checkpoint of the run in the folder `path`, for use from Python.

    Returns a `Predictor` for a run of puzzles, a `TextModel` for a language model, and a `Restored` run, whose `apply`
    calls the module, for a task of your own.

    `step`: `newest`, `best` (of a run with `keep_best`), or the step of a checkpoint. Raises
    `train_jax.errors.UserError` if there is no run or no such checkpoint.
    """
    from train_jax.run.restore import restore
    from train_jax.task import commands_of

    run = restore(path, step=step)
    return commands_of(run.config.task).model(run)
