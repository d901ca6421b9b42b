"""Looks a data set over: what is in it, what occurs twice, what of the test set has leaked into the training set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer, Shaped, UInt8, UInt64

from train_jax.run.untrusted import map_array
from train_jax.tasks.puzzles.arc import grid as arc
from train_jax.tasks.puzzles.arc.symmetry import canonical
from train_jax.tasks.puzzles.format import FIELDS, SPLITS, PuzzleSet, array_path, load_split
from train_jax.tasks.puzzles.hashing import mix
from train_jax.tasks.puzzles.maze import symmetry as maze_symmetry
from train_jax.tasks.puzzles.maze.check import are_shortest_paths, search
from train_jax.tasks.puzzles.maze.grid import are_mazes, maze_size_of
from train_jax.tasks.puzzles.progress import Progress
from train_jax.tasks.puzzles.sudoku import symmetry as sudoku_symmetry
from train_jax.tasks.puzzles.sudoku.grid import grids_of, is_solution, sudoku_of
from train_jax.tasks.puzzles.sudoku.rating import told
from train_jax.tasks.puzzles.sudoku.solver import solve
from train_jax.tasks.puzzles.writing import content_sha256, read_recipe

BLOCK = 4096
LOOKED_AT = 2000
"""Puzzles whose solutions are counted, and augmentations that are compared with their original."""

Facts = dict[str, Any]
Marks = Callable[[Integer[np.ndarray, "examples"]], Shaped[np.ndarray, "examples"]]


def inspect(directory: str | Path, progress: Progress) -> dict[str, Facts]:
    """Facts by heading: of the whole, of each split, and between the two. Raises `UserError` for no data set."""
    directory = Path(directory)
    sets = {split: load_split(directory, split) for split in SPLITS}
    facts = {"data set": _whole(directory, sets, progress)}
    rows = {}
    for split, puzzles in sets.items():
        progress(f"{split} examples", 0, puzzles.num_examples)
        rows[split] = row_marks(puzzles.inputs), row_marks(puzzles.labels)
        facts[split] = _counts(puzzles) | _repeated(*rows[split]) | _by_kind(puzzles)
    facts["between train and test"] = _leaks(sets, rows["train"][0], rows["test"][0])
    return facts


def kind_of(puzzles: PuzzleSet) -> str:
    """In words."""
    data, geometry, size = puzzles.metadata, sudoku_of(puzzles.metadata), maze_size_of(puzzles.metadata)
    if geometry is not None:
        return f"{geometry} Sudokus"
    if size is not None:
        return f"{size}x{size} mazes"
    return "ARC puzzles" if arc.holds_arc(puzzles.metadata) else f"{data.seq_len} tokens of {data.vocab_size} kinds"


def row_marks(rows: Integer[np.ndarray, "n cells"]) -> UInt64[np.ndarray, "n"]:
    """A number for every row, equal for equal rows; by chance for others at 2**-64 a pair."""
    n, cells = rows.shape
    marks = np.empty(n, np.uint64)
    salts = mix(np.arange(-(-cells // 4), dtype=np.uint64))
    for start in range(0, n, BLOCK):
        # Two bytes for a token: vocabularies may be large.
        block = rows[start : start + BLOCK].astype(np.uint16, order="C")
        words = np.pad(block, ((0, 0), (0, -cells % 4))).view(np.uint64)
        marks[start : start + BLOCK] = mix(words + salts).sum(axis=1)
    return marks


def originals_of(puzzles: PuzzleSet) -> Integer[np.ndarray, "groups"]:
    """The first example of every group."""
    return puzzles.puzzle_indices[puzzles.group_indices[:-1]]


def _whole(directory: Path, sets: dict[str, PuzzleSet], progress: Progress) -> Facts:
    files = [path for path in directory.rglob("*") if path.is_file()]
    facts: Facts = {
        "kind": kind_of(sets["train"]),
        "size on disk": f"{sum(path.stat().st_size for path in files) / 1e6:,.1f} MB in {len(files)} files",
    }
    record = read_recipe(directory)
    if record is None:
        return facts | {"recipe": "none: not made here"}
    for name, value in record["recipe"].items():
        facts |= {f"recipe: {one_line(name)}": one_line(value)}
    if all(len(puzzles.metadata.sets) == 1 for puzzles in sets.values()):
        progress("hashing", 0, 0)
        same = content_sha256(_on_disk(directory, sets)) == record.get("content_sha256")
        facts["content"] = "as it was written (SHA-256)" if same else "CHANGED since it was written (SHA-256)"
    return facts


def one_line(value: Any) -> str:
    """A recipe's value, of hashes only the beginning; a recipe is a file, and may hold anything."""
    if isinstance(value, dict):
        value = ", ".join(f"{key} {str(each)[:12]}" for key, each in value.items())
    shown = str(value)[:500]
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)[:500]


def _on_disk(directory: Path, sets: dict[str, PuzzleSet]) -> dict[str, Any]:
    """The arrays as they lie there: what is loaded may have another type."""

    def arrays(split: str) -> dict[str, np.ndarray]:
        paths = {field: array_path(directory / split, sets[split].metadata, field) for field in FIELDS}
        return {field: map_array(path) for field, path in paths.items()}

    return {split: (puzzles.metadata, arrays(split)) for split, puzzles in sets.items()}


def _counts(puzzles: PuzzleSet) -> Facts:
    copies = np.diff(puzzles.group_indices)
    each = np.diff(puzzles.puzzle_indices)
    return {
        "puzzles": f"{puzzles.num_groups:,}",
        "with augmentations": f"{puzzles.num_puzzles:,} ({_range(copies)} of each)",
        "examples": f"{puzzles.num_examples:,} ({_range(each)} of each)",
        "puzzle identifiers": f"{len(np.unique(puzzles.puzzle_identifiers)):,}",
    }


def _range(numbers: Integer[np.ndarray, "n"]) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _repeated(inputs: UInt64[np.ndarray, "n"], labels: UInt64[np.ndarray, "n"]) -> Facts:
    pairs = mix(inputs) + labels
    distinct, distinct_inputs = len(np.unique(pairs)), len(np.unique(inputs))
    return {
        "examples that repeat another": f"{len(pairs) - distinct:,}",
        "inputs with several labels": f"{distinct - distinct_inputs:,} more labels than inputs",
    }


def _by_kind(puzzles: PuzzleSet) -> Facts:
    first = originals_of(puzzles)
    some = first[np.linspace(0, len(first) - 1, min(LOOKED_AT, len(first))).astype(int)]
    if sudoku_of(puzzles.metadata) is not None:
        return _sudokus(puzzles, first, some)
    if maze_size_of(puzzles.metadata) is not None:
        return _mazes(puzzles, some)
    return {}


def _sudokus(puzzles: PuzzleSet, first: np.ndarray, some: np.ndarray) -> Facts:
    geometry = sudoku_of(puzzles.metadata)
    assert geometry is not None
    questions, answers = (grids_of(array[first]) for array in (puzzles.inputs, puzzles.labels))
    right = is_solution(answers, geometry) & ((questions == 0) | (questions == answers)).all(axis=1)
    found = solve(grids_of(puzzles.inputs[some]), geometry)
    unique = found.counts == 1
    return {
        "empty cells": _range((questions == 0).sum(axis=1)),
        "labels that solve nothing": f"{(~right).sum():,}",
        "puzzles without exactly one solution": f"{(~unique).sum():,} of {len(some):,} looked at",
        "difficulty": f"{told(found.guesses[unique])}, of {unique.sum():,} looked at" if unique.any() else "not known",
    } | _unlike_their_original(puzzles, lambda rows: sudoku_symmetry.fingerprints(_digits(puzzles, rows), geometry))


def _mazes(puzzles: PuzzleSet, some: np.ndarray) -> Facts:
    good = are_mazes(_tokens(puzzles.inputs, some))
    if not good.all():
        return {"inputs that are no mazes": f"{(~good).sum():,} of {len(some):,} looked at"}
    questions, answers = (_tokens(array, some) for array in (puzzles.inputs, puzzles.labels))
    found = search(questions)
    wrong = ~are_shortest_paths(questions, answers, found)
    return {
        "steps of the shortest path": _range(found.steps),
        "labels that are no shortest path": f"{wrong.sum():,} of {len(some):,} looked at",
        "mazes with several shortest paths": f"{(~found.unique).sum():,} of {len(some):,} looked at",
    } | _unlike_their_original(puzzles, lambda rows: maze_symmetry.fingerprints(_tokens(puzzles.inputs, rows)))


def _digits(puzzles: PuzzleSet, rows: Integer[np.ndarray, "n"]) -> UInt8[np.ndarray, "n cells"]:
    return grids_of(puzzles.inputs[rows])


def _tokens(
    array: Integer[np.ndarray, "examples cells"], rows: Integer[np.ndarray, "n"]
) -> UInt8[np.ndarray, "n cells"]:
    return array[rows].astype(np.uint8)


def _unlike_their_original(puzzles: PuzzleSet, marks: Marks) -> Facts:
    """Augmentations that are no symmetry of the first puzzle of their group."""
    if puzzles.num_examples == puzzles.num_groups:
        return {}
    some = np.linspace(0, puzzles.num_examples - 1, LOOKED_AT).astype(int)
    owner = np.searchsorted(originals_of(puzzles), some, side="right") - 1
    unlike = marks(some) != marks(originals_of(puzzles)[owner])
    return {"augmentations that are no symmetry of their original": f"{unlike.sum():,} of {LOOKED_AT:,} looked at"}


def _leaks(sets: dict[str, PuzzleSet], train: UInt64[np.ndarray, "n"], test: UInt64[np.ndarray, "m"]) -> Facts:
    facts: Facts = {"test inputs that are also train inputs": f"{np.isin(test, train).sum():,} of {len(test):,}"}
    marks = {split: _symmetry_marks(puzzles) for split, puzzles in sets.items()}
    if marks["train"] is None or marks["test"] is None or kind_of(sets["train"]) != kind_of(sets["test"]):
        return facts | {"the same under the puzzle's symmetries": "not known for this kind of puzzle"}
    known = set(marks["train"])
    met = sum(mark in known for mark in marks["test"])
    if arc.holds_arc(sets["test"].metadata):
        what = "test examples that are a symmetry of a train one, of the same puzzle or another"
    else:
        what = "test puzzles that are a symmetry of a train one"
    return facts | {what: f"{met:,} of {len(marks['test']):,}"}


def _symmetry_marks(puzzles: PuzzleSet) -> list[Any] | None:
    """For every original a value that no symmetry of its kind changes; of ARC for each of its examples."""
    geometry, first = sudoku_of(puzzles.metadata), originals_of(puzzles)
    if geometry is not None:
        return sudoku_symmetry.fingerprints(_digits(puzzles, first), geometry).tolist()
    if maze_size_of(puzzles.metadata) is not None:
        return maze_symmetry.fingerprints(_tokens(puzzles.inputs, first)).tolist()
    if not arc.holds_arc(puzzles.metadata):
        return None
    ends = puzzles.puzzle_indices[puzzles.group_indices[:-1] + 1]
    rows = np.concatenate([np.arange(start, end) for start, end in zip(first, ends, strict=True)])
    grids = ([_arc_grid(canvas) for canvas in array[rows]] for array in (puzzles.inputs, puzzles.labels))
    return [canonical(arc.Example(*pair)) for pair in zip(*grids, strict=True)]


def _arc_grid(canvas: Integer[np.ndarray, "900"]) -> arc.Grid:
    """The rectangle of colours, wherever on the canvas it lies; one black cell where there is none."""
    canvas = canvas.reshape(arc.SIDE, arc.SIDE)
    rows, cols = (np.flatnonzero((canvas >= arc.FIRST_COLOUR_TOKEN).any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return arc.UNKNOWN
    grid = canvas[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1].astype(np.uint8)
    return np.maximum(grid, arc.FIRST_COLOUR_TOKEN) - np.uint8(arc.FIRST_COLOUR_TOKEN)
