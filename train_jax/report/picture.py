"""One SVG for a README: how a run learned, beside one of its puzzles at a few ACT steps."""

from __future__ import annotations

from html import escape

from train_jax.errors import UserError
from train_jax.report.boards import board_at
from train_jax.report.curves import Series, plot
from train_jax.report.figures import spelled
from train_jax.report.measured import Measured, by_act_step, slowest_solved
from train_jax.report.theme import COLOURS, DRAWINGS
from train_jax.tasks.puzzles.trace import Trace

WIDTH, HEIGHT, MARGIN = 880, 366, 24
_BOARD, _GAP, _CAPTION = 122, 22, 20


def picture(measured: Measured) -> str:
    """A standalone SVG. Raises `UserError` where the run has no solved puzzle to show."""
    answers = measured.answers
    if answers is None:
        raise UserError(f"no picture without the answers on the test set: {measured.answers_missing}")
    if answers.first_step > 1:
        raise UserError("no picture of a test set that is too large to keep every answer; leave --picture out")
    example = slowest_solved(by_act_step(answers).solved)
    trace = None if example is None else answers.trace(example)
    if trace is None:
        raise UserError(f"{measured.folder.path} has no solved puzzle to show; train it longer, or leave --picture out")
    seconds = measured.train_seconds
    headline = (
        f"{trace.kind.name}: {measured.held_out['exact_accuracy']:.1%} of {len(answers.labels):,} unseen puzzles solved"
        + ("" if seconds is None else f" after {spelled(seconds)} of training")
    )
    by_time = seconds is not None and seconds >= 180
    over, label, unit = ("train_seconds", "minutes of training", 60) if by_time else ("step", "steps", 1)
    curves = plot(
        [
            Series(name, [(x / unit, 100 * y) for x, y in measured.curve(key, over)], colour, marks=colour == 2)
            for name, key, colour in (
                ("training", "train/exact_accuracy", 1),
                ("held out, averaged weights", "eval/exact_accuracy", 2),
            )
        ],
        title="puzzles solved, %",
        x_label=label,
        y_range=(0, 100),
        width=526,
        height=286,
    )
    boards = [
        f'<g transform="translate({WIDTH - MARGIN - (2 - i % 2) * _BOARD - (1 - i % 2) * _GAP} '
        f'{56 + i // 2 * (_BOARD + _CAPTION + 10)})">{_titled(trace, step)}</g>'
        for i, step in enumerate(chosen_steps(trace))
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(headline)}">\n<style>{COLOURS}{DRAWINGS}'
        "svg .headline { font-size: 16px; font-weight: 600; }\n"
        "svg .paper { fill: var(--paper); stroke: var(--rule); }</style>\n"
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>\n'
        f'<text class="headline" x="{MARGIN}" y="35">{escape(headline)}</text>\n'
        f'<g transform="translate({MARGIN} 58)">{curves}</g>\n' + "\n".join(boards) + "\n</svg>\n"
    )


def chosen_steps(trace: Trace) -> list[int]:
    """At most four steps: the question, and the first, the middle and the last grid that the model wrote."""
    starts = [stretch.first for stretch in trace.stretches]
    return sorted({0, starts[0], starts[len(starts) // 2], starts[-1]})


def _titled(trace: Trace, step: int) -> str:
    wrong = int(trace.wrong(step).sum())
    title = f"ACT step {step}" + (f", {wrong} wrong" if wrong else ", solved") if step else "the question"
    drawing = board_at(trace, step, label=title, side=_BOARD)
    return f'<text class="tick" x="1" y="12">{escape(title)}</text><g transform="translate(0 {_CAPTION})">{drawing}</g>'
