"""Reads and writes `recipe.json`: the options of a data set, its kind, hashes of its content, and findings."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train_jax.run.storage import path_of
from train_jax.run.untrusted import DamagedError, read_whole
from train_jax.tasks.puzzles.metadata import (
    MAX_JSON_BYTES,
    SPLITS,
    Metadata,
    is_kind_key,
    published_fields,
    write_json,
)
from train_jax.tasks.puzzles.row_file import RowFile

FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
INDEX_FIELDS = ("puzzle_indices", "group_indices")
HEX_DIGITS = 32
"""Length of the fingerprint of a split (128 bits)."""

Arrays = Mapping[str, np.ndarray | RowFile]
Splits = Mapping[str, tuple[Metadata, Arrays]]


class Content(NamedTuple):
    """Hashes of a data set."""

    sha256: str
    """Hash of every array of both splits with its name, type and shape, as stored in the files."""
    fingerprints: dict[str, str]
    """The result of `split_fingerprint` for each split."""


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
    """Like `read_record`, but also returns None if a split is missing."""
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
    directory: Path, recipe: Mapping[str, Any], kind: str, content: Content, findings: Mapping[str, Any] | None = None
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


def content_of(splits: Splits) -> Content:
    """Hashes a data set, reading every array once."""
    sha256, fingerprints = hashlib.sha256(), {}
    for split in sorted(splits):
        metadata, arrays = splits[split]
        digest = _fingerprint_of(metadata)
        for field in FIELDS:
            array = arrays[field]
            sha256.update(f"{split} {field} {array.dtype.str} {array.shape}\n".encode())
            digest.update(_heading(field, array))
            for chunk in _chunks(array):
                sha256.update(chunk)
                if field not in INDEX_FIELDS:
                    digest.update(chunk)
            if field in INDEX_FIELDS:
                _update_with_indices(digest, array)
        fingerprints[split] = digest.hexdigest()
    return Content(sha256.hexdigest(), fingerprints)


def split_fingerprint(metadata: Metadata, arrays: Arrays) -> str:
    """Hashes the published metadata and the arrays of a split, independently of the integer type of its indices."""
    digest = _fingerprint_of(metadata)
    for field in FIELDS:
        array = arrays[field]
        digest.update(_heading(field, array))
        if field in INDEX_FIELDS:
            _update_with_indices(digest, array)
        else:
            for chunk in _chunks(array):
                digest.update(chunk)
    return digest.hexdigest()


def _fingerprint_of(metadata: Metadata) -> "hashlib.blake2b":
    digest = hashlib.blake2b(digest_size=HEX_DIGITS // 2)
    digest.update(json.dumps(published_fields(metadata)).encode())
    return digest


def _heading(field: str, array: np.ndarray | RowFile) -> bytes:
    dtype = "index" if field in INDEX_FIELDS else array.dtype.str
    return f"{field} {dtype} {array.shape}\n".encode()


def _update_with_indices(digest: "hashlib.blake2b", array: np.ndarray | RowFile) -> None:
    # The indices of a loaded split are int64; those of the file can have any integer type.
    assert isinstance(array, np.ndarray)
    digest.update(np.ascontiguousarray(array, "<i8").data)


def _chunks(array: np.ndarray | RowFile) -> Iterator[bytes | memoryview]:
    if isinstance(array, RowFile):
        yield from array.chunks()
    elif array.flags.c_contiguous:
        yield array.data
    else:
        yield np.ascontiguousarray(array).data
