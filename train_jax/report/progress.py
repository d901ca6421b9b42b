"""The progress of a command in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress_of(what: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar if standard error is a terminal; call it with the name of the work, the amount done and the
    total, 0 if that is unknown."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar like `progress_of`, for one piece of work."""
    with progress_of(what) as advance:
        yield partial(advance, what)
