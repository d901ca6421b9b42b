"""Reads the public Sudoku-Extreme tables (source,question,answer,rating), strictly, from a folder or the hub."""

import csv
import hashlib
import importlib
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from train_jax.errors import UserError
from train_jax.puzzles.sudoku import GEOMETRIES, is_solution
from train_jax.puzzles.sudoku_generator import Originals, Progress

GEOMETRY = GEOMETRIES[9]
COLUMNS = ["source", "question", "answer", "rating"]
CHUNK = 65_536
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

Row = tuple[int, list[str]]
"""The line that a row ends on, and its columns."""


def find_tables(source: str) -> dict[str, Path]:
    """The train and test tables of a folder, of one of the two files, or of a data set id of the Hugging Face hub."""
    path = Path(source)
    names = {"train": "train.csv", "test": "test.csv"}
    if path.is_file() and path.name in names.values():
        path = path.parent
    if path.is_dir():
        for name in names.values():
            if not (path / name).is_file():
                raise UserError(f"{path / name} is missing; --source needs train.csv and test.csv side by side")
        return {split: path / name for split, name in names.items()}
    if path.exists():
        raise UserError(f"--source {source} is neither a folder nor one of its files train.csv and test.csv")
    if not HUB_ID.fullmatch(source):
        raise UserError(
            f"--source {source} is not there; give a folder with train.csv and test.csv, or a data set of the "
            "Hugging Face hub such as sapientinc/sudoku-extreme"
        )
    return {split: _download(source, name) for split, name in names.items()}


def _download(hub_id: str, name: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            f"--source {hub_id} is no folder here, and fetching it from the hub needs `pip install huggingface_hub`; "
            "or download train.csv and test.csv by hand and give their folder"
        ) from None
    try:
        return Path(hub.hf_hub_download(hub_id, name, repo_type="dataset"))
    # The library raises what its HTTP client raises, which differs between its versions.
    except Exception as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(
            f"{name} of {hub_id} could not be fetched from the hub ({reason[0]}); check the id and the network, "
            "or give a folder with train.csv and test.csv"
        ) from None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_table(path: Path, *, min_difficulty: int | None, progress: Progress) -> Originals:
    """The puzzles of a table whose rating is at least `min_difficulty`.

    Every row is checked, the ones left out too: `UserError` names the file, the line and what is wrong with it.
    """
    puzzles, solutions = [], []
    lines_read = 0
    # Latin-1 takes any byte, so that a bad one is reported by its line and not by its offset in the file.
    with path.open(newline="", encoding="latin-1") as file:
        rows = _rows(path, csv.reader(file, strict=True))
        if next(rows, (1, []))[1] != COLUMNS:
            raise UserError(f"{path} line 1: expected the header {','.join(COLUMNS)}; use the Sudoku-Extreme tables")
        while chunk := list(islice(rows, CHUNK)):
            part, ratings = _read_chunk(path, chunk)
            hard = slice(None) if min_difficulty is None else ratings >= min_difficulty
            puzzles.append(part.puzzles[hard])
            solutions.append(part.solutions[hard])
            lines_read += len(chunk)
            progress(f"rows of {path.name}", lines_read, 0)
    if not lines_read:
        raise UserError(f"{path} has a header and no rows; use the Sudoku-Extreme tables")
    if not sum(map(len, puzzles)):
        raise UserError(f"{path} has no puzzle of at least difficulty {min_difficulty}; use a lower --min-difficulty")
    return Originals(np.concatenate(puzzles), np.concatenate(solutions))


def _rows(path: Path, reader) -> Iterator[Row]:
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise _bad_row(path, reader.line_num, str(error)) from None


def _bad_row(path: Path, line: int, problem: str) -> UserError:
    return UserError(f"{path} line {line}: {problem}; correct or remove the line, nothing was written")


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
        raise _bad_row(path, chunk[bad[0]][0], what)
    if problem:
        raise _bad_row(path, chunk[len(good)][0], problem)
    return Originals(puzzles, solutions), np.array(ratings)


def _checked_by_text(chunk: list[Row]) -> tuple[list[tuple[str, str, int]], str]:
    """Question, answer and rating of the rows up to the first one that is wrong in form, and what is wrong there."""
    good = []
    for _, row in chunk:
        if len(row) != len(COLUMNS):
            return good, f"{len(row)} columns, expected {len(COLUMNS)} ({','.join(COLUMNS)})"
        _, question, answer, rating = row
        for name, text in (("question", question), ("answer", answer)):
            if len(text) != GEOMETRY.cells:
                return good, f"the {name} has {len(text)} cells, expected {GEOMETRY.cells}"
        if not rating.strip().isdecimal():
            return good, f"the rating is {rating!r}, expected a whole number"
        good.append((question, answer, int(rating)))
    return good, ""


def _digits(texts: tuple[str, ...]) -> np.ndarray:
    """Digits of the cells, 0 for '.'; anything else becomes a number above 9."""
    codes = np.frombuffer("".join(texts).encode("latin-1"), np.uint8).reshape(len(texts), GEOMETRY.cells)
    return np.where(codes == ord("."), np.uint8(0), codes - np.uint8(ord("0")))


def _is_solved(grids: np.ndarray) -> np.ndarray:
    in_range = (grids <= 9).all(axis=1)
    return in_range & is_solution(np.where(grids <= 9, grids, np.uint8(0)), GEOMETRY)
