"""The report of a run of puzzles: one self-contained HTML file, generated from the files of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from train_jax.errors import UserError
from train_jax.report.answers import (
    RATED,
    ActSteps,
    Answers,
    Failures,
    PuzzleResults,
    Share,
    by_act_step,
    counted_labels,
    failures_of,
    first_unsolved,
    ranges,
    read_results,
    slowest_solved,
    stayed_solved,
)
from train_jax.report.boards import Captioned, board_at, strip
from train_jax.report.plots import Series, heat_map, plot
from train_jax.report.render import percent, render, render_document, spelled
from train_jax.report.run_page import Curve, RunFiles, configuration, render_run
from train_jax.tasks.puzzles.commands import AGREEING_SHARE
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.kinds import Trace, kind_of
from train_jax.tasks.puzzles.metrics import HaltingCurve, Point, select_points
from train_jax.tasks.puzzles.trajectories import Results, settings

CURVES = (
    Curve("exact accuracy, %", "exact_accuracy", scale=100, y_range=(0, 100)),
    Curve("loss per token", "lm_loss"),
)
_UNKNOWN = "the data set contains neither 4x4, 6x6 or 9x9 Sudokus nor square mazes nor ARC puzzles"
_UNLABELLED = "no puzzle of the test set has a solution to compare with"
GROUPS = 3
"""Number of ranges of difficulty that are drawn."""

WIDTH, HEIGHT, MARGIN = 880, 366, 24
_BOARD, _GAP, _CAPTION = 122, 22, 20
Panel = tuple[float, float, str, Markup]
"""Left, top, title and SVG of a panel."""


def page(files: RunFiles) -> str:
    """Renders the whole document."""
    results = read_results(files)
    answers, missing, steps = results.answers, results.answers_missing, None
    act_steps = None if answers is None else by_act_step(answers)
    if answers is not None and act_steps is not None:
        missing = f"for a test set of this size, only the answers after ACT step {answers.first_step} are kept"
        steps = _act_steps(answers, act_steps) if answers.first_step == 1 else None
    check, test_set = files.export_check, {} if answers is None else {"test set": dataclasses.asdict(answers.data)}
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
        trajectories=trajectory_section(results),
        failures=act_steps and answers and failure_section(answers, act_steps),
        answers_missing=results.answers_missing,
        check=check,
        agrees=check is not None and check["agree"] >= AGREEING_SHARE * check["puzzles"],
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
    stayed = int(stayed_solved(act_steps.solved).sum())
    solved = (
        f"The puzzle that took most ACT steps among the {stayed:,} that stayed solved."
        if stayed
        else "The puzzle that was solved last; no puzzle stayed solved after it was solved for the first time."
    )
    unsolved = "The first puzzle of the test set that is not solved after the last ACT step."
    examples = (
        ("A puzzle solved", slowest_solved(act_steps.solved), solved),
        ("A puzzle not solved", first_unsolved(answers, act_steps.solved), unsolved),
    )
    return [
        {"title": title, "number": number, "why": why, "kind": trace.kind, "strip": strip(trace)}
        for title, number, why in examples
        if number is not None and (trace := answers.trace(number))
    ]


# ---- failures


def failure_section(answers: Answers, act_steps: ActSteps) -> Markup:
    """Renders wrong cells, broken rules, and solved and failed examples, for the answers after the last ACT step."""
    kind = kind_of(answers.data)
    failures = None if kind is None else failures_of(answers, kind, act_steps.solved)
    if kind is None or failures is None or not failures.count:
        return render("failures.html.j2", reason=_UNKNOWN if kind is None else _UNLABELLED)
    difficulties = [_by_difficulty(measure, shares) for measure, shares in failures.by_difficulty.items()]
    examples = [
        (title, order, [example for number in numbers if (example := _example(answers, number))])
        for title, order, numbers in (
            ("Solved", _order(failures), failures.solved_examples),
            ("Failed", "From the fewest to the most wrong cells", failures.failed_examples),
        )
        if numbers
    ]
    values = {"failures": failures, "difficulties": difficulties, "examples": examples}
    if failures.failed:
        values |= _wrong_cells(failures, kind) | _broken_rules(failures, kind)
    return render("failures.html.j2", reason=None, **values)


def _wrong_cells(failures: Failures, kind: Kind) -> dict[str, Any]:
    low, high = failures.wrong_cells.min(), failures.wrong_cells.max()
    values = {
        "wrong_cells": f"{low:,}" if low == high else f"{low:,} to {high:,}",
        "median": f"{np.median(failures.wrong_cells):g}",
        "heat_map": None,
    }
    rates = failures.error_rate
    if np.isfinite(rates).any():
        cell = int(np.nanargmax(rates))
        worst = (
            f"row {cell // kind.drawing.cols + 1}, column {cell % kind.drawing.cols + 1}, "
            f"wrong in {percent(rates[cell])} of {failures.unknown_count[cell]:,}"
        )
        drawing = heat_map(
            kind.drawing, rates, failures.unknown_count, label=f"Error rate by cell; the highest: {worst}"
        )
        values |= {"worst": worst, "heat_map": drawing}
    return values


def _by_difficulty(measure: str, shares: Sequence[Share]) -> dict[str, Any]:
    rates = [share.failed / share.count for share in shares]
    return {
        "measure": measure,
        "only": shares[0].name if len(shares) == 1 else None,
        "rows": [(s.name, f"{s.count:,}", f"{s.failed:,}", percent(r)) for s, r in zip(shares, rates, strict=True)],
        "bars": [rate / (max(rates) or 1.0) for rate in rates],
    }


def _broken_rules(failures: Failures, kind: Kind) -> dict[str, Any]:
    counts = sorted(((name, n) for name, n in failures.broken_rules.items() if n), key=lambda each: -each[1])
    if failures.no_rule_broken:
        counts.append((f"none: {kind.checking.alternative_solution}", failures.no_rule_broken))
    return {
        "rules": [(name, f"{count:,}", percent(count / failures.failed)) for name, count in counts],
        "rule_bars": [count / failures.failed for _, count in counts],
    }


def _order(failures: Failures) -> str:
    measure, shares = next(iter(failures.by_difficulty.items()))
    return f"From the fewest to the most {measure}" if len(shares) > 1 else "From all over the test set"


def _example(answers: Answers, number: int) -> dict[str, Any] | None:
    """Returns input, answer and, if it differs, the solution."""
    trace = answers.trace(number, last=True)
    if trace is None or trace.solution is None:
        return None
    puzzle = answers.name(number)
    name = f"Test example {number:,}{f' ({puzzle})' if puzzle else ''}"
    wrong = trace.wrong(1).any()
    figures = [
        Captioned(board_at(trace, step, label=f"{name}: {caption}", changes=False), caption)
        for step, caption in ((0, "input"), (1, "answer"), *([(None, "solution")] if wrong else []))
    ]
    mistakes = trace.mistakes(1) if wrong else None
    return {"name": name, "reasons": "; ".join(mistakes or [trace.kind.checking.success_message]), "figures": figures}


# ---- halting


def halting_section(results: PuzzleResults) -> Markup | None:
    """Renders accuracy against mean ACT steps; None if no curve was measured."""
    curve, early = results.halting_curve, results.halted_early or {}
    if curve is None:
        return None
    limit, points = curve.by_steps[-1], curve.by_threshold
    stricter = [point for point in points if point.threshold and point.threshold > 0.5]
    lossless = next((point for point in stricter if point.exact_accuracy >= limit.exact_accuracy), None)
    if lossless is not None and lossless.mean_steps >= limit.mean_steps - 0.005:
        lossless = None
    named = [(f"halt probability above {point.threshold:g}", point) for point in select_points(curve)]
    named += [(f"all after {point.mean_steps:.0f}", point) for point in curve.by_steps]
    return render(
        "halting.html.j2",
        limit=limit,
        trained=next((point for point in points if point.threshold == 0.5), None),
        lossless=lossless,
        plot=_halting_plot(curve),
        rows=[(name, f"{p.mean_steps:.2f}", percent(p.exact_accuracy), percent(p.accuracy)) for name, p in named],
        early=early if {"threshold", "steps", "computed_steps", "exact_accuracy", "step"} <= early.keys() else None,
    )


def _halting_plot(curve: HaltingCurve) -> Markup:
    def place(point: Point) -> tuple[float, float]:
        return point.mean_steps, 100 * point.exact_accuracy

    named = select_points(curve)
    points, labels = [], []
    for point in curve.by_threshold:
        if point in named or not points or place(point) != points[-1]:
            points.append(place(point))
            labels.append(f"{point.threshold:g}" if point in named else "")
    series = [
        Series("halting above a probability", points, 1, marks=True, labels=labels),
        Series("the same number of steps for all", [place(point) for point in curve.by_steps], 2, marks=True),
    ]
    return plot(series, title="puzzles solved, %", x_label="mean ACT steps")


# ---- trajectories


def trajectory_section(results: PuzzleResults) -> Markup | None:
    """Renders accuracy against ACT steps per puzzle; None if the run was not evaluated with trajectories."""
    trajectories = results.trajectories
    if trajectories is None:
        return None
    values, chooser = trajectories.values, trajectories.values["chooser"]
    points = {(point["trajectories"], point["depth"]): point for point in values["points"]}
    last = points[max(points)]
    rows = [
        (
            f"{count} x {depth}",
            f"{point['act_steps']:,}",
            *(percent(point["exact_accuracy"][name]) for name in (f"{chooser}/best", f"{chooser}/last", "pass/best")),
        )
        for (count, depth), point in sorted(points.items())
        if count == 1 or depth == last["depth"]
    ]
    return render(
        "trajectories.html.j2",
        settings=settings(values),
        step=values["step"],
        chosen=last["exact_accuracy"][f"{chooser}/best"],
        passed=last["exact_accuracy"]["pass/best"],
        any_step=last["exact_accuracy"]["any_step"],
        count=last["trajectories"],
        plot=_trajectory_plot(values),
        rows=rows,
        by_difficulty=_solved_by_difficulty(results.answers, trajectories),
    )


def _trajectory_plot(values: dict) -> Markup:
    chooser, points = values["chooser"], values["points"]
    most, depth = points[-1]["trajectories"], points[-1]["depth"]

    def line(name: str, count: int) -> list[tuple[float, float]]:
        return [(p["act_steps"], 100 * p["exact_accuracy"][name]) for p in points if p["trajectories"] == count]

    series = [Series("one trajectory, last step", line(f"{chooser}/last", 1), 2, marks=True)]
    series.append(Series("one, best step", line(f"{chooser}/best", 1), 3, marks=True))
    if most > 1:
        more = [p for p in points if p["depth"] == depth]
        whole = [(p["act_steps"], 100 * p["exact_accuracy"][f"{chooser}/best"]) for p in more]
        labels = [f"{p['trajectories']}" for p in more]
        series.insert(0, Series(f"1 to {most} of {depth} steps", whole, 1, marks=True, labels=labels))
    return plot(series, title="puzzles solved, %", x_label="ACT steps per puzzle")


def _solved_by_difficulty(answers: Answers | None, results: Results) -> list[tuple[str, Markup, list[tuple[str, ...]]]]:
    """Returns for each measure of difficulty its name, a plot, and the rows of a table."""
    solved, kind = results.solved, None if answers is None else kind_of(answers.data)
    if answers is None or solved is None or kind is None or solved.shape[2] != len(answers.inputs):
        return []
    labelled = np.any(counted_labels(answers.labels, answers.data.ignore_label_id), axis=1)
    inputs, solutions = (kind.values(np.asarray(tokens)[labelled]) for tokens in (answers.inputs, answers.labels))
    hard = kind.checking.difficulties(inputs, solutions, thorough=len(inputs) <= RATED)
    points = results.values["points"]
    steps = np.array([point["act_steps"] for point in points]).reshape(solved.shape[:2])
    own, tables = solved[:, :, labelled], []
    for name, difficulty in hard.items():
        names, group = ranges(difficulty, GROUPS)
        if len(names) < 2:
            continue
        curves = [own[:, :, group == number].mean(axis=2) for number in range(len(names))]
        series = []
        for colour, (each, curve) in enumerate(zip(names, curves, strict=True), 1):
            ends = [*zip(steps[0], curve[0], strict=True), *zip(steps[1:, -1], curve[1:, -1], strict=True)]
            series.append(Series(each, [(int(x), 100 * float(y)) for x, y in ends], colour, marks=True))
        rows = [
            (each, f"{(group == number).sum():,}", percent(float(curve[0, -1])), percent(float(curve[-1, -1])))
            for number, (each, curve) in enumerate(zip(names, curves, strict=True))
        ]
        tables.append((name, plot(series, title=f"solved by {name}, %", x_label="ACT steps per puzzle"), rows))
    return tables


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
    seconds, accuracy = files.train_seconds, files.held_out_by("exact_accuracy")["exact_accuracy"]
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
