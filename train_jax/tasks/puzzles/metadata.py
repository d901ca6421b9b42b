"""The JSON files of a data set: `dataset.json` with the sizes of a split, `identifiers.json` with puzzle names."""

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from train_jax.errors import UserError, brief
from train_jax.run.untrusted import DamagedError, read_whole

SPLITS = ("train", "test")
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Names of sets; they become part of a path."""
KIND_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
MAX_SETS = 64
MAX_NUMBER = 2**31
MAX_JSON_BYTES = 2**28
"""Several times the size of the identifiers of an ARC data set with 1000 augmentations."""
REBUILD = "build the data set again with `trm build-data`"


@dataclass(frozen=True)
class Metadata:
    """The fields of `dataset.json`, and the kind of puzzle, which is not part of the published format."""

    seq_len: int
    vocab_size: int
    pad_id: int
    ignore_label_id: int | None
    blank_identifier_id: int
    num_puzzle_identifiers: int
    total_groups: int
    mean_puzzle_examples: float
    total_puzzles: int
    """Counted like in the published builders: originals for Sudokus, augmentations included for ARC."""
    sets: tuple[str, ...]
    kind: str = ""
    """The key of the kind, such as `sudoku-9x9`, `maze-30` or `arc` (`kinds.py`); empty if it is not stated."""


def published_fields(metadata: Metadata) -> dict[str, Any]:
    """Returns the fields of `dataset.json` of a data set; the kind is stored in its `recipe.json`."""
    values = asdict(metadata)
    del values["kind"]
    return values


def check(holds: bool | np.bool_, path: Path, problem: str) -> None:
    """Raises `UserError` with the path and the problem unless the condition holds."""
    if not holds:
        raise UserError(f"{path}: {problem}; {REBUILD}")


def read_metadata(path: Path) -> Metadata:
    """Reads and checks a `dataset.json`; the file of a run also has the field `kind`."""
    return metadata_of(read_json(path), path)


def metadata_of(values: Any, path: Path = Path("dataset.json")) -> Metadata:
    """Like `read_metadata`, from parsed JSON; `path` is used in error messages."""
    check(isinstance(values, dict), path, f"expected an object, found a {type(values).__name__}")
    expected: dict[str, tuple[type, ...]] = {field.name: (int,) for field in fields(Metadata)}
    expected |= {"ignore_label_id": (int, NoneType), "mean_puzzle_examples": (int, float), "sets": (list,)}
    expected |= {"kind": (str,)}
    values = {field.name: field.default for field in fields(Metadata) if field.default is not MISSING} | values
    for name, types in expected.items():
        check(name in values, path, f"the field {name} is missing")
        check(
            isinstance(values[name], types) and not isinstance(values[name], bool),
            path,
            f"{name} is {brief(values[name])}, expected {' or '.join(each.__name__ for each in types)}",
        )
        small = not isinstance(values[name], int | float) or abs(values[name]) < MAX_NUMBER
        check(small, path, f"{name} is {brief(values[name])}, expected less than {MAX_NUMBER}")
    _check_values(path, values)
    values["sets"] = tuple(values["sets"])
    return Metadata(**{name: values[name] for name in expected})


def _check_values(path: Path, values: Mapping[str, Any]) -> None:
    names = values["sets"]
    check(
        0 < len(names) <= MAX_SETS and all(isinstance(name, str) and SET_NAME.fullmatch(name) for name in names),
        path,
        f"sets is {brief(names)}, expected names",
    )
    check(is_kind_key(values["kind"]), path, f"kind is {brief(values['kind'])}, expected a name such as sudoku-9x9")
    for name in ("seq_len", "vocab_size", "num_puzzle_identifiers", "total_groups"):
        check(values[name] > 0, path, f"{name} is {values[name]}, expected at least 1")
    for name, end in (("pad_id", "vocab_size"), ("blank_identifier_id", "num_puzzle_identifiers")):
        check(0 <= values[name] < values[end], path, f"{name} is {values[name]}, expected less than {end}")


def is_kind_key(value: Any) -> bool:
    """Returns whether a value from a file can be the key of a kind; an empty string means that none is stated."""
    return isinstance(value, str) and (value == "" or KIND_KEY.fullmatch(value) is not None)


def read_json(path: Path) -> Any:
    """Reads an untrusted JSON file of a data set. Raises `UserError` with the path and the reason."""
    try:
        return json.loads(read_whole(path, largest_bytes=MAX_JSON_BYTES))
    except (FileNotFoundError, DamagedError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} cannot be read ({reason}); {REBUILD}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({str(error)[:100]}); {REBUILD}") from None


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    path.write_text(json.dumps(value, indent=indent) + "\n")
