"""Sudoku grids as SVG text, and a strip of them that shows every ACT step of one puzzle."""

from html import escape

import numpy as np
from jaxtyping import Bool, UInt8

from train_jax.puzzles.sudoku import Geometry
from train_jax.report.trace import Trace, halting_probability

Mask = Bool[np.ndarray, "cells"]


def board(
    grid: UInt8[np.ndarray, "cells"],
    geometry: Geometry,
    *,
    label: str,
    givens: Mask | None = None,
    wrong: Mask | None = None,
    changed: Mask | None = None,
    side: float = 132,
) -> str:
    """An `<svg>` of the grid: givens bold, wrong cells red and tinted, changed ones tinted, empty cells blank.

    An empty cell that is wrong is a dot. `side` is in pixels.
    """
    size = geometry.size
    none = np.zeros(geometry.cells, bool)
    givens, wrong, changed = (none if mask is None else mask for mask in (givens, wrong, changed))
    cell = (side - 2) / size
    tints, digits = [], []
    for i in range(geometry.cells):
        x, y = 1 + i % size * cell, 1 + i // size * cell
        tint = "wrong" if wrong[i] else "changed" if changed[i] else ""
        if tint:
            tints.append(
                f'<rect class="{tint}" x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell:.1f}"/>',
            )
        if grid[i] or wrong[i]:
            kind = " ".join(name for name, on in (("given", givens[i]), ("wrong", wrong[i])) if on)
            digits.append(
                f'<text class="digit {kind}" x="{x + cell / 2:.1f}" y="{y + cell * 0.69:.1f}" text-anchor="middle" '
                f'font-size="{cell * 0.56:.1f}">{grid[i] or "·"}</text>'
            )
    return (
        f'<svg class="board" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side:g} {side:g}" width="{side:g}" '
        f'height="{side:g}" role="img" aria-label="{escape(label)}">'
        + "".join(tints)
        + _rules(geometry, cell, side)
        + "".join(digits)
        + "</svg>"
    )


def board_at(trace: Trace, step: int, *, label: str, side: float = 132) -> str:
    """The board after ACT step `step`, 0 for the question."""
    return board(
        trace.grid(step),
        trace.geometry,
        label=label,
        givens=trace.givens,
        wrong=trace.wrong(step),
        changed=trace.changed(step) if step else None,
        side=side,
    )


def strip(trace: Trace) -> str:
    """The question, the grid after every ACT step (once for steps that change nothing) and, unless it was found, the
    solution: an HTML `<div>` of figures."""
    figures = [_figure(board_at(trace, 0, label="the question"), "the question", "")]
    for stretch in trace.stretches:
        wrong = int(trace.wrong(stretch.first).sum())
        told = [] if trace.solution is None else [f"{wrong} wrong" if wrong else "correct"]
        # The last step of the stretch: the one in which the model was most sure of this grid, or gave it up.
        told.append(f"halt {halting_probability(trace.q_halt_logits[stretch.last - 1]):.2f}")
        drawing = board_at(trace, stretch.first, label=str(stretch))
        figures.append(_figure(drawing, str(stretch).replace("-", "\u2013"), " · ".join(told)))
    if trace.solution is not None and trace.wrong(trace.act_steps).any():
        answer = board(trace.solution, trace.geometry, label="the solution", givens=trace.givens)
        figures.append(_figure(answer, "the solution", ""))
    return f'<div class="strip">{"".join(figures)}</div>'


def _figure(drawing: str, caption: str, note: str) -> str:
    small = f"<br><small>{escape(note)}</small>" if note else ""
    return f"<figure>{drawing}<figcaption>{escape(caption)}{small}</figcaption></figure>"


def _rules(geometry: Geometry, cell: float, side: float) -> str:
    """Thin lines between cells, thick ones around boxes."""
    thin, thick = [], []
    for i in range(geometry.size + 1):
        at = 1 + i * cell
        (thick if i % geometry.box_rows == 0 else thin).append(f"M1 {at:.1f}H{side - 1:.1f}")
        (thick if i % geometry.box_cols == 0 else thin).append(f"M{at:.1f} 1V{side - 1:.1f}")
    return f'<path class="thin" d="{"".join(thin)}"/><path class="thick" d="{"".join(thick)}"/>'
