"""Reads files that somebody else made: no pickles, no warnings, nothing endless, any damage as one short reason."""

import contextlib
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

DAMAGE = (
    OSError, ValueError, KeyError, EOFError, MemoryError, OverflowError, TypeError, SyntaxError, RuntimeError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError, Warning,
)  # fmt: skip
"""What numpy raises for a damaged file, depending on where the damage is; recursion and missing features are
RuntimeErrors. Found by `python -m benchmarks.fuzz_data`."""


class DamagedError(Exception):
    """A file that cannot be read; the text says why, in a few words."""


def read_whole(path: Path, *, largest_bytes: int) -> bytes:
    """Raises `FileNotFoundError`, or `DamagedError` for what is larger, is no ordinary file or cannot be read.

    A data set may hold a link to a device, which has no size and no end, or to a pipe, which waits for ever.
    """
    try:
        if path.exists() and not path.is_file():
            raise DamagedError("Is a directory" if path.is_dir() else "it is no ordinary file")
        size = path.stat().st_size
        if size > largest_bytes:
            raise DamagedError(f"{size:,} bytes, expected at most {largest_bytes:,}")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(error.strerror or type(error).__name__) from None


def map_array(path: Path) -> np.ndarray:
    """The array of a `.npy` file, mapped: a header that promises more than the file holds costs no memory.

    Raises `FileNotFoundError`, or `DamagedError` for everything else.
    """
    with _any_damage():
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError("expected one array, found an archive")
        return array


def read_arrays(path: Path, names: Iterable[str], *, largest_bytes: int) -> dict[str, np.ndarray]:
    """These arrays of a `.npz` file. Raises `DamagedError`, also where they unpack to more than `largest_bytes`."""
    with _any_damage():
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > largest_bytes:
            raise ValueError(f"{size:,} bytes unpacked, expected at most {largest_bytes:,}")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}


@contextlib.contextmanager
def _any_damage() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy warns of a header that it tries to read although it is damaged
            yield
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DamagedError(" ".join(reason.split())[:100] or type(error).__name__) from None
