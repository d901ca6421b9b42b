"""Formats the ACT steps of a puzzle, and data sets, for a terminal with rich."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from train_jax.puzzles.format import load_split
from train_jax.puzzles.inspection import inspect
from train_jax.puzzles.kind import Drawing, Grid, Mask
from train_jax.puzzles.kinds import Trace, halting_probability, kind_of
from train_jax.puzzles.metadata import SPLITS
from train_jax.report.render import CELLS
from train_jax.storage.new_dataset import Progress
from train_jax.storage.storage import path_of


def trace_text(trace: Trace, *, width: int, styled: bool) -> str:
    """Formats the input and every different grid of the model, side by side as far as `width` columns allow.

    A wrong cell is followed by `!`, a changed one by `*`. If `styled` with ANSI codes, givens are bold, changed cells
    are underlined instead of marked, and wrong cells are also red.
    """
    grids = [_at(trace, 0, "input", styled)]
    grids += [_at(trace, stretch.first, str(stretch), styled) for stretch in trace.stretches]
    marks = ["bold: given"] * bool(trace.given_cells.any()) + ["underlined: changed"] if styled else ["*: changed"]
    marks += [] if trace.solution is None else ["red and !: wrong" if styled else "!: wrong"]
    return as_text(grids, "; ".join(marks), _table(trace), width=width, styled=styled)


def verdict(trace: Trace, *, unique: bool = True) -> str:
    """Returns one line: the ACT step that solved the puzzle, or the mistakes; `unique`: it has one solution."""
    reasons = trace.mistakes(trace.act_steps)
    since = trace.stretches[-1].first
    if reasons is None:
        return f"answered since ACT step {since}; it is unknown whether the answer is correct"
    if reasons:
        return f"not solved: {', '.join(reasons)}"
    several = "" if unique else ", one of several solutions"
    return f"solved: {trace.kind.checking.success_message}, since ACT step {since}{several}"


def grid_text(
    drawing: Drawing,
    grid: Grid,
    *,
    title: str = "",
    fixed: Mask | None = None,
    changed: Mask | None = None,
    wrong: Mask | None = None,
    styled: bool = False,
) -> Text:
    """Formats the title and the lines of a grid; a cell has two columns, its character and its mark."""
    none = np.zeros(len(grid), bool)
    fixed, changed, wrong = (none if mask is None else mask for mask in (fixed, changed, wrong))
    cells = [
        _cell(drawing, int(value), bool(fixed[i]), bool(changed[i]), bool(wrong[i]), styled)
        for i, value in enumerate(grid)
    ]
    box_rows, box_cols = drawing.box or (drawing.rows, drawing.cols)
    boxes_across = drawing.cols // box_cols
    rule = [Text("+".join(["", *["-" * (2 * box_cols + 1)] * boxes_across, ""]))] if drawing.box else []
    lines = [Text(title)] if title else []
    for number in range(drawing.rows):
        row = cells[number * drawing.cols : (number + 1) * drawing.cols]
        boxes = [Text.assemble(*row[start : start + box_cols]) for start in range(0, drawing.cols, box_cols)]
        lines += rule if number % box_rows == 0 else []
        lines.append(Text.assemble("| ", Text("| ").join(boxes), "|") if drawing.box else boxes[0])
    return Text("\n").join([*lines, *rule])


def as_text(grids: Sequence[Text], *below: RenderableType, width: int, styled: bool = False) -> str:
    """Formats the grids, as many side by side as `width` columns allow, followed by `below`."""
    file = StringIO()
    colours = {"force_terminal": styled, "color_system": "256" if styled else None, "no_color": False}
    console = Console(file=file, width=1000, markup=False, highlight=False, legacy_windows=False, **colours)
    widest = max(line.cell_len for grid in grids for line in grid.split())
    spaced = [Text.assemble(grid, "\n") for grid in grids]
    console.print(Columns(spaced, padding=(0, 3, 0, 0), equal=True), width=max(width, widest) + 3)
    for each in below:
        console.print(each, end="\n\n")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip("\n")


def _at(trace: Trace, step: int, title: str, styled: bool) -> Text:
    marks = {"fixed": trace.given_cells, "changed": trace.changed(step), "wrong": trace.wrong(step)}
    return grid_text(trace.kind.drawing, trace.grid(step), title=title, **marks, styled=styled)


def _cell(drawing: Drawing, value: int, fixed: bool, changed: bool, wrong: bool, styled: bool) -> Text:
    character = drawing.character(value)
    colour = drawing.colour(value)
    mark = "!" if wrong else "*" if changed and not styled else " "
    if not styled:
        return Text(character + mark)
    ink = Style(bold=fixed or None, underline=changed or None, color="red" if wrong else None)
    if not colour:
        return Text.assemble((character, ink), mark)
    paper = Style(bgcolor=f"color({CELLS[colour].ansi})")
    return Text((character if fixed else " ") + mark, ink + paper)  # other cells are only coloured


def _table(trace: Trace) -> Table:
    """Returns a table of changed cells, wrong cells and the halting logit after every ACT step."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    known = trace.solution is not None
    for name in ("ACT step", "changed", *(["wrong"] if known else []), "q_halt", "p(halt)"):
        table.add_column(name, justify="right", min_width=8)
    for step in range(1, trace.act_steps + 1):
        logit = trace.q_halt_logits[step - 1]
        counts = [trace.changed(step).sum(), *([trace.wrong(step).sum()] if known else [])]
        table.add_row(*map(str, [step, *counts]), f"{logit:+.2f}", f"{halting_probability(logit):.3f}")
    return table


# ---- data sets


def inspection_text(directory: Path, examples: int, progress: Progress) -> Iterator[str]:
    """Yields the facts of a data set, and this number of examples of each split."""
    yield inspected(path_of(directory), inspect(directory, progress))
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    yield from samples(directory, examples, shutil.get_terminal_size().columns, styled=styled)


def inspected(directory: Path, facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Formats the facts of an inspection: headings, and one line per fact."""
    lines = [str(directory)]
    for heading, of_it in facts.items():
        lines += ["", heading, *(f"  {name}: {value}" for name, value in of_it.items())]
    return "\n".join(lines)


def samples(directory: Path, count: int, width: int, *, styled: bool) -> Iterator[str]:
    """Yields `count` evenly spaced examples of each split with their solutions; none for an unknown kind."""
    for split in SPLITS if count else ():
        puzzles = load_split(directory, split)
        kind = kind_of(puzzles.metadata)
        if kind is None:
            return
        for row in np.unique(np.linspace(0, puzzles.num_examples - 1, count).astype(int)).tolist():
            tokens = puzzles.inputs[row], puzzles.labels[row]
            own = kind.fitted(tokens)
            inputs, solution = (own.values(each) for each in tokens)
            fixed = own.drawing.given_cells(inputs)
            grids = [
                grid_text(own.drawing, inputs, title=f"{split} example {row}", fixed=fixed, styled=styled),
                grid_text(own.drawing, solution, title="solution", fixed=fixed & (inputs == solution), styled=styled),
            ]
            yield as_text(grids, width=width, styled=styled)
