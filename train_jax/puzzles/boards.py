"""Draws grids of puzzles as SVG, and the ACT steps of a puzzle as a strip."""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from train_jax.puzzles.kind import Drawing, Grid, Mask
from train_jax.puzzles.kinds import Trace, halting_probability
from train_jax.report.render import render


class Cells(NamedTuple):
    """Left, top and width of a run of adjacent cells in a row."""

    x: float
    y: float
    width: float


class Captioned(NamedTuple):
    """A drawing with its caption and note."""

    drawing: Markup
    caption: str
    note: str = ""


def board(
    drawing: Drawing,
    grid: Grid,
    *,
    label: str,
    fixed: Mask | None = None,
    wrong: Mask | None = None,
    changed: Mask | None = None,
    side: float | None = None,
) -> Markup:
    """Returns an `<svg>` of the grid; its longer side has `side` pixels.

    Givens are bold, wrong cells are framed and red, changed cells are underlined and tinted, and the path of a maze is
    dotted. An empty cell that is wrong is shown as a dot.
    """
    none = np.zeros(len(grid), bool)
    fixed, wrong, changed = (none if mask is None else mask for mask in (fixed, wrong, changed))
    cell = ((side or (132 if drawing.box else 190)) - 2) / max(drawing.rows, drawing.cols)
    colours = np.array([drawing.colour(value) for value in range(int(grid.max()) + 1)])[grid]
    fills = {name: colours == name for name in sorted({*colours.tolist()} - {""})}
    fills |= {"wrong": wrong, "changed": changed & ~wrong} if drawing.box else {}
    return render(
        "board.svg.j2",
        label=label,
        cell=cell,
        stroke=min(1.8, cell * 0.12),
        width=drawing.cols * cell + 2,
        height=drawing.rows * cell + 2,
        fills=[(name, run) for name, mask in fills.items() for run in _runs(mask, drawing.cols, cell)],
        underlined=_runs(changed & (drawing.box is not None), drawing.cols, cell),
        framed=list(_runs(wrong, drawing.cols, cell)),
        dots=[_place(i, drawing, cell) for i in np.flatnonzero((colours == "path") & ~fixed).tolist()],
        characters=_characters(drawing, grid, fixed, wrong, cell),
        rules=drawing.box and _rules(drawing, drawing.box, cell),
    )


def board_at(trace: Trace, step: int | None, *, label: str, side: float | None = None, changes: bool = True) -> Markup:
    """Draws the grid after ACT step `step`; 0 is the input, None the solution. `changes` marks the changed cells."""
    fixed = trace.given_cells if trace.kind.drawing.fills_inputs else None
    if step is None:
        assert trace.solution is not None
        return board(trace.kind.drawing, trace.solution, label=label, fixed=fixed, side=side)
    marks = {"wrong": trace.wrong(step), "changed": trace.changed(step) if changes else None}
    return board(trace.kind.drawing, trace.grid(step), label=label, fixed=fixed, side=side, **marks)


def strip(trace: Trace) -> Markup:
    """Returns an HTML `<div>` with the input, the grid after every ACT step, and the solution unless it was reached.

    Consecutive steps without a change share one figure.
    """
    figures = [Captioned(board_at(trace, 0, label="input"), "input")]
    for stretch in trace.stretches:
        wrong = int(trace.wrong(stretch.first).sum())
        notes = [] if trace.solution is None else [f"{wrong} wrong" if wrong else "correct"]
        # The halting probability of the last step with this grid.
        notes.append(f"halt {halting_probability(trace.q_halt_logits[stretch.last - 1]):.2f}")
        caption = str(stretch).replace("-", "\u2013")
        drawing = board_at(trace, stretch.first, label=", ".join([caption, *notes]))
        figures.append(Captioned(drawing, caption, " · ".join(notes)))
    if trace.solution is not None and trace.wrong(trace.act_steps).any():
        figures.append(Captioned(board_at(trace, None, label="solution"), "solution"))
    return render("strip.html.j2", figures=figures)


def _runs(mask: Mask, cols: int, cell: float) -> Iterator[Cells]:
    """Yields adjacent cells of a row as one run."""
    for row, cells in enumerate(mask.reshape(-1, cols).tolist()):
        col = 0
        for on, run in groupby(cells):
            length = len(list(run))
            if on:
                yield Cells(1 + col * cell, 1 + row * cell, length * cell)
            col += length


def _characters(
    drawing: Drawing, grid: Grid, fixed: Mask, wrong: Mask, cell: float
) -> Iterator[tuple[str, Cells, str]]:
    """Yields the characters of the cells; for kinds without boxes, only those of given cells."""
    for i in np.flatnonzero(fixed if drawing.box is None else (grid > 0) | wrong).tolist():
        classes = "digit" + " given" * bool(fixed[i]) + " wrong" * bool(wrong[i])
        yield classes, _place(i, drawing, cell), drawing.character(int(grid[i])).replace(".", "·")


def _place(i: int, drawing: Drawing, cell: float) -> Cells:
    return Cells(1 + i % drawing.cols * cell, 1 + i // drawing.cols * cell, cell)


def _rules(drawing: Drawing, box: tuple[int, int], cell: float) -> dict[str, str]:
    """Returns the paths of the thin lines between cells and the thick lines around boxes."""
    lines = {"thin": "", "thick": ""}
    for i in range(drawing.rows + 1):
        lines["thin" if i % box[0] else "thick"] += f"M1 {1 + i * cell:.1f}H{1 + drawing.cols * cell:.1f}"
    for i in range(drawing.cols + 1):
        lines["thin" if i % box[1] else "thick"] += f"M{1 + i * cell:.1f} 1V{1 + drawing.rows * cell:.1f}"
    return lines


def caption(trace: Trace, step: int) -> str:
    """Returns the number of the step, the wrong cells and the halting probability."""
    if step == 0:
        return "input"
    wrong = f", {trace.wrong(step).sum()} wrong" if trace.wrong(step).any() else ""
    return f"ACT step {step}{wrong}, halt {halting_probability(trace.q_halt_logits[step - 1]):.2f}"
