"""Writes whole files and folders on disks and in storage: completely, or not at all.

What a function here has written survives a loss of power: first the content of a file is synced, then its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import cast

from train_jax.errors import WRONG_PATH, StorageError, UserError
from train_jax.storage.storage import RemotePath, crc32c_of, path_of
from train_jax.storage.untrusted import DamagedError, refuse_special

_NOT_SYNCED = {errno.EACCES, errno.EINVAL, errno.ENOTSUP}


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes a file atomically; one that is not `durable` may be lost or empty after a loss of power."""
    write_bytes(path, text.encode(), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes a file atomically. Raises `StorageError` if the disk is full or cannot be written."""
    path = path_of(path)
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with whole_file(path, durable=durable) as scratch:
        scratch.write_bytes(content)


def append_text(path: Path, text: str) -> None:
    """Adds to a short text file, which is written again as a whole."""
    write_bytes(path, (path.read_bytes() if path.exists() else b"") + text.encode())


def check_output(where: str | Path) -> None:
    """Raises `UserError`, before a computation, for the path of an output that cannot be written."""
    path = path_of(where)
    if isinstance(path, RemotePath):
        return
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.parent} is not a folder; give a file in an existing folder")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"{path} cannot be written (Permission denied); give a file in another folder")


@contextlib.contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a local file to write; it becomes `path` if the block succeeds, and is removed if not.

    A link stays a link to the new file; a device or a pipe gets the content. The permissions are those of a new file,
    also if the block writes another one. Raises `UserError` for a path that is no file's, `StorageError` if the disk is
    full or cannot be written.
    """
    path = path_of(path)
    try:
        if isinstance(path, RemotePath):
            with tempfile.TemporaryDirectory(prefix="trm-") as folder:
                yield (scratch := Path(folder) / path.name)
                path.upload(scratch)
            return
        if path.exists() and not path.is_file() and not path.is_dir():
            with tempfile.TemporaryDirectory(prefix="trm-") as folder:
                yield (scratch := Path(folder) / "content")
                with scratch.open("rb") as content, path.open("wb") as target:
                    shutil.copyfileobj(content, target, 2**24)
            return
        path = path.resolve()
        make_folder(path.parent)
        # Two processes may write the same file; the last one to finish wins.
        scratch = path.with_name(f".partial.{secrets.token_hex(4)}.{path.name[-40:]}")
        scratch.touch()
        mode = scratch.stat().st_mode
        try:
            yield scratch
            scratch.chmod(mode)  # safetensors makes a file that only its owner can read
            if durable:
                sync(scratch)
            os.replace(scratch, path)
            if durable:
                sync(path.parent)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_be_written(path, error) from error


def cannot_be_written(path: Path, error: OSError) -> UserError:
    """Returns the error for a local file or folder that cannot be written: `StorageError`, unless the path is wrong."""
    if error.errno in WRONG_PATH:
        return UserError(f"{path} cannot be written ({error.strerror}); {WRONG_PATH[error.errno]}")
    return StorageError(
        f"{path} cannot be written ({error.strerror or error}); free some space, or use a folder that can be written"
    )


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yields a local file with the content of a file: itself, or a copy that is removed after the block.

    Raises `UserError` for a pipe or a device.
    """
    path = path_of(path)
    if not isinstance(path, RemotePath):
        check_regular(path, "give a file")
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="trm-") as folder:
        path.download(Path(folder) / path.name)
        yield Path(folder) / path.name


def check_regular(path: Path, remedy: str) -> None:
    """Raises `UserError` for a pipe or a device."""
    try:
        refuse_special(path)
    except DamagedError as error:
        raise UserError(f"{path} cannot be used ({error}); {remedy}") from None


# ---- loss of power


def sync(path: Path) -> None:
    """Returns when the content of a local file, or the names in a folder, survive a loss of power.

    Does nothing for a folder that can be written but not read, and on a file system that syncs no folders.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise


def sync_tree(folder: Path) -> None:
    """Syncs everything in a local folder, and then the folder."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(path, name))
        sync(Path(path))


def make_folder(folder: Path) -> None:
    """Makes a local folder and those above it, whose names survive a loss of power; it may exist."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


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


def check_readable(path: Path) -> None:
    """Reads all files of a folder. Raises `StorageError` or `UserError` if one of them cannot be read."""
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
    """Removes folders into which another thread may still finish a write; gives up after six seconds."""
    with contextlib.suppress(StorageError, UserError):  # the run does not need it
        for _ in range(20):
            time.sleep(0.2)
            for path in paths:
                remove_folder(path)
            time.sleep(0.1)
            if not any(path.exists() for path in paths):
                return
