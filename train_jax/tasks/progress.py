"""Progress reports of the builders."""

import sys
import time
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the name of the work, the amount done, and the total amount (0 if unknown)."""


class ProgressLine:
    """Writes to standard error: one line that is overwritten on a terminal, otherwise a line every ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause_seconds = 0.2 if self._terminal else 10.0
        self._last = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._last >= self._pause_seconds:
            self._last = time.monotonic()
            text = f"{what}: {done:,}" + (f" of {total:,}" if total else "")
            self._write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")

    def clear(self) -> None:
        if self._terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
