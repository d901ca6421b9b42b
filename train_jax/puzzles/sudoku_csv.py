"""Reads the public Sudoku-Extreme tables, strictly."""

from pathlib import Path

import numpy as np

from train_jax.errors import UserError
from train_jax.puzzles.progress import Progress
from train_jax.puzzles.sudoku import GEOMETRIES, is_solution
from train_jax.puzzles.sudoku_generator import Originals
from train_jax.puzzles.tables import Row, bad_row, chunks_of, problem_with

GEOMETRY = GEOMETRIES[9]
HUB_EXAMPLE = "sapientinc/sudoku-extreme"
ROWS = 65_536
"""Of a table at a time."""


def read_table(path: Path, *, min_difficulty: int | None, progress: Progress) -> Originals:
    """The puzzles of a table whose rating is at least `min_difficulty`.

    Every row is checked, the ones left out too: `UserError` names the file, the line and what is wrong with it.
    """
    puzzles, solutions = [], []
    lines_read = 0
    for chunk in chunks_of(path, rows=ROWS, remedy="use the Sudoku-Extreme tables"):
        part, ratings = _read_chunk(path, chunk)
        hard = slice(None) if min_difficulty is None else ratings >= min_difficulty
        puzzles.append(part.puzzles[hard])
        solutions.append(part.solutions[hard])
        lines_read += len(chunk)
        progress(f"rows of {path.name}", lines_read, 0)
    if not sum(map(len, puzzles)):
        raise UserError(f"{path} has no puzzle of at least difficulty {min_difficulty}; use a lower --min-difficulty")
    return Originals(np.concatenate(puzzles), np.concatenate(solutions))


def _read_chunk(path: Path, chunk: list[Row]) -> tuple[Originals, np.ndarray]:
    """Checks a chunk column by column; the first bad row, whatever is wrong with it, is the one reported."""
    good, problem = _checked_by_text(chunk)
    questions, answers, ratings = zip(*good, strict=True) if good else ((), (), ())
    puzzles, solutions = (_digits(texts) for texts in (questions, answers))
    faults = {
        "the question holds a character that is neither a digit nor '.'": (puzzles > 9).any(axis=1),
        "the answer is not a solved Sudoku": ~_is_solved(solutions),
        "the answer does not agree with the question": ((puzzles > 0) & (puzzles != solutions)).any(axis=1),
    }
    bad = np.flatnonzero(np.any(list(faults.values()), axis=0))
    if len(bad):
        what = next(what for what, rows in faults.items() if rows[bad[0]])
        raise bad_row(path, chunk[bad[0]][0], what)
    if problem:
        raise bad_row(path, chunk[len(good)][0], problem)
    return Originals(puzzles, solutions), np.array(ratings)


def _checked_by_text(chunk: list[Row]) -> tuple[list[tuple[str, str, int]], str]:
    """Question, answer and rating of the rows up to the first one that is wrong in form, and what is wrong there."""
    good = []
    for _, row in chunk:
        problem = problem_with(row, GEOMETRY.cells)
        if problem:
            return good, problem
        _, question, answer, rating = row
        if not (rating.strip().isdecimal() and len(rating) < 18):
            return good, f"the rating is {rating[:40]!r}, expected a whole number"
        good.append((question, answer, int(rating)))
    return good, ""


def _digits(texts: tuple[str, ...]) -> np.ndarray:
    """Digits of the cells, 0 for '.'; anything else becomes a number above 9."""
    codes = np.frombuffer("".join(texts).encode("latin-1"), np.uint8).reshape(len(texts), GEOMETRY.cells)
    return np.where(codes == ord("."), np.uint8(0), codes - np.uint8(ord("0")))


def _is_solved(grids: np.ndarray) -> np.ndarray:
    in_range = (grids <= 9).all(axis=1)
    return in_range & is_solution(np.where(grids <= 9, grids, np.uint8(0)), GEOMETRY)
