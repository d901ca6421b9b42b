"""Puzzles to ask a model: from a text, from a file, or out of a test set; each of the kind that the model knows."""

import dataclasses
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from train_jax.errors import UserError
from train_jax.run.untrusted import DamagedError, read_whole
from train_jax.tasks.puzzles.arc.canvas import Places, render
from train_jax.tasks.puzzles.arc.grid import UNKNOWN, Grid
from train_jax.tasks.puzzles.arc.json import read_task
from train_jax.tasks.puzzles.arc.kind import ArcKind
from train_jax.tasks.puzzles.arc.symmetry import ORIGINAL
from train_jax.tasks.puzzles.format import Metadata, load_split, read_identifiers
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.kinds import kind_of
from train_jax.tasks.puzzles.maze import grid as maze
from train_jax.tasks.puzzles.maze.check import on_shortest_paths, search
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.sudoku import grid as sudoku
from train_jax.tasks.puzzles.sudoku.kind import SudokuKind
from train_jax.tasks.puzzles.sudoku.solver import solve

LARGEST_TEXT_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Question:
    """A puzzle as tokens, with what is known of it."""

    name: str
    kind: Kind
    tokens: Integer[np.ndarray, "seq"]
    solution: Integer[np.ndarray, "seq"] | None
    unique: bool = True
    """Whether it has one solution."""
    puzzle_identifier: int | None = None


def from_text(text: str, kind: Kind) -> Question:
    """A Sudoku or a maze. Raises `UserError` for one that is none, has no solution, or is of another size."""
    if isinstance(kind, SudokuKind):
        return _sudoku(text, kind)
    if isinstance(kind, MazeKind):
        return _maze(text, kind)
    raise UserError("the model was trained on ARC puzzles; give --file TASK.json instead of --puzzle")


def _sudoku(text: str, kind: SudokuKind) -> Question:
    grid, geometry = sudoku.parse(text)
    if geometry != kind.geometry:
        raise UserError(
            f"the Sudoku is {geometry}, the model was trained on {kind.geometry}; give one of "
            f"{kind.geometry.cells} cells"
        )
    found = solve(grid[None], geometry)
    if not found.counts[0]:
        raise UserError(f"the {geometry} Sudoku given has no solution; correct the givens")
    unique = bool(found.counts[0] == 1)
    solution = sudoku.tokens_of(found.grids[0]) if unique else None
    return Question(f"{geometry} Sudoku given", kind, sudoku.tokens_of(grid), solution, unique)


def _maze(text: str, kind: MazeKind) -> Question:
    tokens = maze.parse(text)
    size = maze.size_of(len(tokens))
    if size != kind.size:
        raise UserError(
            f"the maze is {size}x{size}, the model was trained on {kind.name}s; give one of {kind.size} rows"
        )
    found = search(tokens[None])
    if found.steps[0] < 0:
        raise UserError(f"the {kind.name} given has no way from start to goal; open one")
    unique = bool(found.unique[0])
    solution = on_shortest_paths(tokens[None])[0] if unique else None
    return Question(f"{kind.name} given", kind, tokens, solution, unique)


def from_file(path: Path, kind: Kind, *, data_dir: str, index: int = 0) -> Question:
    """A text file with a Sudoku or a maze, or an ARC task as JSON; `index`: which of the task's test examples."""
    if isinstance(kind, ArcKind):
        return _arc(path, kind, data_dir, index)
    try:
        text = read_whole(path, largest_bytes=LARGEST_TEXT_BYTES).decode("utf-8")
    except (FileNotFoundError, DamagedError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} cannot be read ({reason}); give a text file with one puzzle") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text; give a text file with one puzzle") from None
    return dataclasses.replace(from_text(text, kind), name=f"{kind.name} in {path}")


def _arc(path: Path, kind: ArcKind, data_dir: str, index: int) -> Question:
    puzzle = read_task(path)
    names = read_identifiers(data_dir)
    if puzzle.name not in names:
        raise UserError(
            f"puzzle {puzzle.name} is none of those in {data_dir}, and a model knows a puzzle by the vector that it "
            "learned for it; give a file with the name of a puzzle that was trained on, such as 007bbfb7.json"
        )
    examples = puzzle.sections["test"]
    if not 0 <= index < len(examples):
        raise UserError(f"--index {index}: the task in {path} has test examples 0 to {len(examples) - 1}")
    example = examples[index]
    return Question(
        f"test example {index} of {path}",
        kind,
        _canvas(example.input),
        None if example.output is UNKNOWN else _canvas(example.output),
        puzzle_identifier=names.index(puzzle.name),
    )


def _canvas(grid: Grid) -> Integer[np.ndarray, "900"]:
    """In the corner, where tested grids lie."""
    return render([grid], ORIGINAL, Places(*np.zeros((2, 1, 1), np.intp)))[0]


def from_test_set(data_dir: str, index: int) -> Question:
    """Raises `UserError` where there is no such puzzle, or of no kind that can be drawn."""
    try:
        puzzles = load_split(data_dir, "test")
    except UserError as error:
        raise UserError(f"{error}; or give --puzzle TEXT or --file FILE, or another --data-dir") from error
    if not 0 <= index < puzzles.num_examples:
        raise UserError(f"--index {index}: the test set in {data_dir} has puzzles 0 to {puzzles.num_examples - 1}")
    owner = np.searchsorted(puzzles.puzzle_indices, index, side="right") - 1
    return Question(
        f"puzzle {index} of the test set in {data_dir}",
        known_kind(puzzles.metadata, f"{data_dir} holds"),
        puzzles.inputs[index],
        puzzles.labels[index],
        puzzle_identifier=int(puzzles.puzzle_identifiers[owner]),
    )


def known_kind(data: Metadata, whose: str) -> Kind:
    """Raises `UserError` for a data set that is of no kind known here; `whose`: how the message begins."""
    kind = kind_of(data)
    if kind is None:
        raise UserError(
            f"{whose} {data.seq_len} tokens of {data.vocab_size} kinds, which are no Sudokus, mazes or ARC puzzles; "
            "`trm solve` shows those only"
        )
    return kind
