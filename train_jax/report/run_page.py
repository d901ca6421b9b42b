"""The report of a run of any task, and the parts that the reports of all tasks have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from train_jax.report.figures import percent, spelled
from train_jax.report.plots import Series, plot
from train_jax.report.render import render_document
from train_jax.report.run_files import RunFiles
from train_jax.run.config import RunConfig

SIZED_BY_DATA = {"batch_size", "seq_len", "vocab_size", "num_puzzle_identifiers"}
"""Fields of an architecture that the data set and the devices determine; their values in config.json are not used."""

_RATE = re.compile(r"train/lr(/\w+)?")


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric that is plotted against steps and against time."""

    title: str
    key: str
    """As in `metrics.jsonl`, without `train/` and `eval/`."""
    scale: float = 1
    y_range: tuple[float, float] | None = None
    """The y axis is logarithmic without one."""


def page(files: RunFiles) -> str:
    """Renders the report of a run of a task of the user: curves of all metrics that were evaluated."""
    names = dict.fromkeys(n.removeprefix("eval/") for r in files.records for n in r if n.startswith("eval/"))
    curves = [Curve(name.replace("_", " "), name) for name in names if name != "count"]
    return render_document(
        "run_report.html.j2",
        **run_values(files),
        curves=learning(files, curves),
        groups=configuration(files.config),
        unit="examples",
        unit_size=1,
    )


def run_values(files: RunFiles) -> dict[str, Any]:
    """Returns the values that the templates of all reports need."""
    return {
        "title": files.title,
        "goodput": goodput_rows(files),
        "measured": files,
        "config": files.config,
        "facts": {n: v for n, v in (files.machine or {}).items() if n not in ("versions", "parameters")},
    }


def learning(files: RunFiles, curves: Sequence[Curve]) -> list[Markup]:
    """Plots training and evaluation metrics against steps and against time; learning rate and gradient norm."""
    longest = files.train_seconds or 0
    units = (("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, seconds = next(each for each in units if longest >= 3 * each[1] or each[1] == 1)
    plots = []
    for curve in curves:
        for over, x_label, x_unit in (("step", "steps", 1), ("train_seconds", f"{unit} of training", seconds)):
            training, held_out = (
                [(x / x_unit, y * curve.scale) for x, y in files.curve(f"{split}/{curve.key}", over)]
                for split in ("train", "eval")
            )
            series = [Series("training", training), Series(f"held out, {files.weights}", held_out, 2, marks=True)]
            log_y = curve.y_range is None
            plots.append(plot(series, title=curve.title, x_label=x_label, y_range=curve.y_range, log_y=log_y))
    rates = dict.fromkeys(name for record in files.records for name in record if _RATE.fullmatch(name))
    others = [(_rate_title(name, files.config), name, False) for name in rates]
    for title, key, log_y in (*others, ("gradient norm", "train/grad_norm", True)):
        plots.append(plot([Series("", files.curve(key))], title=title, x_label="steps", log_y=log_y))
    return [each for each in plots if each]


def _rate_title(name: str, config: RunConfig) -> str:
    """The title of the plot of a learning rate: that of a parameter group has its pattern."""
    group = name.removeprefix("train/lr").removeprefix("/")
    number = group.removeprefix("group_")
    if number.isdecimal() and int(number) < len(config.optim.groups):
        group = config.optim.groups[int(number)].pattern
    return f"learning rate, {group if len(group) <= 40 else group[:39] + '…'}" if group else "learning rate"


def goodput_rows(files: RunFiles) -> list[tuple[str, str, str]]:
    """Rows of the wall time by part, largest first."""
    goodput = files.goodput
    if goodput is None or goodput.wall_seconds <= 0:
        return []
    parts = sorted(goodput.seconds.items(), key=lambda part: -part[1])
    return [(name, spelled(seconds), percent(seconds / goodput.wall_seconds)) for name, seconds in parts]


def configuration(config: RunConfig, sized_by_data: set[str] | None = None) -> dict[str, dict[str, Any]]:
    """Returns the fields by group, without those of the architecture that the data determine."""
    fields = dataclasses.asdict(config)
    groups = {"run": {name: value for name, value in fields.items() if not isinstance(value, dict)}}
    groups |= {name: value for name, value in fields.items() if isinstance(value, dict)}
    omitted = SIZED_BY_DATA if sized_by_data is None else sized_by_data
    groups["arch"] = {name: value for name, value in groups["arch"].items() if name not in omitted}
    return groups
