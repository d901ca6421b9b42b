"""Tells of a data set which kind of puzzle it holds, and of an example how it is drawn."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Integer

from train_jax.tasks.puzzles.arc.grid import holds_arc
from train_jax.tasks.puzzles.arc.kind import ArcKind, arc_kind_of, as_read
from train_jax.tasks.puzzles.format import Metadata
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.maze.grid import maze_size_of
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.sudoku.grid import sudoku_of
from train_jax.tasks.puzzles.sudoku.kind import SudokuKind
from train_jax.tasks.puzzles.trace import Trace


def kind_of(data: Metadata) -> Kind | None:
    """None where a data set holds nothing that is known here."""
    geometry, size = sudoku_of(data), maze_size_of(data)
    if geometry is not None:
        return SudokuKind(geometry)
    if size is not None:
        return MazeKind(size)
    return ArcKind() if holds_arc(data) else None


def fitted_kind(kind: Kind, examples: Sequence[Integer[np.ndarray, "..."]]) -> Kind:
    """The same kind, no larger than these canvases of tokens need."""
    return arc_kind_of(examples) if isinstance(kind, ArcKind) else kind


def trace_of(
    kind: Kind,
    question: Integer[np.ndarray, "seq"],
    answers: Integer[np.ndarray, "steps seq"],
    q_halt_logits: Float[np.ndarray, "steps"],
    solution: Integer[np.ndarray, "seq"] | None,
) -> Trace:
    """Tokens as a trace; `kind`: of the data set."""
    if isinstance(kind, ArcKind) and solution is not None:
        answers = as_read(answers, solution)
    canvases = [question, answers] if solution is None else [question, answers, solution]
    kind = fitted_kind(kind, canvases)
    values = None if solution is None else kind.values(solution)
    return Trace(kind, kind.values(question), kind.values(answers), q_halt_logits, values)
