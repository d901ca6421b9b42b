"""The exclusive right to write a run: a lock of the operating system for local folders, a lease in storage for `gs://`.

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
from train_jax.run.files import cannot_be_written
from train_jax.run.storage import is_remote, read_generation, write_generation

LEASE_SECONDS, RENEW_SECONDS = 30.0, 8.0

_held: dict[str, Lease] = {}


class HeldError(UserError):
    """Another process writes to the folder."""


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Makes the folder and holds its lock while the block runs.

    Raises `HeldError` if another process holds it, `StorageError` for a folder that cannot be written.
    """
    with _leased(folder) if is_remote(folder) else _locked(folder):
        yield


def check_writer(folder: Path) -> None:
    """Raises `StorageError` if another process took over the lease of this folder; called before a write."""
    lease = _held.get(str(folder))
    if lease is not None:
        lease.check()


def _refused(folder: Path, owner: str) -> HeldError:
    return HeldError(
        f"{folder} is being written by {owner or 'another process'}; wait until it ends, or use another --run-dir"
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock during the block; the operating system releases it however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
        yield


@contextlib.contextmanager
def _leased(folder: Path) -> Iterator[None]:
    lease = Lease(folder / "lock")
    lease.acquire()
    _held[str(folder)] = lease
    try:
        yield
    finally:
        del _held[str(folder)]
        lease.release()


class Lease:
    """One object in storage that names the process that may write the folder around it; empty after its release."""

    def __init__(self, path: Path):
        self._path, self._generation, self._renewals = path, 0, 0
        self._token = secrets.token_hex(8)
        self._lock, self._released = threading.Lock(), threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="lease", daemon=True)

    def acquire(self) -> None:
        """Takes the lease; waits for an owner that is silent. Raises `HeldError` if the owner is alive."""
        first, end = read_generation(self._path), time.monotonic() + LEASE_SECONDS
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
        """Renews the lease. Raises `StorageError` if another process took it over."""
        if not self._write():
            owner = _owner_in(read_generation(self._path)[0]) or "another process"
            raise StorageError(
                f"{self._path.parent} was taken over by {owner}, because this process was silent for "
                f"{LEASE_SECONDS:.0f} s; it stops without writing more"
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
