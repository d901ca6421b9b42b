"""A puzzle's ACT steps as text for a terminal: the grids side by side, then a line for every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from train_jax.puzzles.sudoku import BOLD, PLAIN, RED, contradiction_in, render
from train_jax.report.trace import Trace, halting_probability

UNDERLINE = "\x1b[4m"
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
    columns = max(len(line) for line in render(trace.question, trace.geometry).splitlines())
    columns = max(columns, *(len(block[0]) for block in blocks))
    across = max(1, (width + len(_BETWEEN)) // (columns + len(_BETWEEN)))
    rows = [_beside(blocks[i : i + across], columns) for i in range(0, len(blocks), across)]
    return "\n\n".join([*rows, _legend(trace, styled), _table(trace)])


def verdict(trace: Trace, *, unique: bool = True) -> str:
    """One line: solved, or not and why. `unique`: whether the puzzle is known to have one solution."""
    last = trace.act_steps
    if trace.solved(last):
        since = trace.stretches[-1].first
        other = "" if unique else ", one of several solutions"
        return f"solved: every given kept, every row, column and box complete, since ACT step {since}{other}"
    grid = trace.grid(last)
    reasons = []
    if trace.wrong(last).any():
        reasons.append(f"{trace.wrong(last).sum()} of {trace.geometry.cells} cells wrong")
    if (grid != trace.question)[trace.givens].any():
        reasons.append(f"{(grid != trace.question)[trace.givens].sum()} of the givens overwritten")
    if (grid == 0).any():
        reasons.append(f"{(grid == 0).sum()} cells left empty")
    contradiction = contradiction_in(grid, trace.geometry)
    if contradiction:
        reasons.append(contradiction)
    return f"not solved: {', '.join(reasons)}"


def _drawn(trace: Trace, step: int, styled: bool) -> list[str]:
    """`render`'s lines with every cell marked; its n-th digit or dot is cell n."""
    wrong = trace.wrong(step)
    changed = trace.changed(step) if step else wrong
    mark = _ansi if styled else _plain
    cell, lines = 0, []
    for line in render(trace.grid(step), trace.geometry).splitlines():
        text = ""
        for i, character in enumerate(line):
            if character.isdigit() or character == ".":
                text += mark(character, bool(trace.givens[cell]), bool(changed[cell]), bool(wrong[cell]))
                cell += 1
            elif not (character == " " and i and (line[i - 1].isdigit() or line[i - 1] == ".")):
                text += character
        lines.append(text)
    return lines


def _ansi(character: str, given: bool, changed: bool, wrong: bool) -> str:
    codes = (BOLD if given else "") + (UNDERLINE if changed else "") + (RED if wrong else "")
    return (f"{codes}{character}{PLAIN}" if codes else character) + " "


def _plain(character: str, given: bool, changed: bool, wrong: bool) -> str:
    return character + ("!" if wrong else "*" if changed else " ")


def _beside(blocks: Sequence[Sequence[str]], columns: int) -> str:
    lines = zip(*blocks, strict=True)
    # Only the headings are short: a grid's lines are as wide as each other, whatever codes are in them.
    grid_columns = max(_visible(line) for block in blocks for line in block[1:])
    padded = [
        [part + " " * (columns - (len(part) if i == 0 else grid_columns)) for part in parts]
        for i, parts in enumerate(lines)
    ]
    return "\n".join(_BETWEEN.join(parts).rstrip() for parts in padded)


def _visible(line: str) -> int:
    for code in (BOLD, UNDERLINE, RED, PLAIN):
        line = line.replace(code, "")
    return len(line)


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
    marks = ["bold: given", "underlined: changed"] if styled else ["*: changed"]
    if trace.solution is not None:
        marks.append("red: wrong" if styled else "!: wrong")
    return "; ".join(marks)
