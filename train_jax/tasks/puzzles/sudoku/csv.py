"""Reads the public Sudoku-Extreme tables, strictly: every answer has to be the only one."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8

from train_jax.errors import UserError
from train_jax.tasks.puzzles.progress import Progress
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES, is_solution
from train_jax.tasks.puzzles.sudoku.solver import solve
from train_jax.tasks.puzzles.tables import Row, bad_row, chunks_of, problem_with

GEOMETRY = GEOMETRIES[9]
HUB_EXAMPLE = "sapientinc/sudoku-extreme"
ROWS = 65_536
"""Of a table at a time."""


class Table(NamedTuple):
    """Rows of a table, with the lines that they stand on."""

    puzzles: UInt8[np.ndarray, "n cells"]
    solutions: UInt8[np.ndarray, "n cells"]
    ratings: Integer[np.ndarray, "n"]
    lines: Integer[np.ndarray, "n"]

    def rows(self, chosen: Integer[np.ndarray, "m"] | slice) -> "Table":
        return Table(*(array[chosen] for array in self))


def read_table(path: Path, *, min_difficulty: int | None, progress: Progress) -> Table:
    """The rows of a table whose rating is at least `min_difficulty`.

    Every row is checked, the ones left out too: `UserError` names the file, the line and what is wrong with it. Only
    `guesses_of` finds a puzzle with several solutions.
    """
    parts = []
    lines_read = 0
    for chunk in chunks_of(path, rows=ROWS, remedy="use the Sudoku-Extreme tables"):
        part = _read_chunk(path, chunk)
        hard = slice(None) if min_difficulty is None else np.flatnonzero(part.ratings >= min_difficulty)
        parts.append(part.rows(hard))
        lines_read += len(chunk)
        progress(f"rows of {path.name}", lines_read, 0)
    if not sum(len(part.puzzles) for part in parts):
        raise UserError(f"{path} has no puzzle of at least difficulty {min_difficulty}; use a lower --min-difficulty")
    return Table(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def guesses_of(path: Path, table: Table, progress: Progress) -> Integer[np.ndarray, "n"]:
    """How hard each puzzle is (`rating.py`). Raises `UserError` for one that has another solution too.

    About 0.1 ms for a hard one, so rows that are not used are better left out before.
    """
    guesses = [np.empty(0, np.int64)]
    for start in range(0, len(table.puzzles), ROWS):
        part = table.rows(slice(start, start + ROWS))
        solutions = solve(part.puzzles, GEOMETRY, limit=2)
        several = np.flatnonzero(solutions.counts != 1)
        if len(several):
            raise bad_row(path, int(part.lines[several[0]]), "the question has more than one solution")
        guesses.append(solutions.guesses)
        progress(f"puzzles of {path.name} solved", start + len(part.puzzles), len(table.puzzles))
    return np.concatenate(guesses)


def _read_chunk(path: Path, chunk: list[Row]) -> Table:
    """Checks a chunk column by column; the first bad row, whatever is wrong with it, is the one reported."""
    good, problem = _checked_by_text(chunk)
    puzzle_texts, answer_texts, ratings = zip(*good, strict=True) if good else ((), (), ())
    puzzles, solutions = (_digits(texts) for texts in (puzzle_texts, answer_texts))
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
    return Table(puzzles, solutions, np.array(ratings), np.array([line for line, _ in chunk]))


def _checked_by_text(chunk: list[Row]) -> tuple[list[tuple[str, str, int]], str]:
    """Puzzle, answer and rating of the rows up to the first one that is wrong in form, and what is wrong there."""
    good = []
    for _, row in chunk:
        problem = problem_with(row, GEOMETRY.cells)
        if problem:
            return good, problem
        _, puzzle, answer, rating = row
        if not (rating.strip().isdecimal() and len(rating) < 18):
            return good, f"the rating is {rating[:40]!r}, expected a whole number"
        good.append((puzzle, answer, int(rating)))
    return good, ""


def _digits(texts: tuple[str, ...]) -> np.ndarray:
    """Digits of the cells, 0 for '.'; anything else becomes a number above 9."""
    codes = np.frombuffer("".join(texts).encode("latin-1"), np.uint8).reshape(len(texts), GEOMETRY.cells)
    return np.where(codes == ord("."), np.uint8(0), codes - np.uint8(ord("0")))


def _is_solved(grids: np.ndarray) -> np.ndarray:
    in_range = (grids <= 9).all(axis=1)
    return in_range & is_solution(np.where(grids <= 9, grids, np.uint8(0)), GEOMETRY)
