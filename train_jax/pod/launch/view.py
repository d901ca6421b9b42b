"""The logs of all hosts in one view, each line with its host in front."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path


class View:
    """Writes lines of several hosts, from several threads."""

    def __init__(self, write: Callable[[str], None]):
        """`write` gets whole lines without their end."""
        self._write, self._lock = write, threading.Lock()

    def line(self, host: int, text: str) -> None:
        """A line of the log of a host."""
        with self._lock:
            self._write(f"host {host} | {text}")

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        with self._lock:
            self._write(f"launch | {text}")


def log_file(folder: Path, host: int) -> Path:
    """The local copy of the log of a host."""
    return folder / f"host-{host:02}.log"
