"""The report section about failures: wrong cells, broken rules, and solved and failed test examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from train_jax.report.boards import Figure, board_at
from train_jax.report.failures import Failures, Share, failures_of
from train_jax.report.figures import percent
from train_jax.report.measured import ActSteps, Answers
from train_jax.report.plots import heat_map
from train_jax.report.render import render
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.kinds import kind_of

_UNKNOWN = "the data set contains neither 4x4, 6x6 or 9x9 Sudokus nor square mazes nor ARC puzzles"
_UNLABELLED = "no puzzle of the test set has a solution to compare with"


def failure_section(answers: Answers, act_steps: ActSteps) -> Markup:
    """Renders the section, for the answers after the last ACT step."""
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
        Figure(board_at(trace, step, label=f"{name}: {caption}", changes=False), caption)
        for step, caption in ((0, "input"), (1, "answer"), *([(None, "solution")] if wrong else []))
    ]
    mistakes = trace.mistakes(1) if wrong else None
    return {"name": name, "reasons": "; ".join(mistakes or [trace.kind.checking.success_message]), "figures": figures}
