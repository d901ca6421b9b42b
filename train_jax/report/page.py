"""The report of a run: one self-contained HTML file, generated from the files of the run."""

from __future__ import annotations

import dataclasses
from typing import Any

from markupsafe import Markup

from train_jax.report import measured as read
from train_jax.report.boards import strip
from train_jax.report.failure_section import failure_section
from train_jax.report.figures import percent, spelled
from train_jax.report.halting_section import halting_section
from train_jax.report.measured import ActSteps, Answers, Measured, by_act_step
from train_jax.report.plots import Series, plot
from train_jax.report.render import render_document
from train_jax.report.trajectory_section import trajectory_section
from train_jax.tasks.puzzles.agreement import AGREEING_SHARE
from train_jax.tasks.puzzles.kinds import kind_of

SIZED_BY_DATA = {"batch_size", "seq_len", "vocab_size", "num_puzzle_identifiers"}
"""Fields of an architecture that the data set and the devices determine; their values in config.json are not used."""


def page(measured: Measured) -> str:
    """Renders the whole document."""
    answers, missing, steps = measured.answers, measured.answers_missing, None
    act_steps = None if answers is None else by_act_step(answers)
    if answers is not None and act_steps is not None:
        missing = f"for a test set of this size, only the answers after ACT step {answers.first_step} are kept"
        steps = _act_steps(answers, act_steps) if answers.first_step == 1 else None
    check = measured.export_check
    return render_document(
        "report.html.j2",
        title=" ".join([measured.folder.path.resolve().name, measured.folder.weights_of]).strip(),
        goodput=_goodput(measured),
        measured=measured,
        config=measured.config,
        curves=_learning(measured),
        steps=steps,
        steps_missing=missing,
        halting=halting_section(measured),
        trajectories=trajectory_section(measured),
        failures=act_steps and answers and failure_section(answers, act_steps),
        check=check,
        agrees=check is not None and check["agree"] >= AGREEING_SHARE * check["puzzles"],
        facts={n: v for n, v in (measured.machine or {}).items() if n not in ("versions", "parameters")},
        groups=_configuration(measured),
    )


def _learning(measured: Measured) -> list[Markup]:
    """Plots training and evaluation metrics against steps and against time."""
    longest = measured.train_seconds or 0
    units = (("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, seconds = next(each for each in units if longest >= 3 * each[1] or each[1] == 1)
    curves = []
    for title, key, scale, y_range in (
        ("exact accuracy, %", "exact_accuracy", 100, (0, 100)),
        ("loss per token", "lm_loss", 1, None),
    ):
        for over, x_label, x_unit in (("step", "steps", 1), ("train_seconds", f"{unit} of training", seconds)):
            training, held_out = (
                [(x / x_unit, y * scale) for x, y in measured.curve(f"{split}/{key}", over)]
                for split in ("train", "eval")
            )
            series = [Series("training", training), Series(f"held out, {measured.weights}", held_out, 2, marks=True)]
            curves.append(plot(series, title=title, x_label=x_label, y_range=y_range, log_y=y_range is None))
    for title, key, log_y in (("learning rate", "train/lr", False), ("gradient norm", "train/grad_norm", True)):
        curves.append(plot([Series("", measured.curve(key))], title=title, x_label="steps", log_y=log_y))
    return [curve for curve in curves if curve]


def _act_steps(answers: Answers, act_steps: ActSteps) -> dict[str, Any]:
    exact, token = (
        Series(name, list(enumerate((100 * values).tolist(), 1)), colour, marks=True)
        for name, values, colour in (("exact", act_steps.exact_accuracy, 1), ("token", act_steps.token_accuracy, 2))
    )
    columns = zip(act_steps.exact_accuracy, act_steps.token_accuracy, act_steps.halting, strict=True)
    return {
        "plot": plot([exact, token], title="accuracy on held-out puzzles, %", x_label="ACT steps"),
        "rows": [(step, *map(percent, row)) for step, row in enumerate(columns, 1)],
        "examples": _examples(answers, act_steps),
    }


def _examples(answers: Answers, act_steps: ActSteps) -> list[dict[str, Any]]:
    """Returns a solved and an unsolved puzzle with their grids after every ACT step."""
    if kind_of(answers.data) is None:
        return []
    stayed = int(read.stayed_solved(act_steps.solved).sum())
    solved = (
        f"The puzzle that took most ACT steps among the {stayed:,} that stayed solved."
        if stayed
        else "The puzzle that was solved last; no puzzle stayed solved after it was solved for the first time."
    )
    unsolved = "The first puzzle of the test set that is not solved after the last ACT step."
    examples = (
        ("A puzzle solved", read.slowest_solved(act_steps.solved), solved),
        ("A puzzle not solved", read.first_unsolved(answers, act_steps.solved), unsolved),
    )
    return [
        {"title": title, "number": number, "why": why, "kind": trace.kind, "strip": strip(trace)}
        for title, number, why in examples
        if number is not None and (trace := answers.trace(number))
    ]


def _goodput(measured: Measured) -> list[tuple[str, str, str]]:
    """Rows of the wall time by part, largest first."""
    goodput = measured.goodput
    if goodput is None or goodput.wall_seconds <= 0:
        return []
    parts = sorted(goodput.seconds.items(), key=lambda part: -part[1])
    return [(name, spelled(seconds), percent(seconds / goodput.wall_seconds)) for name, seconds in parts]


def _configuration(measured: Measured) -> dict[str, dict[str, Any]]:
    fields = dataclasses.asdict(measured.config)
    groups = {"run": {name: value for name, value in fields.items() if not isinstance(value, dict)}}
    groups |= {name: value for name, value in fields.items() if isinstance(value, dict)}
    groups["arch"] = {name: value for name, value in groups["arch"].items() if name not in SIZED_BY_DATA}
    if measured.answers is not None:
        groups["test set"] = dataclasses.asdict(measured.answers.data)
    return groups
