"""The end of a process that does not wait for its threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

LAST_SECONDS = 5.0
"""Seconds for which `exit_now` waits for the functions of `before_exit`."""

_before_exit: list[Callable[[str], None]] = []


@contextlib.contextmanager
def before_exit(call: Callable[[str], None]) -> Iterator[None]:
    """Makes `exit_now` call this function with its reason, in another thread, if a process ends inside the block."""
    _before_exit.append(call)
    try:
        yield
    finally:
        _before_exit.remove(call)


def _call_before_exit(reason: str) -> None:
    for call in reversed(_before_exit):
        with contextlib.suppress(Exception):  # the process ends in any case
            call(reason)


def exit_now(status: int, reason: str = "") -> None:
    """Ends the process without waiting for its threads; what was written to its files is kept.

    `reason`: why a run ends that has not finished, as `Events.end` records it.
    """
    if _before_exit:
        last = threading.Thread(target=_call_before_exit, args=(reason,), name="last", daemon=True)
        last.start()
        last.join(LAST_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    time.sleep(0.2)  # the other threads send their messages before the connections are closed
    os._exit(status)
