"""The base class of the commands after training, with defaults for any task.

Importing this module imports neither JAX, PyTorch nor NumPy, so that `trm status` and `trm summary` stay fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from train_jax.errors import UserError
from train_jax.plugin import find, load_object
from train_jax.storage.json_files import NUMBER, Kind, find_object
from train_jax.task import task_class

if TYPE_CHECKING:
    from pathlib import Path

    from train_jax.run.folder import RunFolder

Advance = Callable[[int, int], None]
"""Reports progress: done, total."""


@dataclasses.dataclass(frozen=True)
class Console:
    """The console of a command: how it prints lines and shows progress."""

    say: Callable[[str], None]
    progress: Callable[[str], AbstractContextManager[Advance]]
    """Shows the progress of work with a name, as `train_jax.puzzles.terminal.progress` does."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """The metric of an evaluation that `trm status` shows."""

    name: str
    """Name in the metrics of an evaluation, such as exact_accuracy."""
    heading: str
    """The heading of the column in a table, such as `exact`."""
    format: str
    """Format for `str.format`, such as {:.2%}."""


@dataclasses.dataclass(frozen=True)
class ExportCheck:
    """The result of a comparison of the exported weights in PyTorch. `str` is one line about it.

    A task has fields in a subclass.
    """

    @property
    def agrees(self) -> bool:
        raise NotImplementedError

    @property
    def details(self) -> str:
        """Text after that line on the console, such as `; halting logits differ by at most 1e-6`."""
        return ""


class Commands:
    """The commands after training for the runs of a task. The methods import what they need.

    A task of your own has these defaults, or an attribute `commands` of its class with an object of a subclass.
    """

    metric: ClassVar[Metric | None] = None
    figures: ClassVar[Mapping[str, Kind]] = {}
    """Fields that an evaluation of the whole test set has."""
    options: ClassVar[str] = "train_jax.report.evaluate:EvaluateOptions"
    """Subclass of `EvaluateOptions`: the options of `trm evaluate`, and what it does, as `package.module:Class`."""
    check_class: ClassVar[type[ExportCheck]] = ExportCheck
    """Class of the result of `check_export`; its fields are numbers."""
    checks_exports: ClassVar[bool] = False
    """True if the task implements `check_export`."""
    step_check: ClassVar[str] = ""
    """`trm check step` for runs of the task, a function of the arguments as `package.module:function`; by default it
    compares the model with PyTorch."""
    draws_pictures: ClassVar[bool] = False
    """True if the task implements `picture`."""

    def model(self, run: Any) -> Any:
        """Returns the result of `train_jax.load_run` for a `Restored` run."""
        return run

    def summary(self, finished: dict[str, Any], folder: RunFolder, weights: str) -> str:
        """Returns the lines about the figures of a finished run. Imports neither JAX nor PyTorch."""
        return str(finished.get("summary", "finished"))

    def export_check(self, folder: RunFolder) -> ExportCheck | None:
        """Returns the result of `check_export` that `trm export` wrote; None if there is none.

        Raises `UserError` for a damaged file.
        """
        names = [field.name for field in dataclasses.fields(self.check_class)]
        remedy = "write it again with `trm export`"
        fields = find_object(folder.export_check, dict.fromkeys(names, NUMBER), remedy=remedy)
        return None if fields is None else self.check_class(**{name: fields[name] for name in names})

    def check_export(self, run: Any, weights: Path, console: Console) -> ExportCheck:
        """Compares exported weights of a `Restored` run in PyTorch with JAX."""
        raise NotImplementedError

    def write_folder(self, run: Any, folder: Path) -> Iterable[Path]:
        """Writes a `Restored` run as a folder for `from_pretrained`; returns its files."""
        raise UserError(f"runs of task {run.config.task} have no folder for from_pretrained; use --format safetensors")

    def write_program(self, run: Any, output: Path, sizes: Sequence[int]) -> str:
        """Writes a `Restored` run as programs for batches of these sizes; returns a line about them."""
        raise UserError(f"runs of task {run.config.task} have no serving program; use --format safetensors")

    def page(self, files: Any) -> str:
        """Returns the HTML report of `RunFiles`."""
        from train_jax.report.run_page import page

        return page(files)

    def tables(self, files: Any) -> dict[str, tuple[Path, str]]:
        """Returns further files beside the report, by what they are: path and text."""
        return {}

    def decode_program(self, training: Any, rows: int, capacity: int) -> tuple[Any, Any]:
        """Returns the program that writes a token in each of `rows` rows of `capacity` positions, and its arguments.

        Raises ValueError for a model that writes no tokens, or has fewer positions.
        """
        raise ValueError(
            f"{type(training.objective.fn.module).__name__} has no cache of keys and values; use a language model"
        )

    def picture(self, files: Any) -> str:
        """Returns the SVG for a README of `RunFiles`."""
        raise NotImplementedError


def commands_of(task: str) -> Commands:
    """Returns the commands after training for a task: those of its plugin, or its attribute `commands`.

    Raises `UserError` for an unknown task.
    """
    target = find("reports", task)
    if target is not None:
        return load_object(target, "commands")()
    return getattr(task_class(task), "commands", None) or Commands()
