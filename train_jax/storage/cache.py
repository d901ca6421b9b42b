"""Local copies of files in `gs://`: data sets, to be memory-mapped, and the files to which a run appends lines.

They are in `$TRM_CACHE_DIR`, by default `~/.cache/trm`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from train_jax.errors import StorageError
from train_jax.storage.files import cannot_be_written
from train_jax.storage.lease import is_lost
from train_jax.storage.storage import RemotePath, crc32c_of, path_of

_verified: set[Path] = set()
_working: dict[str, tuple[RemotePath, Path]] = {}


def cache_folder() -> Path:
    base = os.environ.get("TRM_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "trm"
    return Path(base).expanduser().absolute()


def _place_of(kind: str, path: Path) -> Path:
    return cache_folder() / kind / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


# ---- data sets


def local_folder(where: str | Path, check: Callable[[Path], None] = lambda folder: None) -> Path:
    """Returns a local folder with the files of a folder: itself, or a copy with the checksums of the objects.

    Every process compares the files of the copy with the CRC-32C of the objects once. A copy of objects that have
    changed is replaced. `check` is called on a new copy, before it is used. An empty remote folder is returned as it
    is. Raises `StorageError` if the storage cannot be reached or a download is damaged.
    """
    path = path_of(where)
    if not isinstance(path, RemotePath):
        return path
    objects = path.files()
    if not objects:
        return path
    place = _place_of("data", path)
    folder = place / hashlib.sha256(json.dumps(objects, sort_keys=True).encode()).hexdigest()[:16]
    try:
        with _only_process_in(place):
            if folder not in _verified and _difference(folder, objects):
                _download(path, objects, folder, check)
            _verified.add(folder)
    except OSError as error:
        raise cannot_be_written(place, error) from error
    return folder


def _download(
    path: RemotePath, objects: dict[str, dict[str, Any]], folder: Path, check: Callable[[Path], None]
) -> None:
    partial = folder.with_name("partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in objects:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).download(partial / name)  # pyright: ignore[reportAttributeAccessIssue]
    if damaged := _difference(partial, objects):
        raise StorageError(f"{path / damaged} changed while it was read, or was damaged; run the same command again")
    check(partial)
    for older in folder.parent.iterdir():  # a file that another process has mapped stays readable to it
        if older.is_dir() and older != partial:
            shutil.rmtree(older)
    partial.rename(folder)


def _difference(folder: Path, objects: dict[str, dict[str, Any]]) -> str:
    """Returns the first object whose copy is missing or differs; empty if the copy is complete."""
    for name, expected in objects.items():
        copy = folder / name
        if not copy.is_file() or copy.stat().st_size != expected["size"]:
            return name
        if expected["crc32c"] not in (None, crc32c_of(copy)):
            return name
    return ""


@contextlib.contextmanager
def _only_process_in(place: Path) -> Iterator[None]:
    place.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a folder for large files, which is removed after the block."""
    base = cache_folder() / "building"
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield Path(folder)


# ---- files of a run that grow


def working_file(path: Path) -> Path:
    """Returns the local file to append lines to instead of `path`: itself, or one that `upload_working_files` uploads.

    It is not initialized with the content of `path`.
    """
    if not isinstance(path, RemotePath):
        return path
    local = _place_of("runs", path.parent) / path.name
    local.parent.mkdir(parents=True, exist_ok=True)
    _working[str(path)] = path, local
    return local


def continued_file(path: Path) -> Path:
    """Returns the file of `working_file` with the content of `path`, if there is any."""
    local = working_file(path)
    if isinstance(path, RemotePath):
        if path.exists():
            path.download(local)
        else:
            local.unlink(missing_ok=True)
    return local


def working_folder(path: Path) -> Path:
    """Returns the local folder for a library that writes by itself: the folder, or one in the cache."""
    if not isinstance(path, RemotePath):
        return path
    local = _place_of("runs", path)
    local.mkdir(parents=True, exist_ok=True)
    return local


def upload_working_files(folder: Path) -> None:
    """Uploads the working files of this process below a folder, whole. Does nothing for a local folder.

    Nothing is uploaded into a folder that this process has lost.
    """
    if is_lost(folder):
        return
    for name, (path, local) in list(_working.items()):
        if name.startswith(f"{folder}/") and local.exists():
            path.upload(local)


def upload_working_file(path: Path) -> None:
    """Uploads a whole working file. Does nothing for a local file."""
    remote, local = _working.get(str(path), (None, path))
    if remote is not None and local.exists():
        remote.upload(local)
