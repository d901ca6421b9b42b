"""Hashes of the content of data sets, which are not computed again while the sizes and times of their files stay."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from train_jax.errors import UserError
from train_jax.storage.cache import cache_folder
from train_jax.storage.files import write_text

LEAST_BYTES = 2**26
"""Bytes of files whose hash is remembered; smaller ones are read in a tenth of a second."""


def remembered(files: Sequence[Path], what: str, compute: Callable[[], str]) -> str:
    """Returns `compute()`, a hash of the content of local files.

    The hash of large files is kept in the cache. It is computed again where the size, the time of the last change of
    content or status, or the inode of a file is another one. `what` names the kind of hash.
    """
    stats = [(path.name, path.stat()) for path in files]
    if sum(stat.st_size for _, stat in stats) < LEAST_BYTES:
        return compute()
    # The paths do not count: a folder that is renamed has the same files, and a copy has other times.
    facts = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats]
    place = cache_folder() / "content" / hashlib.sha256(json.dumps([what, facts]).encode()).hexdigest()[:32]
    known = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        known = place.read_text()
    if known:
        return known
    value = compute()
    with contextlib.suppress(UserError):  # a cache that cannot be written costs time, nothing else
        write_text(place, value)
    return value
