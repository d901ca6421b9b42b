"""Builds ARC data sets from small files, and reads their contents."""

import json
from pathlib import Path

import numpy as np

from support.arc_files import SUBSETS, write_files
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.arc.grid import CELLS, parse_names, sizes_of, undo
from train_jax.puzzles.format import PuzzleSet

ALL = tuple(SUBSETS)
TESTED = ("evaluation",)


def build(directory: Path, source: Path, **options) -> Path:
    chosen = {"subsets": ALL, "test_subsets": TESTED, "num_aug": 0, "seed": 5} | options
    assert ArcData(str(source), output_dir=directory, **chosen).build()
    return directory


def identifiers(directory: Path) -> list[str]:
    return json.loads((directory / "identifiers.json").read_text())


def in_corner(tokens: np.ndarray) -> np.ndarray:
    """Returns the canvases with their grids moved to the upper left corner."""
    canvases = tokens.reshape(-1, 30, 30)
    in_place = np.zeros_like(canvases)
    for before, after in zip(canvases, in_place, strict=True):
        rows, cols = np.nonzero(before >= 2)
        part = before[rows.min() :, cols.min() :]
        after[: part.shape[0], : part.shape[1]] = part
    return in_place.reshape(-1, CELLS)


def originals(tokens: np.ndarray, names: list[str]) -> list[list]:
    """Returns the grids of the canvases with their augmentations inverted; there is one name per canvas."""
    corner = in_corner(tokens)
    grids, rows, cols = undo(corner, *sizes_of(corner), parse_names(names)[1])
    return [grid.reshape(30, 30)[:r, :c].tolist() for grid, r, c in zip(grids, rows, cols, strict=True)]


def examples_by_name(puzzles: PuzzleSet, names: list[str]) -> dict[str, list[tuple[list, list]]]:
    """Maps the name of each puzzle to its examples, as grids of the original."""
    starts = puzzles.puzzle_indices
    of_example = [names[identifier] for identifier in np.repeat(puzzles.puzzle_identifiers, np.diff(starts))]
    pairs = list(zip(originals(puzzles.inputs, of_example), originals(puzzles.labels, of_example), strict=True))
    parts = zip(puzzles.puzzle_identifiers, starts[:-1], starts[1:], strict=True)
    return {names[identifier]: pairs[start:end] for identifier, start, end in parts}


def read_files(source: Path, subset: str) -> list[dict]:
    """Returns the challenges and the solutions of a subset."""
    return [json.loads((source / f"arc-agi_{subset}_{part}.json").read_text()) for part in ("challenges", "solutions")]


def copied(folder: Path, source: Path, **subsets: str) -> Path:
    """Copies the files of subsets to other names."""
    for subset, original in subsets.items():
        write_files(folder, subset, *read_files(source, original))
    return folder
