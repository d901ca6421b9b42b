"""Formats data sets for a terminal: the summary of a build, an inspection, and sample examples."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from train_jax.report.terminal import as_text, grid_text
from train_jax.tasks.puzzles.format import PuzzleSet, load_split, originals_of
from train_jax.tasks.puzzles.inspection import one_line
from train_jax.tasks.puzzles.kinds import kind_of
from train_jax.tasks.puzzles.metadata import SPLITS, read_recipe


def build_summary(directory: Path, built: bool, seconds: float) -> str:
    """Returns the sizes of the data set, the findings of its builder, and its hash."""
    lines = [f"{directory} " + (f"built in {seconds:.1f} s" if built else "already exists")]
    lines += [f"  {split:<5} {_counts(load_split(directory, split))}" for split in SPLITS]
    record = read_recipe(directory) or {}
    for name, value in record.get("findings", {}).items():
        if isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        lines.append(f"  {one_line(name.replace('_', ' '))}: {one_line(value)}")
    return "\n".join([*lines, f"  sha256 {one_line(record.get('content_sha256'))}"])


def _counts(puzzles: PuzzleSet) -> str:
    text = f"{puzzles.num_groups:>9,} puzzles, "
    if puzzles.num_puzzles not in (puzzles.num_groups, puzzles.num_examples):
        text += f"{puzzles.num_puzzles:>11,} with augmentations, "
    text += f"{puzzles.num_examples:>11,} examples"
    kind = puzzles.kind
    summary = "" if kind is None else kind.summary(puzzles.inputs[originals_of(puzzles)])
    return f"{text}, {summary}" if summary else text


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
