"""Grids of puzzles as SVG text, and a strip of them that shows every ACT step of one puzzle."""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from train_jax.report.render import render
from train_jax.tasks.puzzles.kind import Grid, Kind, Mask
from train_jax.tasks.puzzles.trace import Trace, halting_probability


class Run(NamedTuple):
    """Of one cell or several in a row: left, top, width."""

    x: float
    y: float
    width: float


class Figure(NamedTuple):
    """A drawing with what is written below it."""

    drawing: Markup
    caption: str
    note: str = ""


def board(
    kind: Kind,
    grid: Grid,
    *,
    label: str,
    fixed: Mask | None = None,
    wrong: Mask | None = None,
    changed: Mask | None = None,
    side: float | None = None,
) -> Markup:
    """An `<svg>` of the grid, its longer side `side` pixels: givens bold, wrong cells framed and red, changed ones
    underlined and tinted, the path of a maze dotted. An empty cell that is wrong is a dot."""
    none = np.zeros(len(grid), bool)
    fixed, wrong, changed = (none if mask is None else mask for mask in (fixed, wrong, changed))
    cell = ((side or (132 if kind.box else 190)) - 2) / max(kind.rows, kind.cols)
    colours = np.array([kind.colour(value) for value in range(int(grid.max()) + 1)])[grid]
    fills = {name: colours == name for name in sorted({*colours.tolist()} - {""})}
    fills |= {"wrong": wrong, "changed": changed & ~wrong} if kind.box else {}
    return render(
        "board.svg.j2",
        label=label,
        cell=cell,
        stroke=min(1.8, cell * 0.12),
        width=kind.cols * cell + 2,
        height=kind.rows * cell + 2,
        fills=[(name, run) for name, mask in fills.items() for run in _runs(mask, kind.cols, cell)],
        underlined=_runs(changed & (kind.box is not None), kind.cols, cell),
        framed=list(_runs(wrong, kind.cols, cell)),
        dots=[_place(i, kind, cell) for i in np.flatnonzero((colours == "path") & ~fixed).tolist()],
        characters=_characters(kind, grid, fixed, wrong, cell),
        rules=kind.box and _rules(kind, kind.box, cell),
    )


def board_at(trace: Trace, step: int | None, *, label: str, side: float | None = None, changes: bool = True) -> Markup:
    """The board after ACT step `step`, 0 for the inputs, None for the solution; `changes`: marks what differs from the
    step before."""
    fixed = trace.given_cells if trace.kind.fills_inputs else None
    if step is None:
        assert trace.solution is not None
        return board(trace.kind, trace.solution, label=label, fixed=fixed, side=side)
    marks = {"wrong": trace.wrong(step), "changed": trace.changed(step) if changes else None}
    return board(trace.kind, trace.grid(step), label=label, fixed=fixed, side=side, **marks)


def strip(trace: Trace) -> Markup:
    """The inputs, the grid after every ACT step (once for steps that change nothing) and, unless it was reached, the
    solution: an HTML `<div>` of figures."""
    figures = [Figure(board_at(trace, 0, label="input"), "input")]
    for stretch in trace.stretches:
        wrong = int(trace.wrong(stretch.first).sum())
        notes = [] if trace.solution is None else [f"{wrong} wrong" if wrong else "correct"]
        # The last step of the stretch: the one in which the model was most sure of this grid, or gave it up.
        notes.append(f"halt {halting_probability(trace.q_halt_logits[stretch.last - 1]):.2f}")
        caption = str(stretch).replace("-", "\u2013")
        drawing = board_at(trace, stretch.first, label=", ".join([caption, *notes]))
        figures.append(Figure(drawing, caption, " · ".join(notes)))
    if trace.solution is not None and trace.wrong(trace.act_steps).any():
        figures.append(Figure(board_at(trace, None, label="solution"), "solution"))
    return render("strip.html.j2", figures=figures)


def _runs(mask: Mask, cols: int, cell: float) -> Iterator[Run]:
    """Cells that follow each other in a row, as one."""
    for row, cells in enumerate(mask.reshape(-1, cols).tolist()):
        col = 0
        for on, run in groupby(cells):
            length = len(list(run))
            if on:
                yield Run(1 + col * cell, 1 + row * cell, length * cell)
            col += length


def _characters(kind: Kind, grid: Grid, fixed: Mask, wrong: Mask, cell: float) -> Iterator[tuple[str, Run, str]]:
    """Where there are rules between cells; where colours tell cells apart, only those of given cells."""
    for i in np.flatnonzero(fixed if kind.box is None else (grid > 0) | wrong).tolist():
        classes = "digit" + " given" * bool(fixed[i]) + " wrong" * bool(wrong[i])
        yield classes, _place(i, kind, cell), kind.character(int(grid[i])).replace(".", "·")


def _place(i: int, kind: Kind, cell: float) -> Run:
    return Run(1 + i % kind.cols * cell, 1 + i // kind.cols * cell, cell)


def _rules(kind: Kind, box: tuple[int, int], cell: float) -> dict[str, str]:
    """Thin lines between cells, thick ones around boxes."""
    lines = {"thin": "", "thick": ""}
    for i in range(kind.rows + 1):
        lines["thin" if i % box[0] else "thick"] += f"M1 {1 + i * cell:.1f}H{1 + kind.cols * cell:.1f}"
    for i in range(kind.cols + 1):
        lines["thin" if i % box[1] else "thick"] += f"M{1 + i * cell:.1f} 1V{1 + kind.rows * cell:.1f}"
    return lines
