"""The log of one process: a copy of its output in a file of the run's folder."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from train_jax.errors import PreemptedError, UserError
from train_jax.storage.files import cannot_be_written, check_regular
from train_jax.storage.lines import ends_in_a_torn_line


class _Tee:
    """A text stream that also writes to the log. A log that cannot be written does not stop the process."""

    def __init__(self, stream: TextIO, log: TextIO):
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._log.write(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def host_log(path: Path, what: str) -> Iterator[None]:
    """Appends standard output and standard error of this process to the file, line by line, and the way it ends.

    An exception that leaves the context is logged with its traceback, a `UserError` with its message; a fatal signal
    such as SIGSEGV or SIGABRT with the traceback of every thread. What libraries in C++ print is not logged. `what`
    describes the process in the header that begins its part of the file. Raises `StorageError` if it cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_regular(path, "remove it")
        torn = path.exists() and ends_in_a_torn_line(path)
        log = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise cannot_be_written(path, error) from None
    with log:
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        log.write(f"{chr(10) * torn}==== {started}, {what}, process {os.getpid()} on {platform.node()}\n")
        before = sys.stdout, sys.stderr
        tees = [_Tee(stream, log) for stream in before]
        follows = not faulthandler.is_enabled()
        if follows:
            faulthandler.enable(log)
        _replace(before, tees)
        try:
            yield
        except (UserError, PreemptedError) as error:
            log.write(f"trm: {error}\n")
            raise
        except BaseException:
            log.write(traceback.format_exc())
            raise
        finally:
            _replace(tees, before)
            if follows:
                faulthandler.disable()


def _replace(before: Any, after: Any) -> None:
    """Sets the standard streams, also in the handlers of loggers, which keep the stream of their creation."""
    names = [None, *logging.root.manager.loggerDict]
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}
    for old, new, name in zip(before, after, ("stdout", "stderr"), strict=True):
        if getattr(sys, name) is old:
            setattr(sys, name, new)
        for handler in handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
