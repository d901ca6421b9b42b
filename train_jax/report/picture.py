"""One SVG for a README: the learning curve of a run and one of its puzzles after a few ACT steps."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from train_jax.errors import UserError
from train_jax.report.boards import board_at
from train_jax.report.figures import spelled
from train_jax.report.measured import Measured, by_act_step, slowest_solved
from train_jax.report.measured import measured as measured_of
from train_jax.report.plots import Series, plot
from train_jax.report.render import render_document
from train_jax.report.run_files import RunFiles
from train_jax.tasks.puzzles.kinds import Trace

WIDTH, HEIGHT, MARGIN = 880, 366, 24
_BOARD, _GAP, _CAPTION = 122, 22, 20
Panel = tuple[float, float, str, Markup]
"""Left, top, title and SVG of a panel."""


def card(headline: str, panels: Sequence[Panel], width: float, height: float) -> str:
    """Returns a standalone SVG of the panels; its background follows the light or dark mode of the reader."""
    return render_document("card.svg.j2", headline=headline, panels=panels, width=width, height=height, margin=MARGIN)


def picture_of(files: RunFiles) -> str:
    """Returns the picture of a run of puzzles; see `picture`."""
    return picture(measured_of(files))


def picture(measured: Measured) -> str:
    """Returns a standalone SVG. Raises `UserError` if the run has no solved puzzle."""
    answers = measured.answers
    if answers is None:
        raise UserError(f"--picture needs the answers on the test set: {measured.answers_missing}")
    if answers.first_step > 1:
        raise UserError(
            "--picture needs the answers after every ACT step, which are not kept for large test sets; omit it"
        )
    example = slowest_solved(by_act_step(answers).solved)
    trace = None if example is None else answers.trace(example)
    if trace is None:
        raise UserError(f"{measured.folder.path} has no solved puzzle to show; train it longer, or omit --picture")
    seconds = measured.train_seconds
    headline = (
        f"{trace.kind.name}: {measured.held_out['exact_accuracy']:.1%} of {len(answers.labels):,} unseen puzzles solved"
        + ("" if seconds is None else f" after {spelled(seconds)} of training")
    )
    by_time = seconds is not None and seconds >= 180
    over, label, unit = ("train_seconds", "minutes of training", 60) if by_time else ("step", "steps", 1)
    series = [
        Series(name, [(x / unit, 100 * y) for x, y in measured.curve(key, over)], colour, marks=colour == 2)
        for name, key, colour in (
            ("training", "train/exact_accuracy", 1),
            (f"held out, {measured.weights}", "eval/exact_accuracy", 2),
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
