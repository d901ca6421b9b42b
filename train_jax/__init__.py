"""Trains PyTorch modules in JAX.

    import train_jax

    config = dataclasses.replace(train_jax.preset("tiny"), run_dir="runs/mine", steps=200)
    figures = train_jax.train(config)
    model = train_jax.load_run("runs/mine")

The functions import JAX and PyTorch when they are called, which `trm --help` does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train_jax import plugin as _plugin
from train_jax.cli.parts import PARTS as _PARTS
from train_jax.cli.parts import SCRIPT as _SCRIPT
from train_jax.errors import explain_moved_modules as _explain_moved_modules

if TYPE_CHECKING:
    from train_jax.core.objective import LossSums
    from train_jax.plugin import Plugin
    from train_jax.run.config import RunConfig
    from train_jax.script.fit import fit
    from train_jax.task import Task
    from train_jax.trainer.evaluation import evaluate_on

__all__ = ["LossSums", "Plugin", "Task", "evaluate_on", "fit", "load_run", "preset", "train"]

_plugin.use(_PARTS, _SCRIPT)
_explain_moved_modules()

_WHERE = {
    "LossSums": "train_jax.core.objective",
    "Plugin": "train_jax.plugin",
    "fit": "train_jax.script.fit",
    "Task": "train_jax.task",
    "evaluate_on": "train_jax.trainer.evaluation",
}
"""Modules of the public names that are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _plugin.load_object(f"{_WHERE[name]}:{name}", "name")


def preset(name: str) -> RunConfig:
    """Returns the configuration of a preset or of an experiment, such as `tiny`, `sudoku9` or `exp01a`.

    Raises `train_jax.errors.UserError` for an unknown name.
    """
    from train_jax.run.presets import preset

    return preset(name)


def train(config: RunConfig) -> dict[str, Any]:
    """Trains a run, or continues it from its newest checkpoint; returns the metrics of its final evaluation.

    Like `trm train`, on all devices of JAX, but `config.platform` and the compilation cache are left to the caller. A
    finished run returns its metrics at once. Raises `train_jax.errors.UserError` for a configuration or data that
    cannot be trained, before a folder is made.
    """
    from train_jax.runtime.devices import devices_of
    from train_jax.trainer.loop import train

    return train(config, devices_of(config.compute))


def load_run(path: str, step: str | int = "newest") -> Any:
    """Loads the averaged weights of a checkpoint of the run in the folder `path`, for use from Python.

    Returns a `Predictor` for a run of puzzles, a `TextModel` for a language model, and a `Restored` run, whose `apply`
    calls the module, for a task of your own.

    `step`: `newest`, `best` (of a run with `keep_best`), or the step of a checkpoint. Raises
    `train_jax.errors.UserError` if there is no run or no such checkpoint.
    """
    from train_jax.report.commands import commands_of
    from train_jax.run.restore import restore

    run = restore(path, step=step)
    return commands_of(run.config.task).model(run)
