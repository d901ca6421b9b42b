"""The part of a report about failures: where they are, against which rules, and test examples solved and failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from train_jax.report.boards import board, board_at
from train_jax.report.failures import Failures, Share, failures_of
from train_jax.report.figures import percent
from train_jax.report.heat import heat
from train_jax.report.measured import ActSteps, Answers
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.kinds import kind_of

_UNKNOWN = "the data set holds no Sudoku of 4x4, 6x6 or 9x9, no square maze and no ARC canvas"


def failure_section(answers: Answers, found: ActSteps) -> str:
    """Everything about the answers after the last ACT step."""
    kind = kind_of(answers.data)
    title = "<h2>Where it fails</h2>\n"
    if kind is None:
        return f'{title}<p class="note">Not shown: {_UNKNOWN}.</p>\n'
    failures = failures_of(answers, kind, found.solved)
    if not failures.count:
        return f'{title}<p class="note">Not shown: no puzzle of the test set has a solution to compare with.</p>\n'
    parts = [title, f"<p>{_told(failures)}</p>\n"]
    tables = [_table(name, shares) for name, shares in failures.by_difficulty.items()]
    if failures.failed:
        tables.append(_rules(failures, kind))
        parts.append(f'<div class="beside">{_map(failures, kind)}<div>{"".join(tables)}</div></div>\n')
    else:
        parts.append("".join(tables))
    return "".join([*parts, _examples(answers, kind, failures)])


def _told(failures: Failures) -> str:
    if not failures.failed:
        return f"Nowhere: all {failures.count:,} test puzzles are solved."
    wrong = failures.wrong_cells
    told = [
        f"{failures.failed:,} of {failures.count:,} test puzzles are not solved after the last ACT step "
        f"({percent(failures.failed / failures.count)}). The model itself holds {failures.believed:,} of these answers "
        f"to be right, and {failures.lost:,} had been right after an earlier step."
    ]
    cells = f"{wrong.min():,}" if wrong.min() == wrong.max() else f"{wrong.min():,} to {wrong.max():,}"
    told.append(f"Wrong cells in a puzzle that failed: {cells}, the median is {np.median(wrong):g}.")
    return " ".join(told)


def _map(failures: Failures, kind: Kind) -> str:
    rates = failures.error_rate
    if not np.isfinite(rates).any():
        return ""
    worst = int(np.nanargmax(rates))
    row, col = divmod(worst, kind.cols)
    told = f"worst in row {row + 1}, column {col + 1}: wrong in {percent(rates[worst])} of {failures.asked[worst]:,}"
    drawing = heat(kind, rates, failures.asked, label=f"Error rate by cell, {told}")
    return (
        f"<figure>{drawing}<figcaption>Error rate by cell in %, of the puzzles that ask for it; a stronger colour is a "
        f"higher one.<br><small>{told[0].upper()}{told[1:]}.</small></figcaption></figure>"
    )


def _table(measure: str, shares: Sequence[Share]) -> str:
    if len(shares) == 1:
        return f'<p class="note">{escape(measure.capitalize())}: {shares[0].name} in all of them.</p>\n'
    most = max(share.failed / share.count for share in shares) or 1.0
    rows = "".join(
        f"<tr><td>{share.name}</td><td>{share.count:,}</td><td>{share.failed:,}</td>"
        f"<td>{percent(share.failed / share.count)}</td><td>{_bar(share.failed / share.count / most)}</td></tr>"
        for share in shares
    )
    return (
        f'<h3>by {escape(measure)}</h3>\n<table class="numbers"><thead><tr><th>{escape(measure)}</th><th>puzzles</th>'
        f"<th>failed</th><th>share</th><th></th></tr></thead><tbody>{rows}</tbody></table>\n"
    )


def _rules(failures: Failures, kind: Kind) -> str:
    rows = [(name, count) for name, count in failures.rules.items() if count]
    rows.sort(key=lambda each: -each[1])
    if failures.ruleless:
        rows.append((f"none: {kind.alternative_solution}", failures.ruleless))
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{count:,}</td><td>{percent(count / failures.failed)}</td>"
        f"<td>{_bar(count / failures.failed)}</td></tr>"
        for name, count in rows
    )
    return (
        '<h3>what is wrong with the answers</h3>\n<table class="numbers rules"><thead><tr><th>rule broken</th>'
        f"<th>answers</th><th>of the failed</th><th></th></tr></thead><tbody>{body}</tbody></table>\n"
    )


def _bar(share: float) -> str:
    return f'<span class="bar" style="width:{5 * share:.2f}em"></span>'


def _examples(answers: Answers, kind: Kind, failures: Failures) -> str:
    parts = []
    kinds: Iterable[tuple[str, str, Sequence[int]]] = (
        ("Solved", _order(failures), failures.solved_examples),
        ("Failed", "From the fewest to the most wrong cells", failures.failed_examples),
    )
    for title, order, examples in kinds:
        if examples:
            drawn = "".join(_example(answers, example) for example in examples)
            parts.append(
                f'<h3>{title}</h3>\n<p class="note">{escape(order)}.</p>\n<div class="examples">{drawn}</div>\n'
            )
    mark = "red" if kind.box else "framed red"
    key = f'<p class="note">After the last ACT step. Wrong cells are {mark}.</p>\n'
    return f"<h2>Test examples</h2>\n{key}{''.join(parts)}" if parts else ""


def _order(failures: Failures) -> str:
    measure, shares = next(iter(failures.by_difficulty.items()))
    return f"From the fewest to the most {measure}" if len(shares) > 1 else "From all over the test set"


def _example(answers: Answers, example: int) -> str:
    """Question, answer and, where that is another one, the solution."""
    trace = answers.trace(example, last=True)
    if trace is None or trace.solution is None:
        return ""
    side = 132 if trace.kind.box else 190
    fixed = trace.given_cells if trace.kind.fills_inputs else None
    name = answers.name(example)
    called = f"Test example {example:,}{f' ({name})' if name else ''}"
    mistakes = trace.mistakes(1) or []
    wrong = trace.wrong(1).any()
    boards = [
        ("question", board_at(trace, 0, label=f"{called}: the question", side=side)),
        ("answer", board_at(trace, 1, label=f"{called}: the answer", side=side)),
    ]
    if wrong:
        boards.append(
            ("solution", board(trace.kind, trace.solution, label=f"{called}: the solution", fixed=fixed, side=side))
        )
    figures = "".join(f"<figure>{drawing}<figcaption>{caption}</figcaption></figure>" for caption, drawing in boards)
    reasons = "; ".join(mistakes) if wrong and mistakes else trace.kind.success_message
    said = f"{escape(called)}<br><small>{escape(reasons)}</small>"
    return f'<section><p>{said}</p>\n<div class="strip">{figures}</div></section>\n'
