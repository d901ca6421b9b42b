"""The data set on disk: reads, checks and writes the layout that TRM users already have.

`DIR/{train,test}/dataset.json` and `{set}__{inputs,labels,puzzle_identifiers,puzzle_indices,group_indices}.npy` beside
it, `DIR/identifiers.json`, and (ours) `DIR/recipe.json`, which says how the set was made. Examples of one puzzle lie
together, `puzzle_indices` holds where each puzzle begins; puzzles of one group (an original with its augmentations)
lie together, `group_indices` holds where each group begins; both end with the total.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from jaxtyping import Integer

from train_jax.errors import UserError, brief
from train_jax.run.untrusted import DamagedError, map_array, read_whole
from train_jax.tasks.puzzles.row_file import RowFile

SPLITS = ("train", "test")
FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
MEMORY_MAPPED = ("inputs", "labels")
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""A set's name becomes part of a path."""
MOST_SETS = 64
LARGEST_NUMBER = 2**31
LARGEST_JSON_BYTES = 2**28
"""Several times the identifiers of an ARC set with 1000 augmentations."""
SCANNED_BYTES = 2**28
"""Of tokens, so much is read when a set is opened (whole Sudoku sets, evenly spaced examples of larger ones)."""


@dataclass(frozen=True)
class Metadata:
    """The fields of `dataset.json`."""

    seq_len: int
    vocab_size: int
    pad_id: int
    ignore_label_id: int | None
    blank_identifier_id: int
    num_puzzle_identifiers: int
    total_groups: int
    mean_puzzle_examples: float
    total_puzzles: int
    """As the published builders count: of Sudokus the originals, of ARC also every augmentation."""
    sets: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PuzzleSet:
    """One split of a data set, checked; `inputs` and `labels` are memory-mapped.

    Equal only to itself, so that it can key a cache.
    """

    metadata: Metadata
    inputs: Integer[np.ndarray, "examples seq_len"]
    labels: Integer[np.ndarray, "examples seq_len"]
    puzzle_identifiers: Integer[np.ndarray, "puzzles"]
    puzzle_indices: Integer[np.ndarray, "puzzles+1"]
    group_indices: Integer[np.ndarray, "groups+1"]

    @property
    def num_examples(self) -> int:
        return len(self.inputs)

    @property
    def num_puzzles(self) -> int:
        """With augmentations."""
        return len(self.puzzle_identifiers)

    @property
    def num_groups(self) -> int:
        return len(self.group_indices) - 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the split's content."""
        digest = hashlib.blake2b(repr(self.metadata).encode(), digest_size=16)
        for field in FIELDS:
            digest.update(np.ascontiguousarray(getattr(self, field)).data)
        return digest.hexdigest()

    @cached_property
    def largest_puzzle(self) -> int:
        """The most examples that a puzzle has."""
        return int(np.diff(self.puzzle_indices).max())


def load_split(directory: str | Path, split: str) -> PuzzleSet:
    """Opens `directory/split` and checks it; `UserError` names the file, what is wrong with it and the remedy.

    Several sets are joined in the order of `dataset.json`; joining copies them into memory.
    """
    folder = Path(directory) / split
    if not (folder / "dataset.json").is_file():
        raise UserError(
            f"no data set at {folder} (dataset.json is missing); "
            f"make one with `trm build-data sudoku --output-dir {directory}`"
        )
    metadata = read_metadata(folder / "dataset.json")
    parts = [_load_set(folder, name, metadata) for name in metadata.sets]
    arrays = parts[0] if len(parts) == 1 else _join(parts)
    _check(
        len(arrays["group_indices"]) - 1 == metadata.total_groups,
        folder / "dataset.json",
        f"total_groups is {metadata.total_groups}, but group_indices hold {len(arrays['group_indices']) - 1} groups",
    )
    return PuzzleSet(metadata, **arrays)


def _check(holds: bool | np.bool_, path: Path, problem: str) -> None:
    if not holds:
        raise UserError(f"{path}: {problem}; build the data set again with `trm build-data`")


def read_metadata(path: Path) -> Metadata:
    """The fields of one `dataset.json`, checked."""
    return metadata_of(_read_json(path), path)


def metadata_of(values: Any, path: Path = Path("dataset.json")) -> Metadata:
    """The same from parsed JSON; `path` names the file in errors."""
    _check(isinstance(values, dict), path, f"expected an object, found a {type(values).__name__}")
    kinds: dict[str, tuple[type, ...]] = {field.name: (int,) for field in fields(Metadata)}
    kinds |= {"ignore_label_id": (int, NoneType), "mean_puzzle_examples": (int, float), "sets": (list,)}
    for name, kind in kinds.items():
        _check(name in values, path, f"the field {name} is missing")
        _check(
            isinstance(values[name], kind) and not isinstance(values[name], bool),
            path,
            f"{name} is {brief(values[name])}, expected {' or '.join(each.__name__ for each in kind)}",
        )
        small = not isinstance(values[name], int | float) or abs(values[name]) < LARGEST_NUMBER
        _check(small, path, f"{name} is {brief(values[name])}, expected less than {LARGEST_NUMBER}")
    names = values["sets"]
    _check(
        0 < len(names) <= MOST_SETS and all(isinstance(name, str) and SET_NAME.fullmatch(name) for name in names),
        path,
        f"sets is {brief(names)}, expected names",
    )
    for name in ("seq_len", "vocab_size", "num_puzzle_identifiers", "total_groups"):
        _check(values[name] > 0, path, f"{name} is {values[name]}, expected at least 1")
    for name, end in (("pad_id", "vocab_size"), ("blank_identifier_id", "num_puzzle_identifiers")):
        _check(0 <= values[name] < values[end], path, f"{name} is {values[name]}, expected less than {end}")
    values["sets"] = tuple(names)
    return Metadata(**{name: values[name] for name in kinds})


def read_identifiers(directory: str | Path) -> list[str]:
    """Puzzle identifier -> the puzzle's name, from `identifiers.json`."""
    path = Path(directory) / "identifiers.json"
    names = _read_json(path)
    _check(isinstance(names, list) and all(isinstance(name, str) for name in names), path, "expected a list of names")
    return names


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_whole(path, largest_bytes=LARGEST_JSON_BYTES))
    except (FileNotFoundError, DamagedError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} cannot be read ({reason}); build the data set again with `trm build-data`") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not JSON ({str(error)[:100]}); build the data set again with `trm build-data`"
        ) from None


def _load_set(folder: Path, name: str, metadata: Metadata) -> dict[str, np.ndarray]:
    paths = {field: folder / f"{name}__{field}.npy" for field in FIELDS}
    arrays = {field: _load_array(path, mapped=field in MEMORY_MAPPED) for field, path in paths.items()}
    inputs, labels = arrays["inputs"], arrays["labels"]
    _check(
        inputs.ndim == 2 and inputs.shape[1] == metadata.seq_len,
        paths["inputs"],
        f"shape {inputs.shape}, expected [examples, {metadata.seq_len}]",
    )
    _check(labels.shape == inputs.shape, paths["labels"], f"shape {labels.shape}, but inputs have {inputs.shape}")
    identifiers = arrays["puzzle_identifiers"]
    _check(identifiers.ndim == 1, paths["puzzle_identifiers"], f"shape {identifiers.shape}, expected [puzzles]")
    _check_indices(paths["puzzle_indices"], arrays["puzzle_indices"], len(inputs), "examples")
    _check_indices(paths["group_indices"], arrays["group_indices"], len(identifiers), "puzzles")
    _check(
        len(arrays["puzzle_indices"]) == len(identifiers) + 1,
        paths["puzzle_indices"],
        f"{len(arrays['puzzle_indices'])} entries, expected one more than the {len(identifiers)} puzzle_identifiers",
    )
    for field in ("puzzle_indices", "group_indices"):
        arrays[field] = arrays[field].astype(np.int64)  # checked, so it fits; unsigned ones do not mix with others
    _check_range(paths["puzzle_identifiers"], identifiers, metadata.num_puzzle_identifiers, None)
    _check_range(paths["inputs"], _sample(inputs), metadata.vocab_size, None)
    _check_range(paths["labels"], _sample(labels), metadata.vocab_size, metadata.ignore_label_id)
    return arrays


def _load_array(path: Path, *, mapped: bool) -> np.ndarray:
    try:
        array = map_array(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; build the data set again with `trm build-data`") from None
    except DamagedError as error:
        raise UserError(f"{path}: not an array ({error}); build the data set again with `trm build-data`") from None
    _check(array.dtype.kind in "iu", path, f"dtype {array.dtype}, expected an integer type")
    # The plain view of a memory map indexes faster than np.memmap, which wraps every result again.
    return np.asarray(array) if mapped else np.array(array)


def _check_indices(path: Path, indices: np.ndarray, total: int, of_what: str) -> None:
    _check(
        indices.ndim == 1 and len(indices) >= 2 and indices[0] == 0 and indices[-1] == total,
        path,
        f"expected starts from 0 to the number of {of_what}, {total}; "
        f"found shape {indices.shape}, first {indices.flat[:1]}, last {indices.flat[-1:]}",
    )
    falls = np.flatnonzero(indices[1:] <= indices[:-1])
    _check(
        not len(falls),
        path,
        f"entry {falls[:1] + 1} does not exceed the one before it, so something is empty",
    )


def _check_range(path: Path, values: np.ndarray, end: int, also: int | None) -> None:
    if values.min() >= 0 and values.max() < end:
        return
    wrong = (values < 0) | (values >= end)
    if also is not None:
        wrong &= values != also
    _check(not wrong.any(), path, f"holds {values[wrong][:1]}, expected values from 0 to {end - 1}")


def _sample(tokens: np.ndarray) -> np.ndarray:
    return tokens[:: -(-tokens.nbytes // SCANNED_BYTES) or 1]


def _join(parts: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    parts = list(parts)
    joined = {field: np.concatenate([part[field] for part in parts]) for field in FIELDS[:3]}
    for field in FIELDS[3:]:
        totals = np.cumsum([0, *(part[field][-1] for part in parts)])
        shifted = [part[field][:-1] + total for part, total in zip(parts, totals[:-1], strict=True)]
        joined[field] = np.concatenate([*shifted, totals[-1:]])
    return joined


def write_split(folder: Path, metadata: Metadata, arrays: Mapping[str, np.ndarray | RowFile]) -> None:
    """Writes one split, all of it as the one set that `metadata.sets` names; a `RowFile` is on disk already."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "dataset.json", asdict(metadata))
    for field in FIELDS:
        array = arrays[field]
        if not isinstance(array, RowFile):
            np.save(array_path(folder, metadata, field), array)


def array_path(folder: Path, metadata: Metadata, field: str) -> Path:
    """Where an array of a split lies that is written as one set."""
    (name,) = metadata.sets
    return folder / f"{name}__{field}.npy"


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    path.write_text(json.dumps(value, indent=indent) + "\n")
