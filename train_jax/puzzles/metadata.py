"""The JSON files of a data set, the hashes of its content, and where its files are read.

`dataset.json` has the sizes of a split, `identifiers.json` the names of the puzzles, and `recipe.json` the options of
the data set, its kind, hashes of its content, and findings.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from train_jax.errors import UserError, brief
from train_jax.storage.cache import local_folder
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import DamagedError, map_array, read_whole

SPLITS = ("train", "test")
FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
INDEX_FIELDS = ("puzzle_indices", "group_indices")
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Names of sets; they become part of a path."""
KIND_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
MAX_NUMBER = 2**31
MAX_JSON_BYTES = 2**28
"""Several times the size of the identifiers of an ARC data set with 1000 augmentations."""
HEX_DIGITS = 32
"""Length of the fingerprint of a split (128 bits)."""
REBUILD = "build the data set again with `trm build-data`"


Splits = Mapping[str, tuple["Metadata", Mapping[str, np.ndarray]]]
"""Metadata and arrays of each split."""


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
    """Number of puzzles, counted as in the published builders: originals for Sudokus, augmented ones for ARC."""
    sets: tuple[str, ...]
    """One name, at the beginning of the names of the arrays' files: `all` in the published builders."""
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
    """Checks parsed JSON like `read_metadata`; `path` is used in error messages."""
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
    is_name = len(names) == 1 and isinstance(names[0], str) and SET_NAME.fullmatch(names[0])
    check(bool(is_name), path, f"sets is {brief(names)}, expected one name, such as all")
    check(is_kind_key(values["kind"]), path, f"kind is {brief(values['kind'])}, expected a name such as sudoku-9x9")
    for name in ("seq_len", "vocab_size", "num_puzzle_identifiers", "total_groups"):
        check(values[name] > 0, path, f"{name} is {values[name]}, expected at least 1")
    for name, end in (("pad_id", "vocab_size"), ("blank_identifier_id", "num_puzzle_identifiers")):
        check(0 <= values[name] < values[end], path, f"{name} is {values[name]}, expected less than {end}")


def is_kind_key(value: Any) -> bool:
    """Returns whether a value from a file can be the key of a kind; "" means that none is stated."""
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


def read_identifiers(directory: str | Path) -> list[str]:
    """Reads `identifiers.json`: the names of the puzzles by puzzle identifier."""
    path = dataset_folder(directory) / "identifiers.json"
    names = read_json(path)
    check(isinstance(names, list) and all(isinstance(name, str) for name in names), path, "expected a list of names")
    return names


# ---- recipe.json


def read_record(directory: str | Path) -> dict[str, Any] | None:
    """Reads `recipe.json` (`recipe`, `kind`, `content`, `content_sha256`, `findings`); None if there is no valid one.

    `recipe` and `findings` are objects with untrusted values.
    """
    try:
        record = json.loads(read_whole(path_of(directory) / "recipe.json", largest_bytes=MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError, DamagedError):
        return None
    if not isinstance(record, dict):
        return None
    return record if isinstance(record.get("recipe"), dict) and isinstance(record.get("findings", {}), dict) else None


def read_recipe(directory: str | Path) -> dict[str, Any] | None:
    """Returns the result of `read_record`, but None if a split is missing."""
    complete = all((path_of(directory) / split / "dataset.json").is_file() for split in SPLITS)
    return read_record(directory) if complete else None


def stated_kind(record: Mapping[str, Any] | None) -> str:
    """Returns the key of the kind in a record; empty if there is none."""
    kind = (record or {}).get("kind", "")
    return kind if is_kind_key(kind) else ""


def stated_fingerprint(record: Mapping[str, Any] | None, split: str) -> str:
    """Returns the fingerprint of a split in a record; empty if there is none."""
    content = (record or {}).get("content")
    value = content.get(split) if isinstance(content, dict) else None
    if isinstance(value, str) and len(value) == HEX_DIGITS and set(value) <= set("0123456789abcdef"):
        return value
    return ""


def write_record(
    directory: Path, recipe: Mapping[str, Any], kind: str, content: "Content", findings: Mapping[str, Any] | None = None
) -> None:
    """Writes `recipe.json`. Two data sets are the same if their `recipe` is equal; `findings` are for information."""
    record = {
        "recipe": recipe,
        "kind": kind,
        "content": content.fingerprints,
        "content_sha256": content.sha256,
        "findings": findings or {},
    }
    write_json(directory / "recipe.json", record)


# ---- content


class Content(NamedTuple):
    """Hashes of a data set."""

    sha256: str
    """Hash of every array of both splits with its name, type and shape, as stored in the files."""
    fingerprints: dict[str, str]
    """The result of `split_fingerprint` for each split."""


def content_of(splits: Splits) -> Content:
    """Hashes a data set."""
    sha256 = hashlib.sha256()
    for split in sorted(splits):
        for field in FIELDS:
            array = np.ascontiguousarray(splits[split][1][field])
            sha256.update(f"{split} {field} {array.dtype.str} {array.shape}\n".encode())
            sha256.update(array.data)
    return Content(sha256.hexdigest(), {split: split_fingerprint(*splits[split]) for split in sorted(splits)})


def split_fingerprint(metadata: Metadata, arrays: Mapping[str, np.ndarray]) -> str:
    """Hashes the published metadata and the arrays of a split, independently of the integer type of its indices."""
    digest = hashlib.blake2b(json.dumps(published_fields(metadata)).encode(), digest_size=HEX_DIGITS // 2)
    for field in FIELDS:
        array = arrays[field]
        dtype = arrays[field].dtype.str
        if field in INDEX_FIELDS:  # int64 in a loaded split, any integer type in the files
            array = array.astype("<i8")
            dtype = "index"
        digest.update(f"{field} {dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def array_path(folder: Path, metadata: Metadata, field: str) -> Path:
    """Returns the path of an array of a split."""
    (name,) = metadata.sets
    return folder / f"{name}__{field}.npy"


def arrays_on_disk(folder: Path, metadata: Metadata) -> dict[str, np.ndarray]:
    """Returns the memory-mapped arrays of a split, with the integer types of the files."""
    return {field: map_array(array_path(folder, metadata, field)) for field in FIELDS}


# ---- location


def dataset_folder(directory: str | Path) -> Path:
    """Returns the local folder with the files of a data set: a copy of a remote one, whose content is compared with the
    recipe.

    If a `gs://` path has no files, the path itself is returned. Raises `UserError` if the content is not what the
    recipe says.
    """
    return local_folder(directory, lambda copy: _check_content(copy, directory))


def _check_content(copy: Path, directory: str | Path) -> None:
    record = read_record(copy)
    if record is None:
        return
    try:
        metadata = {split: read_metadata(copy / split / "dataset.json") for split in SPLITS}
        splits = {split: (each, arrays_on_disk(copy / split, each)) for split, each in metadata.items()}
    except (DamagedError, FileNotFoundError, UserError):
        return  # the reader reports the error
    if content_of(splits).sha256 != record.get("content_sha256"):
        raise UserError(
            f"{path_of(directory)} is not what its recipe.json says (SHA-256); build it again with `trm build-data` "
            "and --overwrite"
        )
