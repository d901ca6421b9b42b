"""Files and folders, on disks and in storage: written completely or not at all, read as data that may be hostile."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import cast

import numpy as np

from train_jax.errors import StorageError, UserError
from train_jax.run.storage import RemotePath, crc32c_of, path_of

DAMAGE = (
    OSError, ValueError, KeyError, EOFError, MemoryError, OverflowError, TypeError, SyntaxError, RuntimeError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError, Warning,
)  # fmt: skip
"""The exceptions that NumPy raises for damaged files, as measured by `python -m benchmarks.fuzz_data`. Recursion errors
and unsupported features are RuntimeErrors."""


LFS_POINTER = "version https://git-lfs"
"""How a file begins that stands for one in Git LFS."""
POINTER = "it is a pointer of Git LFS; run `git lfs pull` in its repository"


class DamagedError(Exception):
    """A file cannot be read; the text is a short reason."""


def read_whole(path: Path, *, largest_bytes: int) -> bytes:
    """Reads a file. Raises `FileNotFoundError`, or `DamagedError` if it is larger, not a regular file, or unreadable.

    An untrusted folder can contain a link to a device, whose size is unlimited, or to a pipe, which blocks forever.
    """
    try:
        if path.exists() and not path.is_file():
            raise DamagedError("Is a directory" if path.is_dir() else "it is not a regular file")
        size = path.stat().st_size
        if size > largest_bytes:
            raise DamagedError(f"{size:,} bytes, expected at most {largest_bytes:,}")
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(error.strerror or type(error).__name__) from None
    if content.startswith(LFS_POINTER.encode()):
        raise DamagedError(POINTER)
    return content


def is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER.encode()


def map_array(path: Path) -> np.ndarray:
    """Memory-maps the array of a `.npy` file, so that a header with a false size does not allocate memory.

    Raises `FileNotFoundError`, or `DamagedError` for any other error.
    """
    with _any_damage(path):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError("expected one array, found an archive")
        return array


def read_arrays(path: Path, names: Iterable[str], *, largest_bytes: int) -> dict[str, np.ndarray]:
    """Reads arrays of a `.npz` file. Raises `DamagedError`, also if they are larger than `largest_bytes` unpacked."""
    with _any_damage(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > largest_bytes:
            raise ValueError(f"{size:,} bytes unpacked, expected at most {largest_bytes:,}")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}


@contextlib.contextmanager
def _any_damage(path: Path) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # NumPy only warns about some damaged headers
            yield
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        if not isinstance(error, OSError) and is_lfs_pointer(path):
            raise DamagedError(POINTER) from None
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DamagedError(" ".join(reason.split())[:100] or type(error).__name__) from None


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically. Raises `StorageError` if the disk is full or cannot be written."""
    path = path_of(path)
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with whole_file(path) as scratch:
        scratch.write_bytes(content)


def append_text(path: Path, text: str) -> None:
    """Adds to a short text file, which is written again as a whole."""
    write_text(path, (path.read_text() if path.exists() else "") + text)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A local file to write; it becomes `path` if the block succeeds, and is removed if not.

    Raises `StorageError` if the disk is full or cannot be written.
    """
    path, folder = path_of(path), None
    try:
        if isinstance(path, RemotePath):
            folder = tempfile.mkdtemp(prefix="trm-")
            scratch = Path(folder) / path.name
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Two processes may write the same file, as two sweepers do; the last one to finish wins.
            scratch = path.with_name(f".partial.{secrets.token_hex(4)}.{path.name}")
        try:
            yield scratch
            path.upload(scratch) if isinstance(path, RemotePath) else os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_be_written(path, error) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def cannot_be_written(path: Path, error: OSError) -> StorageError:
    """The error for a local file or folder that cannot be written."""
    return StorageError(
        f"{path} cannot be written ({error.strerror or error}); free some space, or use a folder that can be written"
    )


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """A local file with the content of a file: itself, or a copy that is removed after the block."""
    path = path_of(path)
    if not isinstance(path, RemotePath):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="trm-") as folder:
        path.download(Path(folder) / path.name)
        yield Path(folder) / path.name


# ---- folders


def upload_folder(source: Path, target: Path, *, last: Iterable[str]) -> None:
    """Uploads all files of a local folder; those in `last` at the end, in this order, so that they mark it as complete.

    Every object is compared with its file by the CRC-32C that the service computed.
    """
    assert isinstance(target, RemotePath)
    names = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*")) if path.is_file()]
    at_end = [name for name in last if name in names]
    for name in [name for name in names if name not in at_end] + at_end:
        cast(RemotePath, target / name).upload(source / name)
    arrived = target.files()
    for name in names:
        if arrived.get(name, {}).get("crc32c") != crc32c_of(source / name):
            raise StorageError(f"{target / name} is not what was sent; run the same command again")


def move_folder(source: Path, target: Path, *, marker: str) -> None:
    """Moves a folder; an existing target is replaced.

    Storage has no folders: all objects are copied, then those named `marker` are deleted, then the others. So a folder
    with its marker is always complete, wherever a kill interrupts the move.
    """
    remove_folder(target)
    if not isinstance(source, RemotePath):
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        return
    names = sorted(source.files(), key=lambda name: (PurePath(name).name != marker, name))
    for name in reversed(names):
        cast(RemotePath, source / name).copy_to(cast(RemotePath, target / name))
    for name in names:
        (source / name).unlink(missing_ok=True)


def copy_folder(source: Path, target: Path, *, without: Collection[str] = ()) -> None:
    """Copies the files of a folder in the same storage, except those with the names `without` at its top."""
    if isinstance(source, RemotePath):
        names = list(source.files())
    else:
        names = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*")) if path.is_file()]
    for name in names:
        if name in without:
            continue
        if isinstance(source, RemotePath):
            cast(RemotePath, source / name).copy_to(cast(RemotePath, target / name))
        else:
            with whole_file(target / name) as scratch:
                shutil.copyfile(source / name, scratch)


def check_readable(path: Path) -> None:
    """Raises `StorageError` or `UserError` if a file of the folder is there and cannot be read; reads all of them."""
    names = path.files() if isinstance(path, RemotePath) else sorted(file for file in path.rglob("*") if file.is_file())
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError), local_copy(path / name) as local, local.open("rb") as file:
                while file.read(2**24):
                    pass
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be read ({error.strerror}); run the command again") from error


def remove_folder(path: Path) -> None:
    """Removes a folder and everything in it, if it exists."""
    if not isinstance(path, RemotePath):
        shutil.rmtree(path, ignore_errors=True)
    elif names := path.files():
        for name in names:
            (path / name).unlink(missing_ok=True)


def remove_until_gone(paths: Sequence[Path]) -> None:
    """Removes folders into which something else may still write what it had begun; gives up after six seconds."""
    with contextlib.suppress(StorageError, UserError):  # nothing needs it
        for _ in range(20):
            time.sleep(0.2)
            for path in paths:
                remove_folder(path)
            time.sleep(0.1)
            if not any(path.exists() for path in paths):
                return
