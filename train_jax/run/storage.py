"""Files and folders on local disks and in Google Cloud Storage; the only file that knows storage paths.

A path is a `pathlib.Path`, or a `RemotePath` for `gs://bucket/…` with the same methods. Files appear whole or not at
all. A request that fails is repeated for `PATIENCE_SECONDS` with growing pauses; then it is one `StorageError`. What
the user can set right (package, credentials, bucket, permission) is a `UserError` at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import importlib.util
import logging
import os
import random
import re
import shutil
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

from etils.epath import gpath

from train_jax.errors import StorageError, UserError

PATIENCE_SECONDS = 120.0
"""How long a request is repeated; the last try may take half a minute longer."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 16.0
_SILENT_SECONDS = 30.0
"""A connection without any answer for this long counts as a failed try."""
_MISSING = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_LOCAL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_CLIENT_PACKAGES = {"gcsfs", "aiohttp", "requests", "urllib3", "google", "fsspec"}
"""Their exceptions have no common class."""

_OUTAGE = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED|CANCELLED)\b"
)
"""The status in TensorStore's messages."""

T = TypeVar("T")


# ---- paths


def is_remote(where: str | PurePath) -> bool:
    """Whether this is a `gs://` path, also after `pathlib` has dropped one of its slashes."""
    return str(where).startswith(("gs://", "gs:/"))


def path_of(where: str | PurePath) -> Path:
    """The path of a file or folder that may be `gs://bucket/…`. Raises `UserError` if its package is missing."""
    if isinstance(where, RemotePath) or not is_remote(where):
        return cast(Path, where) if isinstance(where, RemotePath) else Path(where)
    bucket, _, name = str(where).removeprefix("gs:").lstrip("/").partition("/")
    if not bucket:
        raise UserError(f"{where} names no bucket; write it as gs://bucket/folder")
    _prepare_client()
    return cast(Path, RemotePath(f"gs://{bucket}/{name}".rstrip("/")))


def absolute(path: Path) -> str:
    """The path as text for a library that opens it itself."""
    return str(path) if is_remote(path) else str(path.absolute())


def is_folder(where: str | PurePath) -> bool:
    """Whether a file can be written into this folder; storage has no folders, so there any can."""
    return is_remote(where) or Path(where).absolute().is_dir()


@functools.cache
def _prepare_client() -> None:
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError("gs:// paths need the package gcsfs; install it with `pip install 'trm-bridge[gcs]'`")
    import aiohttp
    import fsspec

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints the traceback of every failed try
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
    # Listings are not cached, because other processes change the same folders.
    fsspec.config.conf.setdefault("gcs", {}).update(use_listings_cache=False, requests_timeout=timeout)


@functools.cache
def _client() -> Any:
    from google.cloud import storage

    return storage.Client()


@functools.cache
def _check_bucket(bucket: str) -> None:
    """Only here a missing bucket is told from a missing file; Orbax reads the bucket's properties, too."""
    _retried(lambda: _client().get_bucket(bucket, timeout=_SILENT_SECONDS, retry=None), f"gs://{bucket}")


def _retried(call: Callable[[], T], what: str) -> T:
    """The result of the call, repeated as long as it fails for a reason that may pass."""
    end, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE_SECONDS
    while True:
        try:
            return call()
        except _MISSING:
            raise
        except Exception as error:
            _raise_final(error, what)
            if time.monotonic() + pause > end:
                raise StorageError(
                    f"{what} cannot be reached ({_reason(error)}), tried for {PATIENCE_SECONDS:.0f} s; the same "
                    "command continues when the storage answers again"
                ) from error
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _raise_final(error: Exception, what: str) -> None:
    """Raises what the error means for the user, unless it may pass."""
    if isinstance(error, StorageError | UserError):
        raise error
    kind, text = type(error).__name__, str(error)
    code = getattr(error, "code", None)
    bucket = "/".join(what.split("/")[:3])
    if kind == "DefaultCredentialsError" or code == 401:
        raise UserError(
            f"{what}: there are no credentials; run `gcloud auth application-default login`, or set "
            "GOOGLE_APPLICATION_CREDENTIALS to a key file"
        ) from error
    if "Project was not passed" in text:
        raise UserError(f"{what}: there is no project; set GOOGLE_CLOUD_PROJECT to the project of {bucket}") from error
    if code == 403 or text.startswith("Forbidden"):
        raise UserError(
            f"{what}: no permission ({_reason(error)}); the account needs the roles Storage Object Admin and Storage "
            f"Legacy Bucket Reader on {bucket}"
        ) from error
    if kind == "NotFound" and what == bucket:
        raise UserError(
            f"the bucket {bucket} does not exist; create it with `gcloud storage buckets create {bucket}`, or correct "
            "its name"
        ) from error
    if isinstance(error, OSError) and error.errno in _LOCAL_DISK:
        raise StorageError(f"{what}: {error.strerror} ({error.filename or 'local disk'})") from error
    refused = isinstance(code, int) and 400 <= code < 500 and code not in (408, 429)
    if refused or text.startswith("Bad Request"):
        raise StorageError(f"{what}: the storage refuses the request ({_reason(error)})") from error
    if not (isinstance(error, OSError | TimeoutError) or type(error).__module__.split(".")[0] in _CLIENT_PACKAGES):
        raise error


def is_outage(error: BaseException | None) -> bool:
    """Whether a file could not be read because of the disk, the service or the permission, not because of its content.

    Looks at the causes, too, because Orbax and TensorStore wrap errors.
    """
    while error is not None:
        code = getattr(error, "code", None)
        if isinstance(error, StorageError | TimeoutError | ConnectionError | PermissionError):
            return True
        if isinstance(error, OSError) and (error.errno in _LOCAL_DISK or str(error).startswith("Forbidden")):
            return True
        if code in (401, 403, 408, 429) or (isinstance(code, int) and code >= 500):
            return True
        if type(error).__module__.split(".")[0] in ("aiohttp", "requests", "urllib3"):
            return True
        if _OUTAGE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(error: BaseException) -> str:
    return ((str(error).strip() or type(error).__name__).splitlines()[0])[:200]


def _patient(name: str) -> Any:
    """A method of `RemotePath` that repeats the method of the same name of `epath`."""
    method = getattr(gpath.PosixGPath, name)

    @functools.wraps(method)
    def repeated(self, *args, **kwargs):
        _check_bucket(self.parts[2])
        return _retried(lambda: method(self, *args, **kwargs), str(self))

    return repeated


class RemotePath(gpath.PosixGPath):
    """A `gs://` path with the methods of `pathlib.Path` that a run needs."""

    exists, is_dir, _stat = _patient("exists"), _patient("is_dir"), _patient("stat")
    read_bytes, read_text = _patient("read_bytes"), _patient("read_text")
    rmtree = _patient("rmtree")

    def is_file(self) -> bool:
        return self.exists() and not self.is_dir()

    def stat(self) -> Any:
        """The fields of `os.stat_result` that storage knows."""
        stat = self._stat()
        return types.SimpleNamespace(st_size=stat.length, st_mtime=stat.mtime)

    def absolute(self) -> RemotePath:
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    def iterdir(self) -> Iterator[RemotePath]:
        _check_bucket(self.parts[2])
        return iter(_retried(lambda: list(super(RemotePath, self).iterdir()), str(self)))

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: storage has no folders. Only checks that the bucket can be reached."""
        _check_bucket(self.parts[2])

    def write_bytes(self, data: bytes) -> int:
        """One request for up to 50 MB; an object is visible only when all of it has arrived."""
        _check_bucket(self.parts[2])
        _retried(lambda: self._file_system.pipe_file(str(self), data), str(self))
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, errors: str | None = None) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def unlink(self, missing_ok: bool = False) -> None:
        _check_bucket(self.parts[2])
        try:
            _retried(lambda: self._file_system.rm_file(str(self)), str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def download(self, target: Path) -> None:
        _check_bucket(self.parts[2])
        _retried(lambda: self._file_system.get_file(str(self), str(target)), str(self))

    def upload(self, source: Path) -> None:
        _check_bucket(self.parts[2])
        _retried(lambda: self._file_system.put_file(str(source), str(self)), str(self))

    def copy_to(self, target: RemotePath) -> None:
        _check_bucket(self.parts[2])
        _retried(lambda: self._file_system.cp_file(str(self), str(target)), str(self))

    def files(self) -> dict[str, dict[str, Any]]:
        """All objects below the folder: their size and CRC-32C by name relative to it."""
        _check_bucket(self.parts[2])
        found = _retried(lambda: self._file_system.find(str(self), detail=True), str(self))
        start = len(str(self).removeprefix("gs://")) + 1
        entries = {name[start:]: info for name, info in found.items() if not name.endswith("/") and name[start:]}
        return {name: {"size": int(info["size"]), "crc32c": info.get("crc32c")} for name, info in entries.items()}

    @property
    def _file_system(self) -> Any:
        return _file_system()


def _file_system() -> Any:
    """The one that `epath`, and so Orbax, uses for `gs://`."""
    import fsspec

    return fsspec.filesystem("gcs", finalize_on_close=True)


# ---- whole files


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
            scratch = path.with_name(f".partial.{path.name}")
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


def fetch(url: str, target: Path) -> None:
    """Copies what a URL of any service names to a local file, in one try, with the errors of the service's client."""
    with importlib.import_module("fsspec").open(url, "rb") as remote, target.open("wb") as file:
        while block := remote.read(2**24):
            file.write(block)


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


def crc32c_of(path: Path) -> str:
    """The checksum of a local file, as the storage service writes it."""
    import base64

    import google_crc32c

    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(2**24):
            checksum.update(block)
    return base64.b64encode(checksum.digest()).decode()


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


# ---- conditional writes


def read_generation(path: Path) -> tuple[bytes, int]:
    """The content of an object and the number of this version of it; empty and 0 if there is none."""
    return _retried(lambda: _read_generation(_blob(path)), str(path))


def write_generation(path: Path, content: bytes, generation: int) -> int | None:
    """Writes an object if its newest version is this one, 0 for none; returns the new version, None if it is not.

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

    return _retried(write, str(path))


def remove_generation(path: Path, generation: int) -> None:
    """Removes an object if its newest version is this one."""

    def remove() -> None:
        try:
            _blob(path).delete(if_generation_match=generation, timeout=_SILENT_SECONDS, retry=None)
        except Exception as error:
            if type(error).__name__ not in ("PreconditionFailed", "NotFound"):
                raise

    _retried(remove, str(path))


def _blob(path: Path) -> Any:
    _check_bucket(path.parts[2])
    return _client().bucket(path.parts[2]).blob("/".join(path.parts[3:]))


def _read_generation(blob: Any) -> tuple[bytes, int]:
    while True:
        try:
            blob.reload(timeout=_SILENT_SECONDS, retry=None)
        except Exception as error:
            if type(error).__name__ == "NotFound":
                return b"", 0
            raise
        generation = int(blob.generation)  # a download sets it again, from a header that may be missing
        try:
            content = blob.download_as_bytes(if_generation_match=generation, timeout=_SILENT_SECONDS, retry=None)
            return content, generation
        except Exception as error:  # it was replaced in between
            if type(error).__name__ not in ("NotFound", "PreconditionFailed"):
                raise
