"""Files and folders on local disks and in Google Cloud Storage; the only file that knows storage paths.

A path is a `pathlib.Path`, or a `RemotePath` for `gs://bucket/…` with the same methods. Files appear whole or not at
all. A request that fails is repeated for `PATIENCE_SECONDS` with growing pauses; then it is one `StorageError`. What
the user can set right (package, credentials, bucket, permission) is a `UserError` at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import shutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, cast

from etils.epath import gpath

from train_jax.errors import UserError, pip_install
from train_jax.storage.requests import T, retried, silence_raised_errors

_SILENT_SECONDS = 30.0
"""Seconds without any answer after which an attempt counts as failed."""
# ---- paths


def is_remote(where: str | PurePath) -> bool:
    """Returns True if this is a `gs://` path, also after `pathlib` has dropped one of its slashes."""
    return str(where).startswith(("gs://", "gs:/"))


def path_of(where: str | PurePath) -> Path:
    """Returns the path of a file or folder, perhaps `gs://bucket/…`. Raises `UserError` if its package is missing."""
    if isinstance(where, RemotePath) or not is_remote(where):
        return cast(Path, where) if isinstance(where, RemotePath) else Path(where)
    bucket, _, name = str(where).removeprefix("gs:").lstrip("/").partition("/")
    if not bucket:
        raise UserError(f"{where} names no bucket; write it as gs://bucket/folder")
    _prepare_client()
    return cast(Path, RemotePath(f"gs://{bucket}/{name}".rstrip("/")))


def absolute(path: Path) -> str:
    """Returns the path as text for a library that opens it itself."""
    return str(path) if is_remote(path) else str(path.absolute())


def is_folder(where: str | PurePath) -> bool:
    """Returns True if a file can be written into this folder; always in storage, which has no folders."""
    return is_remote(where) or Path(where).absolute().is_dir()


@functools.cache
def _prepare_client() -> None:
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"gs:// paths need the package gcsfs; install it with {pip_install('gcs')}")
    import aiohttp
    from fsspec.config import conf

    silence_raised_errors()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
    # Listings are not cached, because other processes change the same folders.
    conf.setdefault("gcs", {}).update(use_listings_cache=False, requests_timeout=timeout)


@functools.cache
def _client() -> Any:
    from google.cloud import storage

    return storage.Client()


@functools.cache
def _check_bucket(bucket: str) -> None:
    """Raises `UserError` for a missing bucket, which looks like a missing file elsewhere; Orbax reads buckets, too."""
    retried(lambda: _client().get_bucket(bucket, timeout=_SILENT_SECONDS, retry=None), f"gs://{bucket}")


class RemotePath(gpath.PosixGPath):
    """A `gs://` path with the methods of `pathlib.Path` that a run needs; each repeats a request that fails."""

    def _request(self, call: Callable[[], T]) -> T:
        _check_bucket(self.parts[2])
        return retried(call, str(self))

    def read_bytes(self) -> bytes:
        return self._request(super().read_bytes)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        return self._request(lambda: super(RemotePath, self).read_text(encoding))

    def rmtree(self, missing_ok: bool = False) -> None:
        self._request(lambda: super(RemotePath, self).rmtree(missing_ok))

    def exists(self) -> bool:
        return self._kind() != ""

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def is_file(self) -> bool:
        return self._kind() == "file"

    def _kind(self) -> str:
        """Returns the type of the object; empty if there is none. fsspec's methods also return that after errors."""
        try:
            return self._request(lambda: self._file_system.info(str(self)))["type"]
        except FileNotFoundError:
            return ""

    def stat(self) -> Any:
        """Returns the fields of `os.stat_result` that storage knows."""
        stat = self._request(super().stat)
        return types.SimpleNamespace(st_size=stat.length, st_mtime=stat.mtime)

    def absolute(self) -> RemotePath:
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    def iterdir(self) -> Iterator[RemotePath]:
        return iter(self._request(lambda: list(super(RemotePath, self).iterdir())))

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Checks only that the bucket can be reached: storage has no folders."""
        _check_bucket(self.parts[2])

    def write_bytes(self, data: bytes) -> int:
        """Writes up to 50 MB in one request; an object is visible only when all of it has arrived."""
        self._request(lambda: self._file_system.pipe_file(str(self), data))
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, errors: str | None = None) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(FileNotFoundError) if missing_ok else contextlib.nullcontext():
            self._request(lambda: self._file_system.rm_file(str(self)))

    def download(self, target: Path) -> None:
        self._request(lambda: self._file_system.get_file(str(self), str(target)))

    def upload(self, source: Path) -> None:
        self._request(lambda: self._file_system.put_file(str(source), str(self)))

    def copy_to(self, target: RemotePath) -> None:
        self._request(lambda: self._file_system.cp_file(str(self), str(target)))

    def files(self) -> dict[str, dict[str, Any]]:
        """Returns all objects below the folder: their size and CRC-32C by name relative to it."""
        found = self._request(lambda: self._file_system.find(str(self), detail=True))
        start = len(str(self).removeprefix("gs://")) + 1
        entries = {name[start:]: info for name, info in found.items() if not name.endswith("/") and name[start:]}
        return {name: {"size": int(info["size"]), "crc32c": info.get("crc32c")} for name, info in entries.items()}

    @property
    def _file_system(self) -> Any:
        return _file_system()


def _file_system() -> Any:
    """Returns the file system that `epath`, and therefore Orbax, uses for `gs://`."""
    import fsspec

    return fsspec.filesystem("gcs", finalize_on_close=True)


def crc32c_of(path: Path) -> str:
    """Returns the checksum of a local file, as the storage service writes it."""
    import base64

    import google_crc32c

    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(2**24):
            checksum.update(block)
    return base64.b64encode(checksum.digest()).decode()


def fetch(url: str, target: Path) -> None:
    """Copies the object at a URL of any service to a local file, in one attempt, with the errors of its client."""
    with importlib.import_module("fsspec").open(url, "rb") as remote, target.open("wb") as file:
        shutil.copyfileobj(remote, file, 2**24)


# ---- conditional writes


def read_generation(path: Path) -> tuple[bytes, int]:
    """Returns the content of an object and the number of its version or an older one; empty and 0 if there is none."""
    return retried(lambda: _read_generation(_blob(path)), str(path))


def write_generation(path: Path, content: bytes, generation: int) -> int | None:
    """Writes an object if its newest version is `generation`, 0 for none; returns the new version, None if it is not.

    Safe to repeat if the answer was lost: an object with exactly this content was written by this call.
    """

    def write() -> int | None:
        blob = _blob(path)
        try:
            blob.upload_from_string(content, if_generation_match=generation, timeout=_SILENT_SECONDS, retry=None)
            return int(blob.generation)
        except Exception as error:
            if type(error).__name__ != "PreconditionFailed":
                raise
            there, newest = _read_generation(blob)
            return newest if there == content else None

    return retried(write, str(path))


def _blob(path: Path) -> Any:
    _check_bucket(path.parts[2])
    return _client().bucket(path.parts[2]).blob("/".join(path.parts[3:]))


def _read_generation(blob: Any) -> tuple[bytes, int]:
    """Returns content and version; the content may be newer than the version, which then can no longer be replaced."""
    try:
        blob.reload(timeout=_SILENT_SECONDS, retry=None)
        generation = int(blob.generation)  # a download sets it again, from a header that may be missing
        return blob.download_as_bytes(timeout=_SILENT_SECONDS, retry=None), generation
    except Exception as error:
        if type(error).__name__ == "NotFound":
            return b"", 0
        raise
