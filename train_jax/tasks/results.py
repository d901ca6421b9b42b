"""What the commands after training do with the runs of a task: the table of tasks, and names of functions.

Importing this module imports neither JAX, PyTorch nor NumPy, so that `trm status` and `trm summary` stay fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from train_jax.plugins import is_plugin, load_plugin

Advance = Callable[[int, int], None]
"""Reports progress: done, total."""
Progress = Callable[[str], AbstractContextManager[Advance]]
"""Shows the progress of work with a name, as `train_jax.report.terminal.progress` does."""


@dataclasses.dataclass(frozen=True)
class Console:
    """Where an evaluation prints."""

    say: Callable[[str], None]
    progress: Progress


@dataclasses.dataclass(frozen=True)
class Metric:
    """The figure of an evaluation that `trm status` shows."""

    name: str
    """As in the metrics of an evaluation: exact_accuracy."""
    heading: str
    """Of a column of a table: exact."""
    format: str
    """With `str.format`: {:.2%}."""


class ExportCheck(Protocol):
    """A dataclass with the result of a comparison of the exported weights in PyTorch. `str` is one line about it."""

    @property
    def agrees(self) -> bool: ...

    @property
    def details(self) -> str:
        """Text after that line on the console, such as `; halting logits differ by at most 1e-6`."""
        ...


@dataclasses.dataclass(frozen=True)
class Results:
    """Functions are `package.module:name`, imported when they are needed.

    A task of your own has the defaults, or an attribute `results` of its class.
    """

    metric: Metric | None = None
    evaluate: str = "train_jax.tasks.evaluate:evaluate"
    """`(options: EvaluateOptions, run: Restored, devices: Devices, console: Console) -> None`, which prints and
    writes results; called on every process."""
    summary: str = "train_jax.tasks.summary:summary"
    """`(finished: dict, folder: RunFolder, weights: str) -> str`: lines about the figures of a finished run. Imports
    neither JAX nor PyTorch."""
    export_check: str = ""
    """The `ExportCheck` dataclass; empty for none."""
    check_export: str = ""
    """`(run: Restored, weights: Path, progress: Progress) -> ExportCheck`; empty for none."""
    page: str = "train_jax.report.run_page:page"
    """`(files: RunFiles) -> str`, the HTML report."""
    picture: str = ""
    """`(files: RunFiles) -> str`, the SVG for a README; empty for none."""


RESULTS: Mapping[str, Results] = {
    "puzzles": Results(
        metric=Metric("exact_accuracy", "exact", "{:.2%}"),
        evaluate="train_jax.tasks.puzzles.evaluate:evaluate",
        summary="train_jax.tasks.puzzles.summary:summary",
        export_check="train_jax.tasks.puzzles.agreement:ExportCheck",
        check_export="train_jax.tasks.puzzles.export_check:check_export",
        page="train_jax.report.page:page_of",
        picture="train_jax.report.picture:picture_of",
    ),
    "language": Results(
        metric=Metric("bits_per_byte", "bits/byte", "{:.4f}"),
        evaluate="train_jax.tasks.language.evaluate:evaluate",
        summary="train_jax.tasks.language.summary:summary",
        export_check="train_jax.tasks.language.agreement:ExportCheck",
        check_export="train_jax.tasks.language.export_check:check_export",
        page="train_jax.report.language_page:page",
    ),
}
"""By the name of the task."""


def results_of(task: str) -> Results:
    """Returns the entry of a task, which is the default one for a task of your own without an attribute `results`."""
    if task in RESULTS or not is_plugin(task):
        return RESULTS.get(task, Results())
    from train_jax.tasks.task import task_class  # imports NumPy, which `trm status` does not need

    return getattr(task_class(task), "results", Results())


def metric_of(task: str) -> Metric | None:
    """Returns the metric of a task in the table, without importing a task of your own."""
    return RESULTS[task].metric if task in RESULTS else None


def load(function: str) -> Any:
    """Imports a function or class that a `Results` names."""
    return load_plugin(function, "result")
