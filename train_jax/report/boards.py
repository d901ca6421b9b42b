"""Grids of puzzles as SVG text, and a strip of them that shows every ACT step of one puzzle."""

from collections.abc import Iterator
from html import escape
from itertools import groupby

import numpy as np

from train_jax.tasks.puzzles.kind import Grid, Kind, Mask
from train_jax.tasks.puzzles.trace import Trace, halting_probability


def board(
    kind: Kind,
    grid: Grid,
    *,
    label: str,
    fixed: Mask | None = None,
    wrong: Mask | None = None,
    changed: Mask | None = None,
    side: float = 132,
) -> str:
    """An `<svg>` of the grid, its longer side `side` pixels: givens bold, wrong cells red, changed ones tinted.

    Of puzzles whose cells are coloured, wrong ones are framed instead. An empty cell that is wrong is a dot.
    """
    none = np.zeros(len(grid), bool)
    fixed, wrong, changed = (none if mask is None else mask for mask in (fixed, wrong, changed))
    cell = (side - 2) / max(kind.rows, kind.cols)
    width, height = kind.cols * cell + 2, kind.rows * cell + 2
    parts = [*_fills(kind, grid, cell)]
    if kind.box is None:
        parts += _runs(wrong, "mark", kind.cols, cell, inset=0.8)
        parts.append(f'<rect class="frame" x="0.5" y="0.5" width="{width - 1:.1f}" height="{height - 1:.1f}"/>')
    else:
        parts += _runs(wrong, "wrong", kind.cols, cell)
        parts += _runs(changed & ~wrong, "changed", kind.cols, cell)
        parts.append(_rules(kind, kind.box, cell))
    parts += _letters(kind, grid, fixed, wrong, cell)
    return (
        f'<svg class="board" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.4g} {height:.4g}" '
        f'width="{width:.4g}" height="{height:.4g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def board_at(trace: Trace, step: int, *, label: str, side: float = 132) -> str:
    """The board after ACT step `step`, 0 for the question."""
    return board(
        trace.kind,
        trace.grid(step),
        label=label,
        fixed=trace.given_cells if trace.kind.fills_inputs else None,
        wrong=trace.wrong(step),
        changed=trace.changed(step),
        side=side,
    )


def strip(trace: Trace) -> str:
    """The question, the grid after every ACT step (once for steps that change nothing) and, unless it was found, the
    solution: an HTML `<div>` of figures."""
    side = 132 if trace.kind.box else 190
    figures = [_figure(board_at(trace, 0, label="the question", side=side), "the question", "")]
    for stretch in trace.stretches:
        wrong = int(trace.wrong(stretch.first).sum())
        told = [] if trace.solution is None else [f"{wrong} wrong" if wrong else "correct"]
        # The last step of the stretch: the one in which the model was most sure of this grid, or gave it up.
        told.append(f"halt {halting_probability(trace.q_halt_logits[stretch.last - 1]):.2f}")
        drawing = board_at(trace, stretch.first, label=str(stretch), side=side)
        figures.append(_figure(drawing, str(stretch).replace("-", "\u2013"), " · ".join(told)))
    if trace.solution is not None and trace.wrong(trace.act_steps).any():
        fixed = trace.given_cells if trace.kind.fills_inputs else None
        answer = board(trace.kind, trace.solution, label="the solution", fixed=fixed, side=side)
        figures.append(_figure(answer, "the solution", ""))
    return f'<div class="strip">{"".join(figures)}</div>'


def _figure(drawing: str, caption: str, note: str) -> str:
    small = f"<br><small>{escape(note)}</small>" if note else ""
    return f"<figure>{drawing}<figcaption>{escape(caption)}{small}</figcaption></figure>"


def _fills(kind: Kind, grid: Grid, cell: float) -> Iterator[str]:
    """Coloured cells, neighbours of one colour in a row as one piece."""
    for colour in sorted({kind.colour(int(value)) for value in np.unique(grid)} - {""}):
        has_it = np.array([kind.colour(int(value)) == colour for value in range(int(grid.max()) + 1)])
        yield from _runs(has_it[grid], colour, kind.cols, cell)


def _runs(mask: Mask, css_class: str, cols: int, cell: float, *, inset: float = 0) -> Iterator[str]:
    """Rectangles over the cells, each as long as cells follow each other in a row."""
    for row, cells in enumerate(mask.reshape(-1, cols).tolist()):
        at = 0
        for on, run in groupby(cells):
            length = len(list(run))
            if on:
                x, y = 1 + at * cell + inset, 1 + row * cell + inset
                width, height = length * cell - 2 * inset, cell - 2 * inset
                yield f'<rect class="{css_class}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
            at += length


def _letters(kind: Kind, grid: Grid, fixed: Mask, wrong: Mask, cell: float) -> Iterator[str]:
    """Characters where there are rules; where colours tell cells apart, only those of given cells."""
    shown = fixed if kind.box is None else (grid > 0) | wrong
    for i in np.flatnonzero(shown):
        x, y = 1 + i % kind.cols * cell, 1 + i // kind.cols * cell
        classes = " ".join(name for name, on in (("given", fixed[i]), ("wrong", wrong[i])) if on)
        character = kind.character(int(grid[i])).replace(".", "·")
        yield (
            f'<text class="digit {classes}" x="{x + cell / 2:.1f}" y="{y + cell * 0.69:.1f}" text-anchor="middle" '
            f'font-size="{cell * 0.56:.1f}">{escape(character)}</text>'
        )


def _rules(kind: Kind, box: tuple[int, int], cell: float) -> str:
    """Thin lines between cells, thick ones around boxes."""
    thin, thick = [], []
    for i in range(kind.rows + 1):
        (thick if i % box[0] == 0 else thin).append(f"M1 {1 + i * cell:.1f}H{1 + kind.cols * cell:.1f}")
    for i in range(kind.cols + 1):
        (thick if i % box[1] == 0 else thin).append(f"M{1 + i * cell:.1f} 1V{1 + kind.rows * cell:.1f}")
    return f'<path class="thin" d="{"".join(thin)}"/><path class="thick" d="{"".join(thick)}"/>'
