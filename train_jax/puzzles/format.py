"""Reads and checks data sets in the layout of the published TRM code.

A split is a folder `DIR/{train,test}` with `dataset.json` and the arrays
`{set}__{inputs,labels,puzzle_identifiers,puzzle_indices,group_indices}.npy`. `DIR/identifiers.json` contains the names
of the puzzles. `DIR/recipe.json`, an addition of this project, describes how the data set was built. The examples of a
puzzle are consecutive and `puzzle_indices` contains their starts. The puzzles of a group (an original with its
augmentations) are consecutive and `group_indices` contains their starts. Both index arrays end with the total."""

import dataclasses
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from train_jax.errors import UserError
from train_jax.puzzles.kind import Kind
from train_jax.puzzles.kinds import kind_of
from train_jax.puzzles.metadata import (
    FIELDS,
    REBUILD,
    Metadata,
    array_path,
    arrays_on_disk,
    check,
    dataset_folder,
    read_metadata,
    read_record,
    split_fingerprint,
    stated_fingerprint,
    stated_kind,
)
from train_jax.storage.content import remembered
from train_jax.storage.untrusted import DamagedError, map_array

MEMORY_MAPPED = ("inputs", "labels")
_BLOCK = 4096
SCANNED_BYTES = 2**28
"""Bytes of tokens that are checked when a set is opened: all of a Sudoku set, evenly spaced rows of larger sets."""


@dataclass(frozen=True, eq=False)
class PuzzleSet:
    """One validated split of a data set; `inputs` and `labels` are memory-mapped.

    Comparison and hash are by identity, so that it can be the key of a cache.
    """

    metadata: Metadata
    inputs: Integer[np.ndarray, "examples seq_len"]
    labels: Integer[np.ndarray, "examples seq_len"]
    puzzle_identifiers: Integer[np.ndarray, "puzzles"]
    puzzle_indices: Integer[np.ndarray, "puzzles+1"]
    group_indices: Integer[np.ndarray, "groups+1"]
    folder: Path | None = dataclasses.field(default=None, init=False)
    """The folder of the files. It is no argument, so `dataclasses.replace` of the arrays removes it."""
    stated_fingerprint: str = dataclasses.field(default="", init=False)
    """The fingerprint in `recipe.json`, of what was built."""

    @property
    def kind(self) -> Kind | None:
        """The kind of the puzzles; None if it is unknown."""
        return kind_of(self.metadata)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of metadata and arrays, equal for equal splits in all processes and runs.

        It is that of the files, whatever `recipe.json` states, computed at about 1 GB/s where it is not remembered.
        """
        folder = self.folder
        if folder is None:
            return split_fingerprint(self.metadata, {name: getattr(self, name) for name in FIELDS})
        files = [folder / "dataset.json", *(array_path(folder, self.metadata, field) for field in FIELDS)]
        return remembered(
            files, "puzzles", lambda: split_fingerprint(self.metadata, arrays_on_disk(folder, self.metadata))
        )

    @property
    def num_examples(self) -> int:
        return len(self.inputs)

    @property
    def num_puzzles(self) -> int:
        """Number of puzzles, including augmentations."""
        return len(self.puzzle_identifiers)

    @property
    def num_groups(self) -> int:
        return len(self.group_indices) - 1

    @cached_property
    def largest_puzzle(self) -> int:
        """Largest number of examples of a puzzle."""
        return int(np.diff(self.puzzle_indices).max())


def load_split(directory: str | Path, split: str) -> PuzzleSet:
    """Opens and checks `directory/split`. Raises `UserError` with the file, the error and the remedy.

    If no solution is public, all labels are the ignored one.
    """
    copy = dataset_folder(directory)
    folder = copy / split
    if not (folder / "dataset.json").is_file():
        raise UserError(
            f"no data set at {folder} (dataset.json is missing); "
            f"build one with `trm build-data sudoku --output-dir {directory}`"
        )
    metadata = read_metadata(folder / "dataset.json")
    arrays = _load_set(folder, metadata)
    check(
        len(arrays["group_indices"]) - 1 == metadata.total_groups,
        folder / "dataset.json",
        f"total_groups is {metadata.total_groups}, expected {len(arrays['group_indices']) - 1} as in group_indices",
    )
    record = read_record(copy)
    metadata = _with_kind(metadata, stated_kind(record), folder)
    if _without_solutions(arrays["labels"], kind_of(metadata)):
        ignored = arrays["labels"].dtype.type(metadata.ignore_label_id or 0)
        arrays["labels"] = np.broadcast_to(ignored, arrays["labels"].shape)
    puzzles = PuzzleSet(metadata, **arrays)
    object.__setattr__(puzzles, "folder", folder)
    object.__setattr__(puzzles, "stated_fingerprint", stated_fingerprint(record, split))
    return puzzles


def _with_kind(metadata: Metadata, stated: str, folder: Path) -> Metadata:
    """Sets the key of the kind: the stated one, otherwise that of the kind that recognises the data set."""
    metadata = replace(metadata, kind=metadata.kind or stated)
    try:
        kind = kind_of(metadata)
    except UserError as error:
        raise UserError(f"{folder}: {error}; {REBUILD}") from None
    return metadata if kind is None else replace(metadata, kind=kind.key)


def _without_solutions(labels: Integer[np.ndarray, "examples seq_len"], kind: Kind | None) -> bool:
    """Returns True if every label stands for a solution that is not public; stops reading at the first other label."""
    unknown = None if kind is None else kind.unknown_solution
    if unknown is None:
        return False
    return all((labels[start : start + _BLOCK] == unknown).all() for start in range(0, len(labels), _BLOCK))


def originals_of(puzzles: PuzzleSet) -> Integer[np.ndarray, "groups"]:
    """Returns the first example of every group."""
    return puzzles.puzzle_indices[puzzles.group_indices[:-1]]


def _load_set(folder: Path, metadata: Metadata) -> dict[str, np.ndarray]:
    paths = {field: array_path(folder, metadata, field) for field in FIELDS}
    arrays = {field: _load_array(path, mapped=field in MEMORY_MAPPED) for field, path in paths.items()}
    inputs = arrays["inputs"]
    labels = arrays["labels"]
    check(
        inputs.ndim == 2 and inputs.shape[1] == metadata.seq_len,
        paths["inputs"],
        f"shape {inputs.shape}, expected [examples, {metadata.seq_len}]",
    )
    check(
        labels.shape == inputs.shape, paths["labels"], f"shape {labels.shape}, expected {inputs.shape} as of the inputs"
    )
    identifiers = arrays["puzzle_identifiers"]
    check(identifiers.ndim == 1, paths["puzzle_identifiers"], f"shape {identifiers.shape}, expected [puzzles]")
    _check_indices(paths["puzzle_indices"], arrays["puzzle_indices"], len(inputs), "examples")
    _check_indices(paths["group_indices"], arrays["group_indices"], len(identifiers), "puzzles")
    check(
        len(arrays["puzzle_indices"]) == len(identifiers) + 1,
        paths["puzzle_indices"],
        f"{len(arrays['puzzle_indices'])} entries, expected one more than the {len(identifiers)} puzzle_identifiers",
    )
    for field in ("puzzle_indices", "group_indices"):
        arrays[field] = arrays[field].astype(np.int64)  # mixing unsigned and signed integers would give floats
    _check_range(paths["puzzle_identifiers"], identifiers, metadata.num_puzzle_identifiers, None)
    _check_range(paths["inputs"], _sample(inputs), metadata.vocab_size, None)
    _check_range(paths["labels"], _sample(labels), metadata.vocab_size, metadata.ignore_label_id)
    return arrays


def _load_array(path: Path, *, mapped: bool) -> np.ndarray:
    try:
        array = map_array(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {REBUILD}") from None
    except DamagedError as error:
        raise UserError(f"{path} is not a valid array ({error}); {REBUILD}") from None
    check(array.dtype.kind in "iu", path, f"dtype {array.dtype}, expected an integer type")
    # A plain array view is faster to index than np.memmap, which wraps every result.
    return np.asarray(array) if mapped else np.array(array)


def _check_indices(path: Path, indices: np.ndarray, total: int, of_what: str) -> None:
    check(
        indices.ndim == 1 and len(indices) >= 2 and indices[0] == 0 and indices[-1] == total,
        path,
        f"expected a vector from 0 to the number of {of_what}, {total}, "
        f"found shape {indices.shape}, first {indices.flat[:1]}, last {indices.flat[-1:]}",
    )
    falls = np.flatnonzero(indices[1:] <= indices[:-1])
    check(
        not len(falls),
        path,
        f"entry {falls[:1] + 1} does not exceed the one before it, expected increasing entries",
    )


def _check_range(path: Path, values: np.ndarray, end: int, also: int | None) -> None:
    if values.min() >= 0 and values.max() < end:
        return
    wrong = (values < 0) | (values >= end)
    if also is not None:
        wrong &= values != also
    check(not wrong.any(), path, f"contains {values[wrong][:1]}, expected values from 0 to {end - 1}")


def _sample(tokens: np.ndarray) -> np.ndarray:
    return tokens[:: -(-tokens.nbytes // SCANNED_BYTES) or 1]
