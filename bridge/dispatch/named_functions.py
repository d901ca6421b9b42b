"""Python functions that a traced call replaces, by the name under which code looks them up.

PyTorch code calls functions that cannot be traced: kernels of other packages, or Python that asks a tensor for its
value. A function of the same meaning, made of operations that can be traced, takes their place while a call runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bridge.errors import BridgeError

_REPLACEMENTS: dict[str, Callable[..., Any]] = {}


def register_function(name: str, replacement: Callable[..., Any]) -> None:
    """Run `replacement` where code in a traced call looks up the function `name`; PyTorch's calls run it unchanged.

    `name` is `package.module:attribute`, with further attributes after dots: of a namespace that holds the function, or
    of a class. Code that has done `from package.module import f` looks it up in its own module: `own.module:f`. The
    replacement gets the same arguments, runs as the code of the module does, and may write into tensors. The module
    need not be imported yet. The last replacement for a name counts.

    Raises `ValueError` for a name of another form; a call raises `BridgeError` if the module has no such function.
    """
    check_name(name)
    _REPLACEMENTS[name] = replacement


def check_name(name: str) -> None:
    """Raise `ValueError` unless the name has the form of a function's."""
    module, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise ValueError(f"{name!r} names no function; use package.module:function")


@contextlib.contextmanager
def replaced(functions: Iterable[str], active: Callable[[], Any]) -> Iterator[None]:
    """Within it the registered functions, and these, are replaced in the modules that have been imported so far.

    `active` returns the traced call of a thread: code outside of one, in other threads, runs the functions themselves.
    """
    entered: list[str] = []
    try:
        for name in dict.fromkeys([*_REPLACEMENTS, *functions]):
            module, _, path = name.partition(":")
            if module in sys.modules:
                with _LOCK:
                    _enter(name, sys.modules[module], path.split("."), active)
                entered.append(name)
        yield
    finally:
        with _LOCK:
            for name in entered:
                _leave(name)


@dataclasses.dataclass
class _Place:
    owner: Any
    attribute: str
    original: Any
    """What is there outside of calls; None where the owner inherits it."""
    calls: int = 1


_LOCK = threading.Lock()
_PLACES: dict[str, _Place] = {}
"""Where a function is replaced now, and for how many calls."""


def _enter(name: str, owner: Any, path: list[str], active: Callable[[], Any]) -> None:
    if name in _PLACES:
        _PLACES[name].calls += 1
        return
    try:
        for step in path[:-1]:
            owner = getattr(owner, step)
        original = getattr(owner, path[-1])
    except AttributeError as error:
        raise BridgeError(f"the registered function {name} is not there: {error}; correct the name") from None

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        dispatch = active()
        function: Any = original
        if dispatch is not None:
            function = dispatch.functions.get(name) or _REPLACEMENTS.get(name, original)
        return function(*args, **kwargs)

    _PLACES[name] = _Place(owner, path[-1], vars(owner).get(path[-1]))
    setattr(owner, path[-1], chosen)


def _leave(name: str) -> None:
    place = _PLACES[name]
    place.calls -= 1
    if place.calls:
        return
    del _PLACES[name]
    if place.original is None:
        delattr(place.owner, place.attribute)
    else:
        setattr(place.owner, place.attribute, place.original)
