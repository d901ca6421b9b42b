"""A puzzle's ACT steps as text for a terminal: the grids side by side, then a line for every step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from train_jax.report.theme import CELLS
from train_jax.tasks.puzzles.kind import Grid, Kind, Mask
from train_jax.tasks.puzzles.sudoku.grid import BOLD, PLAIN, RED
from train_jax.tasks.puzzles.trace import Trace, halting_probability

UNDERLINE = "\x1b[4m"
ANSI = re.compile(r"\x1b\[[\d;]*m")
_BETWEEN = "   "


def thinking(trace: Trace, *, width: int, styled: bool) -> str:
    """The question and every grid that the model wrote, as many in a row as fit `width` columns; a grid that stays is
    drawn once.

    Styled with ANSI codes givens are bold, changed cells underlined and wrong ones red; without them the mark stands
    behind the cell, so that a file or a pipe gets everything too.
    """
    blocks = [["question", *_drawn(trace, 0, styled)]]
    for stretch in trace.stretches:
        blocks.append([str(stretch), *_drawn(trace, stretch.first, styled)])
    return "\n\n".join([in_rows(blocks, width), _legend(trace, styled), _table(trace)])


def verdict(trace: Trace, *, unique: bool = True) -> str:
    """One line: solved, or not and why. `unique`: whether the puzzle is known to have one solution."""
    reasons = trace.mistakes(trace.act_steps)
    since = trace.stretches[-1].first
    if reasons is None:
        return f"answered since ACT step {since}; whether that is right is not known"
    if reasons:
        return f"not solved: {', '.join(reasons)}"
    return (
        f"solved: {trace.kind.success_message}, since ACT step {since}{'' if unique else ', one of several solutions'}"
    )


def drawn(
    kind: Kind,
    grid: Grid,
    *,
    fixed: Mask | None = None,
    changed: Mask | None = None,
    wrong: Mask | None = None,
    styled: bool = False,
) -> list[str]:
    """The lines of a grid, all equally wide: two columns for a cell, its character and its mark."""
    none = np.zeros(len(grid), bool)
    fixed, changed, wrong = (none if mask is None else mask for mask in (fixed, changed, wrong))
    cell = _ansi if styled else _plain
    cells = [cell(kind, int(value), bool(fixed[i]), bool(changed[i]), bool(wrong[i])) for i, value in enumerate(grid)]
    rows = [cells[start : start + kind.cols] for start in range(0, len(cells), kind.cols)]
    if kind.box is None:
        return ["".join(row) for row in rows]
    box_rows, box_cols = kind.box
    rule = "+".join(["", *["-" * (2 * box_cols + 1)] * (kind.cols // box_cols), ""])
    lines = []
    for number, row in enumerate(rows):
        boxes = ["".join(row[start : start + box_cols]) for start in range(0, kind.cols, box_cols)]
        lines += [rule] * (number % box_rows == 0) + ["| " + "| ".join(boxes) + "|"]
    return [*lines, rule]


def in_rows(blocks: Sequence[Sequence[str]], width: int) -> str:
    """Blocks, each a heading and the lines of a grid of one size, as many side by side as fit `width` columns."""
    columns = max(_visible(line) for block in blocks for line in block)
    across = max(1, (width + len(_BETWEEN)) // (columns + len(_BETWEEN)))
    return "\n\n".join(_beside(blocks[i : i + across], columns) for i in range(0, len(blocks), across))


def _drawn(trace: Trace, step: int, styled: bool) -> list[str]:
    marks = {"fixed": trace.given_cells, "changed": trace.changed(step), "wrong": trace.wrong(step)}
    return drawn(trace.kind, trace.grid(step), **marks, styled=styled)


def _ansi(kind: Kind, value: int, fixed: bool, changed: bool, wrong: bool) -> str:
    codes = (BOLD if fixed else "") + (UNDERLINE if changed else "") + (RED if wrong else "")
    character, colour = kind.character(value), kind.colour(value)
    if kind.box is not None:
        return (f"{codes}{character}{PLAIN}" if codes else character) + " "
    if colour and not fixed:
        character = " "  # the colour says it all
    codes += f"\x1b[48;5;{CELLS[colour].ansi}m" if colour else ""
    return f"{codes}{character}{'!' if wrong else ' '}{PLAIN}" if codes else f"{character} "


def _plain(kind: Kind, value: int, fixed: bool, changed: bool, wrong: bool) -> str:
    return kind.character(value) + ("!" if wrong else "*" if changed else " ")


def _beside(blocks: Sequence[Sequence[str]], columns: int) -> str:
    padded = [[part + " " * (columns - _visible(part)) for part in parts] for parts in zip(*blocks, strict=True)]
    return "\n".join(_BETWEEN.join(parts).rstrip() for parts in padded)


def _visible(line: str) -> int:
    return len(ANSI.sub("", line))


def _table(trace: Trace) -> str:
    """Changed and wrong cells and the halting logit after every ACT step."""
    columns: list[tuple[str, Callable[[int], str]]] = [
        ("ACT step", str),
        ("changed", lambda step: str(trace.changed(step).sum())),
        ("wrong", lambda step: str(trace.wrong(step).sum())),
        ("q_halt", lambda step: f"{trace.q_halt_logits[step - 1]:+.2f}"),
        ("p(halt)", lambda step: f"{halting_probability(trace.q_halt_logits[step - 1]):.3f}"),
    ]
    if trace.solution is None:
        columns = [column for column in columns if column[0] != "wrong"]
    lines = ["  ".join(f"{name:>8}" for name, _ in columns)]
    for step in range(1, trace.act_steps + 1):
        lines.append("  ".join(f"{value(step):>8}" for _, value in columns))
    return "\n".join(lines)


def _legend(trace: Trace, styled: bool) -> str:
    marks = ["bold: given"] * bool(trace.given_cells.any()) + ["underlined: changed"] if styled else ["*: changed"]
    if trace.solution is not None:
        marks.append("red: wrong" if styled else "!: wrong")
    return "; ".join(marks)
