"""Reads the public maze tables; raises an error unless every answer is a shortest path."""

from pathlib import Path

import numpy as np

from train_jax.errors import UserError
from train_jax.tasks.progress import Progress
from train_jax.tasks.puzzles.maze.check import Paths, are_shortest_paths, search
from train_jax.tasks.puzzles.maze.grid import LARGEST, SMALLEST, Mazes, are_mazes, keeps_inputs, size_of, tokens_of
from train_jax.tasks.puzzles.tables import Row, bad_row, chunks_of, problem_with

HUB_EXAMPLE = "sapientinc/maze-30x30-hard-1k"
ROWS = 4096
"""Rows of a table processed at a time."""


def read_maze_table(path: Path, *, min_path: int | None, progress: Progress) -> Mazes:
    """Reads the mazes of a table whose shortest path has more than `min_path` steps.

    Every row is checked, also the rows that `min_path` removes. Raises `UserError` with the file, the line and the
    error. The rating column is not used; in the published data set it is the length of the path.
    """
    inputs, solutions = [], []
    cells = lines_read = 0
    for chunk in chunks_of(path, rows=ROWS, remedy=f"use the tables of {HUB_EXAMPLE}"):
        cells = cells or _cells_of(path, chunk[0])
        part, paths = _read_chunk(path, chunk, cells)
        hard = slice(None) if min_path is None else paths.steps > min_path
        inputs.append(part.inputs[hard])
        solutions.append(part.solutions[hard])
        lines_read += len(chunk)
        progress(f"rows of {path.name}", lines_read, 0)
    if not sum(map(len, inputs)):
        raise UserError(f"{path} has no maze with a path of more than {min_path} steps; use a lower --min-path")
    return Mazes(np.concatenate(inputs), np.concatenate(solutions))


def _cells_of(path: Path, row: Row) -> int:
    """Returns the number of cells of the first maze; all other mazes must have the same."""
    line, columns = row
    cells = len(columns[1]) if len(columns) > 1 else 0
    if size_of(cells) is None:
        squares = f"{SMALLEST}x{SMALLEST} to {LARGEST}x{LARGEST}"
        raise bad_row(path, line, f"the question has {cells} cells, expected a square of {squares}")
    return cells


def _read_chunk(path: Path, chunk: list[Row], cells: int) -> tuple[Mazes, Paths]:
    """Parses and checks a chunk. The reported error is that of the first bad row, whichever check it fails."""
    problems = [problem_with(row, cells) for _, row in chunk]
    formed = next((number for number, problem in enumerate(problems) if problem), len(chunk))
    mazes = Mazes(*(_tokens([row[column] for _, row in chunk[:formed]], cells) for column in (1, 2)))
    good = are_mazes(mazes.inputs)
    if not good.all():
        formed = int(np.argmin(good))
        problems[formed] = "the question does not consist of '#', ' ', one 'S' and one 'G'"
        mazes = Mazes(*(array[:formed] for array in mazes))
    paths = search(mazes.inputs)
    faults = {
        "the goal cannot be reached": paths.steps < 0,
        "the answer is not the question with some open cells as 'o'": ~keeps_inputs(*mazes),
        "the answer is not a shortest path": ~are_shortest_paths(*mazes, paths),
    }
    bad = np.flatnonzero(np.any(list(faults.values()), axis=0))
    if len(bad):
        raise bad_row(path, chunk[bad[0]][0], next(what for what, rows in faults.items() if rows[bad[0]]))
    if formed < len(chunk):
        raise bad_row(path, chunk[formed][0], problems[formed])
    return mazes, paths


def _tokens(texts: list[str], cells: int) -> np.ndarray:
    return tokens_of("".join(texts)).reshape(len(texts), cells)
