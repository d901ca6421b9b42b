"""The exclusive right to write a run: a lock of the operating system for local folders, a lease in storage for `gs://`.

The lock of a folder that is removed stays locked and protects nothing, so its owner compares the file that it has
locked with the one in the folder before it writes.

The lease is the object `lock` with its owner. Storage replaces it only for a writer that names its newest version, so
two processes cannot both believe to have written it. The owner renews it every `RENEW_SECONDS`. A process that finds a
lease watches it for `LEASE_SECONDS`: if it changes, its owner is alive, otherwise it is taken over. No clocks are
compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from train_jax.errors import StorageError, UserError
from train_jax.storage.files import cannot_be_written, make_folder
from train_jax.storage.storage import is_remote, read_generation, write_generation

LEASE_SECONDS = 30.0
RENEW_SECONDS = 8.0

_held: dict[str, Lease | _Lock] = {}


class HeldError(UserError):
    """Another process writes to the folder."""


class LostFolderError(StorageError):
    """The folder that this process writes is gone, or belongs to another process."""


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Makes the folder and holds its lock while the block runs.

    Raises `HeldError` if another process holds it, `StorageError` for a folder that cannot be written.
    """
    with _leased(folder) if is_remote(folder) else _locked(folder) as held:
        _held[str(folder)] = held
        try:
            yield
        finally:
            _held.pop(str(folder), None)


def check_writer(folder: Path) -> None:
    """Raises `LostFolderError` if this process no longer holds the lock or lease of this folder; before a write."""
    held = _held.get(str(folder))
    if held is not None:
        held.check()


def is_lost(folder: Path) -> bool:
    """Returns True if `check_writer` has failed: nothing may be written there any more."""
    held = _held.get(str(folder))
    return held is not None and held.lost


def _refused(folder: Path, owner: str) -> HeldError:
    return HeldError(
        f"{folder} is being written by {owner or 'another process'}; wait until it ends, or use another --run-dir"
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[_Lock]:
    """Holds the lock during the block; the operating system releases it however the process ends."""
    try:
        make_folder(folder)
        file = (folder / "lock").open("a+")
    except OSError as error:
        raise cannot_be_written(folder, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise _refused(folder, file.read().strip()) from None
        file.truncate(0)
        file.write(f"{owner()}\n")
        file.flush()
        held = _Lock(folder / "lock", file.fileno())
        held.check()  # the folder may have been removed since the file was opened
        yield held


class _Lock:
    """A locked file."""

    def __init__(self, path: Path, descriptor: int):
        self._path = path
        self._descriptor = descriptor
        self.lost = False

    def check(self) -> None:
        """Raises `LostFolderError` if the folder has another lock, or none."""
        try:
            same = os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            same = False
        except OSError as error:
            raise cannot_be_written(self._path, error) from None
        if not same:
            self.lost = True
            raise _removed(self._path.parent)


def _removed(folder: Path) -> LostFolderError:
    return LostFolderError(
        f"{folder} was removed or replaced while this process wrote it; this run stops without writing more"
    )


@contextlib.contextmanager
def _leased(folder: Path) -> Iterator[Lease]:
    lease = Lease(folder / "lock")
    lease.acquire()
    try:
        yield lease
    finally:
        lease.release()


class Lease:
    """One object in storage that names the process that may write the folder around it; empty after its release."""

    def __init__(self, path: Path):
        self._path = path
        self._generation = 0
        self._renewals = 0
        self._token = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.lost = False
        self._renewer = threading.Thread(target=self._renew, name="lease", daemon=True)

    def acquire(self) -> None:
        """Takes the lease; waits for an owner that is silent. Raises `HeldError` if the owner is alive."""
        first = read_generation(self._path)
        end = time.monotonic() + LEASE_SECONDS
        newest = first
        while newest == first and first[0] and time.monotonic() < end:
            time.sleep(min(1.0, LEASE_SECONDS / 10))
            newest = read_generation(self._path)
        content, self._generation = newest
        if newest != first and content:  # renewed
            raise _refused(self._path.parent, _owner_in(content))
        if not self._write():
            raise _refused(self._path.parent, _owner_in(read_generation(self._path)[0]))
        self._renewer.start()

    def check(self) -> None:
        """Renews the lease. Raises `LostFolderError` if another process has it, or if it was removed."""
        if self._write():
            return
        self.lost = True
        owner = _owner_in(read_generation(self._path)[0])
        if not owner:
            raise _removed(self._path.parent)
        raise LostFolderError(
            f"{self._path.parent} was taken over by {owner}, because this process was silent for "
            f"{LEASE_SECONDS:.0f} s or the folder was removed; this run stops without writing more"
        )

    def release(self) -> None:
        self._released.set()
        with self._lock, contextlib.suppress(StorageError, UserError):  # if this fails, the next process waits a little
            write_generation(self._path, b"", self._generation)

    def _write(self) -> bool:
        with self._lock:
            self._renewals += 1
            lease = f"{owner()}\n{self._token} {self._renewals}\n"  # no two writes are equal
            written = write_generation(self._path, lease.encode(), self._generation)
            self._generation = self._generation if written is None else written
            return written is not None

    def _renew(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            with contextlib.suppress(StorageError, UserError):  # an outage: tried again, and checked before a write
                if not self._write():
                    return


_started = time.strftime("%Y-%m-%d %H:%M:%S")


def owner() -> str:
    """Returns a description of this process for messages of other processes."""
    return f"process {os.getpid()} on {platform.node()} since {_started}"


def _owner_in(content: bytes) -> str:
    return content.decode(errors="replace").partition("\n")[0]
