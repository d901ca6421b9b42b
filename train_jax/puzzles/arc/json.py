"""Reads the official ARC files (`…_{subset}_challenges.json`, `…_{subset}_solutions.json`) or one file for each task,
strictly."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train_jax.errors import UserError, brief
from train_jax.puzzles.arc.grid import COLOURS, SIDE, UNKNOWN, ColourGrid, Example, Puzzle
from train_jax.puzzles.metadata import dataset_folder
from train_jax.storage.untrusted import DamagedError, read_whole

LARGEST_FILE_BYTES = 2**25
"""Eight times the largest official file. Parsing a list of empty lists takes about thirty times the file's size."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
REMEDY = "use the official ARC files"


@dataclass(frozen=True, eq=False)
class Subset:
    """The puzzles of one subset, read from its challenges file and its solutions file, or from a folder."""

    name: str
    puzzles: list[Puzzle]
    sha256: dict[str, str]
    """Maps each file name to the hash of the file; a folder has one hash of the names and contents of its files."""


def find_files(source: str | Path, subset: str) -> tuple[Path, Path]:
    """Returns the paths of the challenges and the solutions of a subset; the solutions file need not exist.

    `source` is the folder of the files, or the common beginning of their paths.
    """
    if not NAME.fullmatch(subset):
        raise UserError(f"subset {subset[:80]!r} is not a valid name; use training, evaluation, concept or the like")
    source = Path(source)
    ending = f"_{subset}_challenges.json"
    paths = sorted(source.glob(f"*{ending}")) if source.is_dir() else [source.with_name(source.name + ending)]
    if len(paths) > 1:
        raise UserError(
            f"{source} contains both {paths[0].name} and {paths[1].name}, expected one; set --source to the beginning "
            f"of the path, such as {source / paths[0].name.removesuffix(ending)}"
        )
    if not paths or not paths[0].is_file():
        raise UserError(
            f"{paths[0] if paths else source / f'*{ending}'} is missing; set --source to the folder of the official "
            "ARC files (arc-agi_training_challenges.json and so on), or to one with a folder for each of --subsets, "
            f"such as {subset}, with one JSON file for each task"
        )
    return paths[0], paths[0].with_name(paths[0].name.removesuffix("challenges.json") + "solutions.json")


def read_subset(source: str | Path, subset: str) -> Subset:
    """Reads all puzzles of a subset, in the order of the file. Raises `UserError` for the first error in the files.

    A folder `source/subset` has one file for each task, as in the repository of ARC-AGI: in the order of their names.
    """
    if NAME.fullmatch(subset) and (Path(source) / subset).is_dir():
        return _read_folder(Path(source) / subset)
    path, solutions_path = find_files(source, subset)
    puzzles = {}
    digests = {}
    content, digests[path.name] = _read_json(path)
    solutions: dict[str, Any] | None = None
    if solutions_path.is_file():
        solutions, digests[solutions_path.name] = _read_json(solutions_path)
    if not content:
        raise UserError(f"{path} contains no puzzles; {REMEDY}")
    for name, puzzle in content.items():
        puzzles[name] = _puzzle(path, name, puzzle, solved=False)
        if solutions is not None:
            puzzles[name] = _solved(solutions_path, puzzles[name], solutions)
    return Subset(subset, list(puzzles.values()), digests)


def _read_folder(folder: Path) -> Subset:
    puzzles = []
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.json")):
        content, of_file = _load_json(path)
        puzzles.append(_task(path, content))
        digest.update(f"{path.name} {of_file}\n".encode())
    if not puzzles:
        raise UserError(f"{folder} contains no puzzles (*.json); {REMEDY}")
    return Subset(folder.name, puzzles, {f"{folder.name}/*.json": digest.hexdigest()})


def _read_json(path: Path) -> tuple[dict[str, Any], str]:
    content, digest = _load_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an object of puzzles by name, found a {type(content).__name__}; {REMEDY}")
    return content, digest


def _load_json(path: Path) -> tuple[Any, str]:
    try:
        raw = read_whole(path, largest_bytes=LARGEST_FILE_BYTES)
    except (FileNotFoundError, DamagedError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} cannot be read ({reason}); {REMEDY}") from None
    try:
        content = json.loads(raw, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({str(error)[:100]}); {REMEDY}") from None
    return content, hashlib.sha256(raw).hexdigest()


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"{name[:40]!r} occurs twice in an object")
        content[name] = value
    return content


def read_test_puzzles(directory: str | Path) -> list[Puzzle]:
    """Reads the `test_puzzles.json` of a data set; a solution that is not public is stored as one black cell."""
    path = dataset_folder(directory) / "test_puzzles.json"
    if not path.is_file():
        raise UserError(f"{path} is missing; voting needs an ARC data set built by `trm build-data arc`")
    content, _ = _read_json(path)
    if not content:
        raise UserError(f"{path} contains no puzzles; build the data set again with `trm build-data arc`")
    return [_puzzle(path, name, puzzle, solved=True) for name, puzzle in content.items()]


def read_task(path: Path) -> Puzzle:
    """Reads a file of one task: an object with "train" and "test". The stem of the file is the name of the puzzle."""
    content, _ = _read_json(path)
    return _puzzle(path, path.stem, content, solved=False)


def _task(path: Path, content: Any) -> Puzzle:
    """Converts the file of one task; a list of examples, as in re-arc, has no test examples."""
    if not isinstance(content, list):
        return _puzzle(path, path.stem, content, solved=False)
    where = _checked_name(path, path.stem)
    return Puzzle(path.stem, {"train": _section(where, "train", content, needs_output=True)})


def _puzzle(path: Path, name: str, puzzle: Any, *, solved: bool) -> Puzzle:
    where = _checked_name(path, name)
    if not isinstance(puzzle, dict) or set(puzzle) != {"train", "test"}:
        keys = sorted(puzzle) if isinstance(puzzle, dict) else type(puzzle).__name__
        raise UserError(f"{where}: expected an object with train and test, found {str(keys)[:80]}; {REMEDY}")
    return Puzzle(
        name,
        {
            section: _section(where, section, examples, needs_output=solved or section == "train")
            for section, examples in puzzle.items()
        },
    )


def _checked_name(path: Path, name: str) -> str:
    """Returns the place of a puzzle for messages. Raises `UserError` if its name is invalid."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"{path}: {name[:80]!r} is not a valid puzzle name, expected up to 64 letters, digits, dots, "
            f"dashes and underscores; {REMEDY}"
        )
    return f"{path}: puzzle {name}"


def _section(where: str, section: str, examples: Any, *, needs_output: bool) -> list[Example]:
    if not isinstance(examples, list) or not examples:
        found = "an empty list" if examples == [] else f"a {type(examples).__name__}"
        raise UserError(f"{where}: {section} is {found}, expected a list of examples; {REMEDY}")
    return [
        _example(f"{where}, {section} example {number}", example, needs_output=needs_output)
        for number, example in enumerate(examples, 1)
    ]


def _example(where: str, example: Any, *, needs_output: bool) -> Example:
    keys = set(example) if isinstance(example, dict) else set()
    if "input" not in keys or keys - {"input", "output"} or (needs_output and "output" not in keys):
        found = sorted(keys) if isinstance(example, dict) else type(example).__name__
        wanted = "input and output" if needs_output else "input, and output if it is known"
        raise UserError(f"{where}: expected an object with {wanted}, found {str(found)[:80]}; {REMEDY}")
    output = _grid(f"{where}: output", example["output"]) if "output" in example else UNKNOWN
    return Example(_grid(f"{where}: input", example["input"]), output)


def _solved(path: Path, puzzle: Puzzle, solutions: dict[str, Any]) -> Puzzle:
    where = f"{path}: puzzle {puzzle.name}"
    grids = solutions.get(puzzle.name)
    unsolved = puzzle.sections["test"]
    if not isinstance(grids, list) or len(grids) != len(unsolved):
        found = len(grids) if isinstance(grids, list) else "none"
        raise UserError(f"{where}: expected a list of {len(unsolved)} solutions, found {found}; {REMEDY}")
    answered = [
        Example(example.input, _grid(f"{where}, solution {number}", grid))
        for number, (example, grid) in enumerate(zip(unsolved, grids, strict=True), 1)
    ]
    return Puzzle(puzzle.name, {name: answered if name == "test" else part for name, part in puzzle.sections.items()})


def _grid(where: str, value: Any) -> ColourGrid:
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise UserError(f"{where} is not a list of rows; {REMEDY}")
    rows = len(value)
    cols = len(value[0]) if value else 0
    if not (1 <= rows <= SIDE and 1 <= cols <= SIDE):
        raise UserError(f"{where} has {rows} rows and {cols} columns, expected 1 to {SIDE} of each; {REMEDY}")
    for number, row in enumerate(value, 1):
        if len(row) != cols:
            raise UserError(f"{where}: row {number} has {len(row)} cells, expected {cols} as in the first; {REMEDY}")
        # `type`, because `isinstance(True, int)` is true.
        wrong = [cell for cell in row if type(cell) is not int or not 0 <= cell < COLOURS]
        if wrong:
            raise UserError(
                f"{where}: row {number} contains {brief(wrong[0])}, expected colours 0 to {COLOURS - 1}; {REMEDY}"
            )
    return np.array(value, np.uint8)
