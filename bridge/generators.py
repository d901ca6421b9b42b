"""Draws from the generators of `random` and `numpy.random`, whose numbers would be constants of a traced program.

The generators belong to all threads. So a call that ends with another state than it began with is traced once more, and
each draw of its thread is refused where it is made.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bridge.context import CURRENT, refusal


def refuse_draws(trace: Callable[[], Any]) -> None:
    """Traces a call once more after which a generator was another. Raises `BridgeError` if this thread draws in it."""
    alone = threading.active_count() == 1
    states = CURRENT.states
    CURRENT.watched = True
    try:
        with _ONE_AT_A_TIME:
            trace()
    finally:
        CURRENT.watched = False
        if alone:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def watched_draws() -> Iterator[None]:
    """Refuses draws of this thread, also by functions that were imported from `random` and `numpy.random`."""
    profile = sys.getprofile()
    watched = MT19937()
    generator: Any = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    _continue_with(watched)
    watched.thread = threading.get_ident()
    sys.setprofile(_refuse_of_python)
    try:
        yield
    finally:
        sys.setprofile(profile)
        watched.thread = 0
        _continue_with(generator)


def _refuse(name: str) -> None:
    what = f"the call drew random numbers from `{name}`, which would be constants of the program"
    raise refusal(what, "draw with torch, or pass the number as an argument")


_ONE_AT_A_TIME = threading.RLock()
_OF_PYTHON = random.getrandbits.__self__


def _refuse_of_python(_frame: Any, event: str, function: Any) -> None:
    if event == "c_call" and getattr(function, "__self__", None) is _OF_PYTHON and function.__name__ != "getstate":
        _refuse("random")


class MT19937(np.random.MT19937):  # NumPy compares the name of the class with that in a state
    """NumPy's generator, which refuses draws of one thread: every draw enters its lock."""

    thread = 0
    lock = property(lambda self: self)  # pyright: ignore[reportAssignmentType]

    def __enter__(self) -> None:
        if threading.get_ident() == self.thread:
            _refuse("numpy.random")
        super().lock.__enter__()

    def __exit__(self, *_: Any) -> None:
        super().lock.__exit__(None, None, None)


def _continue_with(generator: Any) -> None:
    state = np.random.get_state()
    np.random.set_bit_generator(generator)  # pyright: ignore[reportAttributeAccessIssue]
    np.random.set_state(state)
