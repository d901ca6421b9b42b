"""Reads untrusted files without pickle, warnings or unbounded reads; any damage is a `DamagedError` with a reason.

NumPy is imported where an array is read, which `trm status` does not need.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

DAMAGE = (
    OSError, ValueError, KeyError, EOFError, MemoryError, OverflowError, TypeError, SyntaxError, RuntimeError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError, Warning,
)  # fmt: skip
"""The exceptions that NumPy raises for damaged files, as measured by `python -m campaigns.fuzz_data`. Recursion errors
and unsupported features are RuntimeErrors."""


LFS_POINTER = "version https://git-lfs"
"""Beginning of a file that stands for one in Git LFS."""
POINTER = "it is a pointer of Git LFS; run `git lfs pull` in its repository"


class DamagedError(Exception):
    """A file cannot be read; the text is a short reason."""


def read_whole(path: Path, *, largest_bytes: int) -> bytes:
    """Reads a file. Raises `FileNotFoundError`, or `DamagedError` if it is larger, not a regular file, or unreadable.

    An untrusted folder can contain a link to a device, whose size is unlimited, or to a pipe, which blocks forever.
    """
    try:
        refuse_special(path)
        size = path.stat().st_size
        if size > largest_bytes:
            raise DamagedError(f"{size:,} bytes, expected at most {largest_bytes:,}")
        content = path.read_bytes()
    except FileNotFoundError:  # the errors of storage have neither a number nor a reason
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except OSError as error:
        raise DamagedError(error.strerror or type(error).__name__) from None
    if content.startswith(LFS_POINTER.encode()):
        raise DamagedError(POINTER)
    return content


def refuse_special(path: Path) -> None:
    """Raises `DamagedError` for a pipe, which blocks whoever opens it, and for a device."""
    if not path.is_file() and not path.is_dir() and path.exists():
        raise DamagedError("it is not a regular file")


def is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER.encode()


def map_array(path: Path) -> np.ndarray:
    """Memory-maps the array of a `.npy` file, so that a header with a false size does not allocate memory.

    Raises `FileNotFoundError`, or `DamagedError` for any other error.
    """
    import numpy as np

    with _any_damage(path):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError("expected one array, found an archive")
        return array


def read_arrays(path: Path, names: Iterable[str], *, largest_bytes: int) -> dict[str, np.ndarray]:
    """Reads arrays of a `.npz` file. Raises `DamagedError`, also if they are larger than `largest_bytes` unpacked."""
    import numpy as np

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
            refuse_special(path)
            yield
    except (FileNotFoundError, DamagedError):
        raise
    except DAMAGE as error:
        if not isinstance(error, OSError) and is_lfs_pointer(path):
            raise DamagedError(POINTER) from None
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DamagedError(" ".join(reason.split())[:100] or type(error).__name__) from None
