"""The files of a run, and the report of a run of any task, which the reports of puzzles and language models extend."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from train_jax.errors import UserError
from train_jax.report.commands import ExportCheck, commands_of
from train_jax.report.plots import Series, plot
from train_jax.report.render import percent, render_document, spelled
from train_jax.run.config import RunConfig
from train_jax.run.events import Goodput, read_goodput
from train_jax.run.folder import RunFolder, read_finished, read_run
from train_jax.run.tracking import read_metrics
from train_jax.storage.json_files import COUNT, NUMBER, OBJECT, Kind, find_object, object_of, optional

SIZED_BY_DATA = {"batch_size", "seq_len", "vocab_size", "num_puzzle_identifiers"}
"""Fields of an architecture that the data set and the devices determine; their values in config.json are not used."""

_RATE = re.compile(r"train/lr(/\w+)?")


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric that is plotted against steps."""

    title: str
    key: str
    """Name of the metric in `metrics.jsonl`, without `train/` and `eval/`."""
    scale: float = 1
    y_range: tuple[float, float] | None = None
    """Range of the y axis; None makes the axis logarithmic."""


def page(files: RunFiles) -> str:
    """Renders the report of a run of a user's task: curves of all metrics that were evaluated."""
    return render_run("run_report.html.j2", files, curves_of_evaluations(files))


def curves_of_evaluations(files: RunFiles) -> list[Curve]:
    """Returns curves of all metrics that were evaluated."""
    names = dict.fromkeys(n.removeprefix("eval/") for r in files.records for n in r if n.startswith("eval/"))
    return [Curve(name.replace("_", " "), name) for name in names if name != "count"]


def render_run(template: str, files: RunFiles, curves: Sequence[Curve], **values: Any) -> str:
    """Renders a template that extends that of all runs; `values` are for its sections, or replace common ones."""
    common = {
        "title": files.title,
        "goodput": goodput_rows(files),
        "measured": files,
        "config": files.config,
        "facts": {n: v for n, v in (files.machine or {}).items() if n not in ("versions", "parameters")},
        "curves": learning(files, curves),
        "groups": configuration(files.config),
        "unit": "examples",
        "unit_size": 1,
        "parameters_note": "",
    }
    return render_document(template, **(common | values))


def learning(files: RunFiles, curves: Sequence[Curve]) -> list[Markup]:
    """Plots training and evaluation metrics, learning rate and gradient norm against steps."""
    plots = []
    for curve in curves:
        training, held_out = (
            [(x, y * curve.scale) for x, y in files.curve(f"{split}/{curve.key}")] for split in ("train", "eval")
        )
        series = [Series("training", training), Series(f"held out, {files.weights}", held_out, 2, marks=True)]
        log_y = curve.y_range is None
        plots.append(plot(series, title=curve.title, x_label="steps", y_range=curve.y_range, log_y=log_y))
    rates = dict.fromkeys(name for record in files.records for name in record if _RATE.fullmatch(name))
    others = [(_rate_title(name, files.config), name, False) for name in rates]
    for title, key, log_y in (*others, ("gradient norm", "train/grad_norm", True)):
        plots.append(plot([Series("", files.curve(key))], title=title, x_label="steps", log_y=log_y))
    return [each for each in plots if each]


def _rate_title(name: str, config: RunConfig) -> str:
    """Returns the title of the plot of a learning rate, with the pattern of its parameter group."""
    group = name.removeprefix("train/lr").removeprefix("/")
    number = group.removeprefix("group_")
    if number.isdecimal() and int(number) < len(config.optim.groups):
        group = config.optim.groups[int(number)].pattern
    return f"learning rate, {group if len(group) <= 40 else group[:39] + '…'}" if group else "learning rate"


def goodput_rows(files: RunFiles) -> list[tuple[str, str, str]]:
    """Returns the rows of the wall time by part, largest first."""
    goodput = files.goodput
    if goodput is None or goodput.wall_seconds <= 0:
        return []
    parts = sorted(goodput.seconds.items(), key=lambda part: -part[1])
    return [(name, spelled(seconds), percent(seconds / goodput.wall_seconds)) for name, seconds in parts]


def configuration(config: RunConfig, sized_by_data: set[str] = SIZED_BY_DATA) -> dict[str, dict[str, Any]]:
    """Returns the fields by group, without those of the architecture that the data determine."""
    fields = dataclasses.asdict(config)
    groups = {"run": {name: value for name, value in fields.items() if not isinstance(value, dict)}}
    groups |= {name: value for name, value in fields.items() if isinstance(value, dict)}
    groups["arch"] = {name: value for name, value in groups["arch"].items() if name not in sized_by_data}
    return groups


# ---- files

FIGURE = Kind("a number", lambda value: NUMBER.fits(value) or object_of(NUMBER).fits(value))
"""A figure of an evaluation, or several by name, as of compressors."""
MACHINE = {"parameters": optional(COUNT), "versions": optional(OBJECT)}
EVALUATE = "remove it and run `trm evaluate` to write it again"


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The data that the report of any task may show."""

    folder: RunFolder
    config: RunConfig
    records: list[dict[str, float]]
    test: dict[str, Any] | None
    """Figures of the last evaluation on the whole test set."""
    finished: dict[str, Any] | None
    export_check: ExportCheck | None
    machine: dict[str, Any] | None
    goodput: Goodput | None
    """The parts of the wall time; None for runs of older versions."""
    price_per_hour: float = 0.0
    """The price of the machines; 0 if costs are not shown."""

    @property
    def title(self) -> str:
        return " ".join([self.folder.path.resolve().name, self.folder.weights_of]).strip()

    def curve(self, name: str, over: str = "step") -> list[tuple[float, float]]:
        return [(r[over], r[name]) for r in self.records if name in r and over in r]

    @property
    def train_seconds(self) -> float | None:
        seconds = [r["train_seconds"] for r in self.records if "train_seconds" in r]
        return (self.finished or {}).get("train_seconds", seconds[-1] if seconds else None)

    @property
    def steps(self) -> int:
        """The last recorded optimizer step."""
        return int((self.finished or {}).get("train_steps", max((r["step"] for r in self.records), default=0)))

    @property
    def examples_per_second(self) -> float | None:
        """The median over the records of metrics."""
        seconds = [r["step_seconds"] for r in self.records if r.get("step_seconds", 0) > 0]
        return self.config.global_batch_size / statistics.median(seconds) if seconds else None

    @property
    def weights(self) -> str:
        """The name of the weights that are evaluated."""
        return "EMA weights" if self.config.optim.ema_decay else "raw weights"

    def held_out_by(self, metric: str) -> dict[str, Any]:
        """Returns the figures of the final evaluation, or of the last one during training with `metric`."""
        if self.test is not None:
            return self.test
        during = [r for r in self.records if f"eval/{metric}" in r]
        return {name.removeprefix("eval/"): value for name, value in during[-1].items()} if during else {}


def read_run_files(run_dir: str, step: str = "newest") -> RunFiles:
    """Reads a run with the results of a checkpoint: `newest`, `best`, or its step.

    Raises `UserError` if it does not exist, has no metrics yet, or if the chosen checkpoint has not been evaluated.
    """
    folder, config = read_run(run_dir, needs_script=False)
    if step != "newest":
        from train_jax.run.restore import results_folder  # imports JAX, which a report needs only for this

        folder = results_folder(run_dir, step)
    commands = commands_of(config.task)
    records = read_metrics(folder)
    test = find_object(folder.evaluation("test"), commands.figures, others=FIGURE, remedy=EVALUATE)
    if not records and test is None:
        raise UserError(f"{run_dir} has no metrics yet; train it with `trm train`, or wait for the first metrics")
    if test is None and folder.weights_of:
        raise UserError(f"{folder.evaluation('test')} is missing; run `trm evaluate {run_dir} --step {step}` first")
    return RunFiles(
        folder=folder,
        config=config,
        records=records,
        test=test,
        finished=read_finished(folder) if folder.finished.exists() else None,
        export_check=commands.export_check(folder),
        machine=find_object(folder.machine, MACHINE, remedy="remove it"),
        goodput=read_goodput(folder),
    )
