"""Tells of a data set which kind of puzzle it holds, and of an example how it is drawn."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Integer

from train_jax.tasks.puzzles.arc.grid import holds_arc
from train_jax.tasks.puzzles.arc.kind import ArcLook, arc_look_of, as_read
from train_jax.tasks.puzzles.format import Metadata
from train_jax.tasks.puzzles.kind import Look
from train_jax.tasks.puzzles.maze.grid import maze_size_of
from train_jax.tasks.puzzles.maze.kind import MazeLook
from train_jax.tasks.puzzles.sudoku.grid import sudoku_of
from train_jax.tasks.puzzles.sudoku.kind import SudokuLook
from train_jax.tasks.puzzles.trace import Trace


def look_of(data: Metadata) -> Look | None:
    """None where a data set holds nothing that is known here."""
    geometry, size = sudoku_of(data), maze_size_of(data)
    if geometry is not None:
        return SudokuLook(geometry)
    if size is not None:
        return MazeLook(size)
    return ArcLook() if holds_arc(data) else None


def look_at(look: Look, examples: Sequence[Integer[np.ndarray, "..."]]) -> Look:
    """The same kind, no larger than these canvases of tokens need."""
    return arc_look_of(examples) if isinstance(look, ArcLook) else look


def trace_of(
    look: Look,
    question: Integer[np.ndarray, "seq"],
    answers: Integer[np.ndarray, "steps seq"],
    q_halt_logits: Float[np.ndarray, "steps"],
    solution: Integer[np.ndarray, "seq"] | None,
) -> Trace:
    """Tokens as a trace; `look`: of the data set."""
    if isinstance(look, ArcLook) and solution is not None:
        answers = as_read(answers, solution)
    canvases = [question, answers] if solution is None else [question, answers, solution]
    look = look_at(look, canvases)
    values = None if solution is None else look.values(solution)
    return Trace(look, look.values(question), look.values(answers), q_halt_logits, values)
