"""Files of JSON lines that survive a kill at any moment: appended line by line, and read without torn lines."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train_jax.storage.files import cannot_be_written, check_regular, sync
from train_jax.storage.json_files import OBJECT, Kind


class LineFile:
    """Appends JSON objects, each as one line by one system call; existing content is never written again."""

    def __init__(self, path: Path):
        """Opens the file. Raises `StorageError` if it cannot be written."""
        try:
            check_regular(path, "remove it")
            self._file = path.open("ab", buffering=0)
            sync(path.parent)
        except OSError as error:
            raise cannot_be_written(path, error) from None
        self._path = path
        self._torn = ends_in_a_torn_line(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record. Raises `OSError` if the line cannot be written; the next line is intact all the same."""
        content = b"\n" * self._torn + json.dumps(record).encode() + b"\n"
        self._torn = True  # stays so if `write` raises an error
        self._torn = self._file.write(content) < len(content)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file.name))

    def sync(self) -> None:
        """Returns when all lines survive a loss of power. Raises `StorageError` if the disk fails."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_be_written(self._path, error) from None

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, kind: Kind = OBJECT) -> list[dict[str, Any]]:
    """Returns every intact line of a file, in order; no lines if the file does not exist.

    A line of another kind is damaged, too.
    """
    return parsed_lines(path.read_bytes(), kind) if path.is_file() else []


def parsed_lines(content: bytes, kind: Kind = OBJECT) -> list[dict[str, Any]]:
    """Returns every intact line of the content of such a file."""
    records = []
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if kind.fits(record):
            records.append(record)
    return records


def ends_in_a_torn_line(path: Path) -> bool:
    """Returns True if the last line has no line end; False for an empty file."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
