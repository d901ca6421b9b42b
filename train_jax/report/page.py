"""The report of a run of puzzles: one self-contained HTML file, generated from the files of the run."""

from __future__ import annotations

import dataclasses
from typing import Any

from train_jax.report import measured as read
from train_jax.report.boards import strip
from train_jax.report.failure_section import failure_section
from train_jax.report.figures import percent
from train_jax.report.halting_section import halting_section
from train_jax.report.measured import ActSteps, Answers, Measured, by_act_step
from train_jax.report.plots import Series, plot
from train_jax.report.render import render_document
from train_jax.report.run_files import RunFiles
from train_jax.report.run_page import Curve, configuration, learning, run_values
from train_jax.report.trajectory_section import trajectory_section
from train_jax.tasks.puzzles.commands import AGREEING_SHARE
from train_jax.tasks.puzzles.kinds import kind_of

CURVES = (
    Curve("exact accuracy, %", "exact_accuracy", scale=100, y_range=(0, 100)),
    Curve("loss per token", "lm_loss"),
)


def page_of(files: RunFiles) -> str:
    """Renders the report of a run of puzzles."""
    return page(read.measured(files))


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
        **run_values(measured),
        curves=learning(measured, CURVES),
        steps=steps,
        steps_missing=missing,
        halting=halting_section(measured),
        trajectories=trajectory_section(measured),
        failures=act_steps and answers and failure_section(answers, act_steps),
        check=check,
        agrees=check is not None and check["agree"] >= AGREEING_SHARE * check["puzzles"],
        groups=_configuration(measured),
    )


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


def _configuration(measured: Measured) -> dict[str, dict[str, Any]]:
    groups = configuration(measured.config)
    if measured.answers is not None:
        groups["test set"] = dataclasses.asdict(measured.answers.data)
    return groups
