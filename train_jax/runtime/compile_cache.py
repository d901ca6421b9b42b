"""JAX's persistent compilation cache: a run of equal shapes does not compile again."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_MIN_COMPILE_SECONDS = 0.0
"""Small programs are stored, too: a start has dozens of them."""


def use_compile_cache(wanted: bool, shared: Path | None = None) -> str:
    """Switches the cache on or off for this process; returns why it is off although it is wanted, otherwise nothing.

    It is in the folder that the environment variable names. Without one it is in that of the user's caches or, for
    several processes, in `shared`, which all of them can read: JAX lets process 0 alone write.
    """
    config: Any = jax.config
    if not wanted or not config.jax_enable_compilation_cache:
        config.update("jax_enable_compilation_cache", False)
        return ""
    if not config.jax_compilation_cache_dir:
        own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trm" / "compiled"
        folder = (shared or own) / _processor()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            config.update("jax_enable_compilation_cache", False)
            return f"compiled programs are not kept: {folder} cannot be written ({error.strerror}); set {VARIABLE}"
        config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    return ""


def _processor() -> str:
    """Programs for a CPU may use instructions that another machine with the same home folder does not have."""
    try:
        with open("/proc/cpuinfo") as file:
            facts = {line for line in file if line.startswith(("flags", "Features", "model name"))}
    except OSError:
        facts = {platform.processor()}
    return f"{platform.machine()}-{zlib.crc32(''.join(sorted(facts)).encode()):08x}"


class CacheUse:
    """Hits and misses of the cache, in one thread."""

    def __init__(self):
        self.hits = self.misses = 0

    def __str__(self) -> str:
        if self.hits and not self.misses:
            return "from the compilation cache"
        return "into the compilation cache" if self.misses else "without the compilation cache"


@contextlib.contextmanager
def counted_cache_use() -> Iterator[CacheUse]:
    """Counts what this thread compiles inside the context."""
    use = _USES.setdefault(threading.get_ident(), CacheUse())
    if not _LISTENING:
        _LISTENING.append(True)
        jax.monitoring.register_event_listener(_count)
    try:
        yield use
    finally:
        _USES.pop(threading.get_ident(), None)


_USES: dict[int, CacheUse] = {}
_LISTENING: list[bool] = []


def _count(event: str, **_: object) -> None:
    use = _USES.get(threading.get_ident())
    if use is not None:
        use.hits += event == "/jax/compilation_cache/cache_hits"
        use.misses += event == "/jax/compilation_cache/cache_misses"
