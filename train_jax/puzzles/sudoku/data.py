"""`trm build-data sudoku`: data sets of generated puzzles, or from the public Sudoku-Extreme tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Integer, Shaped, UInt8
from tyro.conf import arg

from models_torch.ranges import Choices, Range
from train_jax.errors import UserError
from train_jax.puzzles.building import (
    Augmentations,
    RuleSetData,
    TableRow,
    bad_row,
    check_room,
    equivalents,
    problem_with,
    read_rows,
    reject_options,
    split_of,
    subsample,
)
from train_jax.puzzles.metadata import Metadata, Splits
from train_jax.puzzles.sudoku.generator import Originals, generate
from train_jax.puzzles.sudoku.grid import GEOMETRIES, Geometry, geometry_of_size, is_solution, tokens_of
from train_jax.puzzles.sudoku.kind import SudokuKind
from train_jax.puzzles.sudoku.solver import describe_guesses, ratings, solve
from train_jax.puzzles.sudoku.symmetry import augment, fingerprints
from train_jax.storage.new_dataset import Progress

NUM_EMPTY = {4: 8, 6: 18, 9: 50}
TABLE_GEOMETRY = GEOMETRIES[9]
ROWS = 65_536
"""Number of rows of a table that are processed at a time."""
AUGMENTED_AT_ONCE = 2**17


@dataclass(frozen=True)
class SudokuData(RuleSetData):
    """Sudokus with exactly one solution: generated or, with --source, from the public Sudoku-Extreme tables.

    No two generated puzzles are equivalent. A data set with the same options is kept.
    """

    output_dir: Annotated[Path | None, arg(help_behavior_hint="(default: data/sudoku-9x9)")] = None
    """Output folder, or gs://bucket/folder."""
    source: Annotated[str | None, arg(help_behavior_hint="")] = None
    """Tables: folder, bucket (gs://…) or hub id, such as sapientinc/sudoku-extreme."""
    num_aug: Augmentations = 0
    """Number of random symmetries of every train puzzle to add."""
    min_difficulty: Annotated[int | None, Range(0, 10**6), arg(help_behavior_hint="(default: any)")] = None
    """Least difficulty: in guesses, or with --source in the rating of the tables."""
    size: Annotated[int, Choices(tuple(GEOMETRIES))] = 9
    """Generated: number of rows, 4, 6 or 9."""
    num_empty: Annotated[int | None, Range(0, 81), arg(help_behavior_hint="(default: 8, 18, 50 by size)")] = None
    """Generated: number of empty cells; with --min-difficulty as many as possible."""

    MAKER = "sudoku"
    HUB_EXAMPLE = "sapientinc/sudoku-extreme"

    @property
    def directory(self) -> Path:
        name = f"sudoku-{self.size}x{self.size}" if self.source is None else "sudoku-extreme"
        return self.output_dir or Path("data") / name

    def check(self) -> None:
        geometry_of_size(self.size)
        super().check()
        if self.source is not None:
            reject_options(self, "does not go with --source", "num_empty")
            if self.size != 9:
                raise UserError(f"--size {self.size} with --source: the tables contain 9x9 Sudokus; omit --size")

    @property
    def empty_cells(self) -> int | None:
        """Number of empty cells of a generated puzzle; None for as many as each grid allows."""
        if self.num_empty is None and self.min_difficulty is None:
            return NUM_EMPTY[self.size]
        return self.num_empty

    @property
    def recipe(self) -> dict[str, Any]:
        difficulty = {"min_difficulty": self.min_difficulty}
        last = {"num_aug": self.num_aug, "seed": self.seed}
        if self.source is not None:
            return {"subsample_size": self.subsample_size} | difficulty | last
        num_train, num_test = self.counts(self.size)
        counts = {"size": self.size, "num_train": num_train, "num_test": num_test, "num_empty": self.empty_cells}
        # Absent by default, so that recipes older than this option still match.
        return counts | last | ({} if self.min_difficulty is None else difficulty)

    def splits(self, tables: Mapping[str, Path], progress: Progress) -> tuple[Splits, dict[str, Any]]:
        rng = np.random.default_rng(self.seed)
        make = self._from_tables if tables else self._generated
        originals, findings = make(tables, rng, progress)
        geometry = geometry_of_size(self.size)
        num_aug = {"train": self.num_aug, "test": 0}
        splits = {
            split: split_arrays(originals[split], geometry, num_aug=num_aug[split], rng=rng, progress=progress)
            for split in originals
        }
        return splits, findings

    def _generated(
        self, tables: Mapping[str, Path], rng: np.random.Generator, progress: Progress
    ) -> tuple[dict[str, Originals], dict[str, Any]]:
        geometry, (train, test) = geometry_of_size(self.size), self.counts(self.size)
        check_room(self.directory, SudokuKind(geometry), train=train, test=test, copies=1 + self.num_aug)
        least = self.min_difficulty or 0
        made = generate(train + test, self.empty_cells, geometry, rng, min_difficulty=least, progress=progress)
        parts = {"train": slice(train), "test": slice(train, None)}
        originals = {split: Originals(*(array[part] for array in made)) for split, part in parts.items()}
        difficulty = {split: ratings(each.puzzles, geometry) for split, each in originals.items()}
        return originals, {f"{split}_difficulty": describe_guesses(each) for split, each in difficulty.items()}

    def _from_tables(
        self, tables: Mapping[str, Path], rng: np.random.Generator, progress: Progress
    ) -> tuple[dict[str, Originals], dict[str, Any]]:
        """Reads the tables. `min_difficulty` refers to their rating.

        A solver verifies that every selected puzzle has exactly one solution. The public test set is not filtered for
        equivalent puzzles; the findings have an upper bound of the number of test puzzles that are equivalent to a
        train puzzle (their fingerprints are equal), and the difficulty, as rated in the tables and by guesses.
        """
        read = {split: read_table(path, self.min_difficulty, progress) for split, path in tables.items()}
        if self.subsample_size is not None:
            read["train"] = read["train"].rows(subsample(len(read["train"].puzzles), self.subsample_size, rng))
        counts = {split: len(table.puzzles) for split, table in read.items()}
        check_room(self.directory, SudokuKind(TABLE_GEOMETRY), **counts, copies=1 + self.num_aug)
        findings: dict[str, Any] = {}
        for split, path in tables.items():
            own = read[split].ratings
            guesses = guesses_of(path, read[split], progress)
            findings[f"{split}_difficulty"] = describe_guesses(guesses)
            findings[f"{split}_rating_in_the_table"] = (
                f"{own.min()} to {own.max()}, mean {own.mean():.1f}, median {np.median(own):g}"
            )
        findings |= equivalents(*(fingerprints(table.puzzles, TABLE_GEOMETRY) for table in read.values()))
        return {split: Originals(table.puzzles, table.solutions) for split, table in read.items()}, findings


def split_arrays(
    originals: Originals, geometry: Geometry, *, num_aug: int, rng: np.random.Generator, progress: Progress
) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Returns the arrays of a split. A group is an original followed by `num_aug` random equivalent puzzles."""
    count = len(originals.puzzles)
    copies = 1 + num_aug
    inputs, labels = (np.empty((count, copies, geometry.cells), np.uint8) for _ in range(2))
    inputs[:, 0] = tokens_of(originals.puzzles)
    labels[:, 0] = tokens_of(originals.solutions)
    step = max(1, AUGMENTED_AT_ONCE // copies)
    for start in range(0, count if num_aug else 0, step):
        part = slice(start, min(start + step, count))
        puzzles, solutions = (np.repeat(array[part], num_aug, axis=0) for array in originals)
        puzzles, solutions = augment(puzzles, solutions, geometry, rng)
        inputs[part, 1:] = tokens_of(puzzles).reshape(-1, num_aug, geometry.cells)
        labels[part, 1:] = tokens_of(solutions).reshape(-1, num_aug, geometry.cells)
        progress("augmented examples", part.stop * copies, count * copies)
    return split_of(inputs, labels, SudokuKind(geometry))


# ---- tables


class Table(NamedTuple):
    """Rows of a table, with their line numbers."""

    puzzles: UInt8[np.ndarray, "n cells"]
    solutions: UInt8[np.ndarray, "n cells"]
    ratings: Integer[np.ndarray, "n"]
    lines: Integer[np.ndarray, "n"]

    def rows(self, chosen: Shaped[np.ndarray, "m"] | slice) -> "Table":
        return Table(*(array[chosen] for array in self))


def read_table(path: Path, min_difficulty: int | None, progress: Progress) -> Table:
    """Reads the rows of a table whose rating is at least `min_difficulty`.

    Every row is checked, also the rows that `min_difficulty` removes. Raises `UserError` with the file, the line and
    the error. Puzzles with several solutions are detected by `guesses_of`, not here.
    """
    remedy = "use the Sudoku-Extreme tables"
    parts = read_rows(path, _read_chunk, _problem_with, rows=ROWS, remedy=remedy, progress=progress)
    hard = [part.rows(part.ratings >= (min_difficulty or 0)) for part in parts]
    if not sum(len(part.puzzles) for part in hard):
        raise UserError(f"{path} has no puzzle of at least difficulty {min_difficulty}; use a lower --min-difficulty")
    return Table(*map(np.concatenate, zip(*hard, strict=True)))


def guesses_of(path: Path, table: Table, progress: Progress) -> Integer[np.ndarray, "n"]:
    """Returns the difficulty of each puzzle (`solver.py`). Raises `UserError` for a puzzle with several solutions.

    A hard puzzle takes about 0.1 ms, so the caller should remove unused rows first.
    """
    guesses = [np.empty(0, np.int64)]
    for start in range(0, len(table.puzzles), ROWS):
        part = table.rows(slice(start, start + ROWS))
        solutions = solve(part.puzzles, TABLE_GEOMETRY, limit=2)
        several = np.flatnonzero(solutions.counts != 1)
        if len(several):
            raise bad_row(path, int(part.lines[several[0]]), "the question has more than one solution")
        guesses.append(solutions.guesses)
        progress(f"puzzles of {path.name} solved", start + len(part.puzzles), len(table.puzzles))
    return np.concatenate(guesses)


def _read_chunk(chunk: Sequence[TableRow]) -> tuple[Table, dict[str, np.ndarray]]:
    """Returns well-formed rows, and masks of the wrong ones by description."""
    _, questions, answers, rated = zip(*(row for _, row in chunk), strict=True)
    puzzles = _digits(questions)
    solutions = _digits(answers)
    faults = {
        "the question contains a character that is neither a digit nor '.'": (puzzles > 9).any(axis=1),
        "the answer is not a solved Sudoku": ~_is_solved(solutions),
        "the answer does not agree with the question": ((puzzles > 0) & (puzzles != solutions)).any(axis=1),
    }
    return Table(puzzles, solutions, np.array([*map(int, rated)]), np.array([line for line, _ in chunk])), faults


def _problem_with(row: list[str]) -> str:
    problem = problem_with(row, TABLE_GEOMETRY.cells)
    if not problem and not (row[3].strip().isdecimal() and len(row[3]) < 18):
        return f"the rating is {row[3][:40]!r}, expected a whole number"
    return problem


def _digits(texts: tuple[str, ...]) -> np.ndarray:
    """Returns the digits of the cells, 0 for '.', and a number above 9 for any other character."""
    codes = np.frombuffer("".join(texts).encode("latin-1"), np.uint8).reshape(len(texts), TABLE_GEOMETRY.cells)
    return np.where(codes == ord("."), np.uint8(0), codes - np.uint8(ord("0")))


def _is_solved(grids: np.ndarray) -> np.ndarray:
    in_range = (grids <= 9).all(axis=1)
    return in_range & is_solution(np.where(grids <= 9, grids, np.uint8(0)), TABLE_GEOMETRY)
