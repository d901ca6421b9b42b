"""Reads the public Sudoku-Extreme tables; raises an error unless every answer is the only solution."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8

from train_jax.errors import UserError
from train_jax.tasks.progress import Progress
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES, is_solution
from train_jax.tasks.puzzles.sudoku.solver import solve
from train_jax.tasks.puzzles.tables import Row, bad_row, chunks_of, problem_with

GEOMETRY = GEOMETRIES[9]
HUB_EXAMPLE = "sapientinc/sudoku-extreme"
ROWS = 65_536
"""Rows of a table processed at a time."""


class Table(NamedTuple):
    """Rows of a table, with their line numbers."""

    puzzles: UInt8[np.ndarray, "n cells"]
    solutions: UInt8[np.ndarray, "n cells"]
    ratings: Integer[np.ndarray, "n"]
    lines: Integer[np.ndarray, "n"]

    def rows(self, chosen: Integer[np.ndarray, "m"] | slice) -> "Table":
        return Table(*(array[chosen] for array in self))


def read_table(path: Path, *, min_difficulty: int | None, progress: Progress) -> Table:
    """Reads the rows of a table whose rating is at least `min_difficulty`.

    Every row is checked, also the rows that `min_difficulty` removes. Raises `UserError` with the file, the line and
    the error. Puzzles with several solutions are detected by `guesses_of`, not here.
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
    """Returns the difficulty of each puzzle (`rating.py`). Raises `UserError` for a puzzle with several solutions.

    A hard puzzle takes about 0.1 ms, so the caller should remove unused rows first.
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
    """Parses and checks a chunk. The reported error is that of the first bad row, whichever check it fails."""
    good, problem = _checked_by_text(chunk)
    puzzle_texts, answer_texts, ratings = zip(*good, strict=True) if good else ((), (), ())
    puzzles, solutions = (_digits(texts) for texts in (puzzle_texts, answer_texts))
    faults = {
        "the question contains a character that is neither a digit nor '.'": (puzzles > 9).any(axis=1),
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
    """Returns puzzle, answer and rating of the rows before the first malformed one, and the error in that row."""
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
    """Returns the digits of the cells, 0 for '.', and a number above 9 for any other character."""
    codes = np.frombuffer("".join(texts).encode("latin-1"), np.uint8).reshape(len(texts), GEOMETRY.cells)
    return np.where(codes == ord("."), np.uint8(0), codes - np.uint8(ord("0")))


def _is_solved(grids: np.ndarray) -> np.ndarray:
    in_range = (grids <= 9).all(axis=1)
    return in_range & is_solution(np.where(grids <= 9, grids, np.uint8(0)), GEOMETRY)
