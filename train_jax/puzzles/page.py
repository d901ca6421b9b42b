"""The report of a run of puzzles: one self-contained HTML file, generated from the files of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from train_jax.errors import UserError
from train_jax.puzzles.answers import (
    ActSteps,
    Answers,
    PuzzleResults,
    by_act_step,
    first_unsolved,
    read_results,
    slowest_solved,
)
from train_jax.puzzles.boards import board_at, strip
from train_jax.puzzles.kinds import Trace, halting_probability, kind_of, trace_of
from train_jax.puzzles.metrics import HaltingCurve, Point, select_points
from train_jax.puzzles.view_example import read_example
from train_jax.report.plots import Series, plot
from train_jax.report.render import percent, render, render_document, spelled
from train_jax.report.run_page import Curve, RunFiles, configuration, render_run
from train_jax.storage.untrusted import DamagedError

CURVES = (
    Curve("exact accuracy, %", "exact_accuracy", scale=100, y_range=(0, 100)),
    Curve("loss per token", "lm_loss"),
)

WIDTH = 880
HEIGHT = 366
MARGIN = 24
_BOARD = 122
_GAP = 22
_CAPTION = 20
_VIEW_SIDE = 180
Panel = tuple[float, float, str, Markup]
"""Left, top, title and SVG of a panel."""


def page(files: RunFiles) -> str:
    """Renders the whole document."""
    results = read_results(files)
    answers = results.answers
    missing = results.answers_missing
    steps = None
    act_steps = None if answers is None else by_act_step(answers)
    if answers is not None and act_steps is not None:
        missing = f"for a test set of this size, only the answers after ACT step {answers.first_step} are kept"
        steps = _act_steps(answers, act_steps) if answers.first_step == 1 else None
    check = files.export_check
    test_set = {} if answers is None else {"test set": dataclasses.asdict(answers.data)}
    return render_run(
        "report.html.j2",
        files,
        CURVES,
        groups=configuration(files.config) | test_set,
        test=files.held_out_by("exact_accuracy"),
        parameters_note="without the puzzle table",
        steps=steps,
        steps_missing=missing,
        halting=halting_section(results),
        views=None if answers is None else views_of(files, answers),
        check=check,
        agrees=check is not None and check.agrees,
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
    unsolved = "The first puzzle of the test set that is not solved after the last ACT step"
    examples = (
        ("A puzzle solved", slowest_solved(act_steps.solved), "The puzzle that took most ACT steps"),
        ("A puzzle not solved", first_unsolved(act_steps), unsolved),
    )
    shown = []
    for title, number, why in examples:
        if number is not None and (trace := answers.trace(number)):
            mistakes = "; ".join(trace.mistakes(trace.act_steps) or [])
            why = f"{why}: {mistakes}" if mistakes else why
            shown.append({"title": title, "number": number, "why": why, "kind": trace.kind, "strip": strip(trace)})
    return shown


# ---- views


def views_of(files: RunFiles, answers: Answers) -> dict[str, Any] | None:
    """Returns the puzzle that took most views, with its images and the answers to them; None if there is none."""
    path = files.folder.view_example("test")
    try:
        example = read_example(path)
    except DamagedError as error:
        raise UserError(f"{path} cannot be read ({error}); run `trm evaluate --views` to write it again") from error
    kind = kind_of(answers.data)
    if example is None or kind is None or not 0 <= example.number[0] < len(answers.labels):
        return None
    if example.inputs.shape[1:] != answers.inputs.shape[1:]:
        return None  # of another test set
    number = int(example.number[0])
    boards = []
    for view, (image, answer, logit, step) in enumerate(zip(*example[1:], strict=True), 1):
        logits = np.array([logit])
        seen = trace_of(kind, image, answer[None], logits, None)
        found = trace_of(kind, answers.inputs[number], answer[None], logits, answers.labels[number])
        wrong = int(found.wrong(1).sum())
        says = f"{f'{wrong} wrong' if wrong else 'solved'} after ACT step {step}, halt {halting_probability(logit):.2f}"
        boards.append(
            {
                "title": f"View {view}" + (", the puzzle itself" if view == 1 else ""),
                "image": board_at(seen, 0, label=f"view {view}", side=_VIEW_SIDE),
                "answer": board_at(found, 1, label=f"answer of view {view}, {says}", side=_VIEW_SIDE),
                "says": says,
            }
        )
    return {"number": number, "boards": boards}


# ---- halting


def halting_section(results: PuzzleResults) -> Markup | None:
    """Renders accuracy against mean ACT steps; None if no curve was measured."""
    curve = results.halting_curve
    early = results.halted_early or {}
    if curve is None:
        return None
    limit = curve.by_steps[-1]
    points = curve.by_threshold
    stricter = [point for point in points if point.threshold and point.threshold > 0.5]
    lossless = next((point for point in stricter if point.exact_accuracy >= limit.exact_accuracy), None)
    if lossless is not None and lossless.mean_steps >= limit.mean_steps - 0.005:
        lossless = None
    named = [(f"halt probability above {point.threshold:g}", point) for point in select_points(curve)]
    named += [(f"all after {point.mean_steps:.0f}", point) for point in curve.by_steps]
    needed = {"threshold", "steps", "computed_steps", "exact_accuracy", "step"}
    if "trajectories" in early:
        needed |= {"depth", "noise"}
    return render(
        "halting.html.j2",
        limit=limit,
        trained=next((point for point in points if point.threshold == 0.5), None),
        lossless=lossless,
        plot=_halting_plot(curve),
        rows=[(name, f"{p.mean_steps:.2f}", percent(p.exact_accuracy), percent(p.accuracy)) for name, p in named],
        early=early if needed <= early.keys() else None,
    )


def _halting_plot(curve: HaltingCurve) -> Markup:
    def place(point: Point) -> tuple[float, float]:
        return point.mean_steps, 100 * point.exact_accuracy

    named = select_points(curve)
    points = []
    labels = []
    for point in curve.by_threshold:
        if point in named or not points or place(point) != points[-1]:
            points.append(place(point))
            labels.append(f"{point.threshold:g}" if point in named else "")
    series = [
        Series("halting above a probability", points, 1, marks=True, labels=labels),
        Series("the same number of steps for all", [place(point) for point in curve.by_steps], 2, marks=True),
    ]
    return plot(series, title="puzzles solved, %", x_label="mean ACT steps")


# ---- a picture for a README


def card(headline: str, panels: Sequence[Panel], width: float, height: float) -> str:
    """Returns a standalone SVG of the panels; its background follows the light or dark mode of the reader."""
    return render_document("card.svg.j2", headline=headline, panels=panels, width=width, height=height, margin=MARGIN)


def picture(files: RunFiles) -> str:
    """Returns a standalone SVG: the learning curve and one puzzle after a few ACT steps.

    Raises `UserError` if the run has no solved puzzle.
    """
    results = read_results(files)
    answers = results.answers
    if answers is None:
        raise UserError(f"--picture needs the answers on the test set: {results.answers_missing}")
    if answers.first_step > 1:
        raise UserError(
            "--picture needs the answers after every ACT step, which are not kept for large test sets; omit it"
        )
    example = slowest_solved(by_act_step(answers).solved)
    trace = None if example is None else answers.trace(example)
    if trace is None:
        raise UserError(f"{files.folder.path} has no solved puzzle to show; train it longer, or omit --picture")
    seconds = files.train_seconds
    accuracy = files.held_out_by("exact_accuracy")["exact_accuracy"]
    headline = f"{trace.kind.name}: {accuracy:.1%} of {len(answers.labels):,} unseen puzzles solved" + (
        "" if seconds is None else f" after {spelled(seconds)} of training"
    )
    by_time = seconds is not None and seconds >= 180
    over, label, unit = ("train_seconds", "minutes of training", 60) if by_time else ("step", "steps", 1)
    series = [
        Series(name, [(x / unit, 100 * y) for x, y in files.curve(key, over)], colour, marks=colour == 2)
        for name, key, colour in (
            ("training", "train/exact_accuracy", 1),
            (f"held out, {files.weights}", "eval/exact_accuracy", 2),
        )
    ]
    curves = plot(series, title="puzzles solved, %", x_label=label, y_range=(0, 100), width=526, height=286)
    panels = [(MARGIN, 58, "", curves)]
    for i, step in enumerate(chosen_steps(trace)):
        left = WIDTH - MARGIN - (2 - i % 2) * _BOARD - (1 - i % 2) * _GAP
        title = _title(trace, step)
        drawing = board_at(trace, step, label=title, side=_BOARD)
        panels.append((left, 56 + _CAPTION + i // 2 * (_BOARD + _CAPTION + 10), title, drawing))
    return card(headline, panels, WIDTH, HEIGHT)


def chosen_steps(trace: Trace) -> list[int]:
    """Returns at most four steps: the input, and the first, the middle and the last different grid of the model."""
    starts = [stretch.first for stretch in trace.stretches]
    return sorted({0, starts[0], starts[len(starts) // 2], starts[-1]})


def _title(trace: Trace, step: int) -> str:
    wrong = int(trace.wrong(step).sum())
    return f"ACT step {step}" + (f", {wrong} wrong" if wrong else ", solved") if step else "input"
