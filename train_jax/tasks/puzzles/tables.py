"""Reads public puzzle tables (source,question,answer,rating) from a folder, a bucket or the Hugging Face hub."""

import codecs
import csv
import hashlib
import importlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TextIO

from train_jax.errors import UserError
from train_jax.run.storage import fetch
from train_jax.run.untrusted import POINTER, is_lfs_pointer

COLUMNS = ["source", "question", "answer", "rating"]
NAMES = {"train": "train.csv", "test": "test.csv"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
URL = re.compile(r"([a-z][a-z0-9+.-]*)://.+")
LONGEST_LINE = 2**16
"""Limit in characters, twelve times that of a 50x50 maze with its answer; longer lines are not read completely."""
CLIENTS = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs"}
"""The package that fsspec needs for each URL scheme."""

Row = tuple[int, list[str]]
"""The line number of the end of a row, and its columns."""


@contextmanager
def local_tables(source: str, *, hub_example: str) -> Iterator[dict[str, Path]]:
    """Yields the paths of the train and test tables; `source` is a folder, one of its files, a bucket or a hub id.

    Files from a bucket are removed at the end of the block.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tables = _find(source, hub_example, Path(scratch))
        try:
            yield tables
        except OSError as error:
            raise UserError(
                f"--source {source} cannot be read ({error.strerror}); give a folder with train.csv and test.csv"
            ) from None


def _find(source: str, hub_example: str, scratch: Path) -> dict[str, Path]:
    if URL.fullmatch(source):
        return {split: _copied(source, name, scratch / name) for split, name in NAMES.items()}
    path = Path(source)
    if path.is_file() and path.name in NAMES.values():
        path = path.parent
    if path.is_dir():
        for name in NAMES.values():
            if not (path / name).is_file():
                raise UserError(f"{path / name} is missing; --source needs a folder with train.csv and test.csv")
        return {split: path / name for split, name in NAMES.items()}
    if path.exists():
        raise UserError(
            f"--source {source} is neither a folder nor one of its files train.csv and test.csv; give the folder"
        )
    if not HUB_ID.fullmatch(source):
        raise UserError(
            f"--source {source} does not exist; give a folder or a bucket (gs://…) with train.csv and test.csv, or a "
            f"data set of the Hugging Face hub such as {hub_example}"
        )
    return {split: _downloaded(source, name) for split, name in NAMES.items()}


def _copied(source: str, name: str, target: Path) -> Path:
    """Copies one table from a bucket to `target`."""
    kind = source.partition("://")[0]
    try:
        fetch(f"{source.rstrip('/')}/{name}", target)
    except ImportError:
        raise UserError(
            f"--source {source}: reading it needs `pip install fsspec {CLIENTS.get(kind, '')}`; or copy train.csv and "
            "test.csv to a local folder and give that"
        ) from None
    # Every client has its own exception classes, for a missing bucket, missing credentials or no network.
    except Exception as error:
        raise UserError(
            f"{name} in {source} could not be read ({_reason(error)}); check the address and your credentials, or copy "
            "train.csv and test.csv to a local folder and give that"
        ) from None
    return target


def _downloaded(hub_id: str, name: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            f"--source {hub_id} is not a local folder, and the hub needs `pip install huggingface_hub`; or download "
            "train.csv and test.csv and give their folder"
        ) from None
    try:
        return Path(hub.hf_hub_download(hub_id, name, repo_type="dataset"))
    # The library raises the exceptions of its HTTP client, which differ between versions.
    except Exception as error:
        raise UserError(
            f"{name} of {hub_id} could not be downloaded from the hub ({_reason(error)}); check the id and the "
            "network, or give a folder with train.csv and test.csv"
        ) from None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_BYTE_ORDER_MARK = codecs.BOM_UTF8.decode("latin-1")


def chunks_of(path: Path, *, rows: int, remedy: str) -> Iterator[list[Row]]:
    """Yields the rows of a table, `rows` at a time. Raises `UserError` if the header or a row is invalid."""
    # Latin-1 decodes any byte, so that an invalid one is reported with its line number.
    with path.open(newline="", encoding="latin-1") as file:
        if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
            file.seek(0)
        lines = _rows(path, csv.reader(_lines(path, file), strict=True))
        if next(lines, (1, []))[1] != COLUMNS:
            if is_lfs_pointer(path):
                raise UserError(f"{path} cannot be read: {POINTER}")
            raise UserError(f"{path} line 1: expected the header {','.join(COLUMNS)}; {remedy}")
        empty = True
        while chunk := list(islice(lines, rows)):
            empty = False
            yield chunk
        if empty:
            raise UserError(f"{path} has no rows below its header; {remedy}")


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise bad_row(path, number, f"longer than {LONGEST_LINE:,} characters")
        yield line


def _rows(path: Path, reader) -> Iterator[Row]:
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise bad_row(path, reader.line_num, str(error)) from None


def bad_row(path: Path, line: int, problem: str) -> UserError:
    return UserError(f"{path} line {line}: {problem}; correct or remove the line (nothing was written)")


def problem_with(row: list[str], cells: int) -> str:
    """Describes why a row is malformed, given the number of cells of its puzzle; "" if it is well formed."""
    if len(row) != len(COLUMNS):
        return f"{len(row)} columns, expected {len(COLUMNS)} ({','.join(COLUMNS)})"
    for name, text in zip(COLUMNS[1:3], row[1:3], strict=True):
        if len(text) != cells:
            return f"the {name} has {len(text)} cells, expected {cells}"
    return ""
