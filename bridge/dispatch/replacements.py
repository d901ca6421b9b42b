"""Python functions that a traced call replaces by their names."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from bridge._compat.torch import (
    Replacement,
    Replacements,
)
from bridge.context import CURRENT
from bridge.errors import BridgeError

_REPLACEMENTS: dict[str, Callable[..., Any]] = {}
_FOUND: dict[str, Callable[..., Any]] = {}
"""The same for names that `replace_everywhere` has found."""


def register_function(name: str, replacement: Callable[..., Any]) -> None:
    """Runs `replacement` where code in a traced call looks up the function `name`; calls by PyTorch run the original.

    `name` is `package.module:attribute`, with further attributes after dots: of a namespace that holds the function, or
    of a class. Code that has done `from package.module import f` looks it up in its own module: `own.module:f`. The
    replacement gets the same arguments, runs as the code of the module does, and may write into tensors. The module
    need not be imported yet. The last replacement for a name counts.

    Raises `ValueError` for a name of another form; a call raises `BridgeError` if the module has no such function.
    """
    check_name(name)
    _REPLACEMENTS[name] = replacement


def check_name(name: str) -> None:
    """Raises `ValueError` unless the name has the form of a function's name."""
    module, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise ValueError(f"{name!r} names no function; use package.module:function")


def replaced(functions: Iterable[str]) -> contextlib.ExitStack:
    """Returns a context in which the registered functions, and these, are replaced in the modules imported so far.

    Code outside of a traced call, in other threads, runs the functions themselves.
    """
    stack = contextlib.ExitStack()
    for name in dict.fromkeys([*_REPLACEMENTS, *_FOUND, *functions]):
        if name.partition(":")[0] in sys.modules:
            stack.enter_context(_replacement_of(name))
    return stack


def replace_everywhere(function: Any, replacement: Callable[..., Any]) -> bool:
    """Replaces a function in all modules imported so far that hold it, in the calls that start from now on.

    Returns False if no module holds it that did not at the last time.
    """
    known = len(_FOUND)
    for module, owner in list(sys.modules.items()):
        for attribute, value in list(getattr(owner, "__dict__", {}).items()):
            if value is function:
                _FOUND.setdefault(f"{module}:{attribute}", replacement)
    return len(_FOUND) > known


_LOCK = threading.Lock()
_PLACES: dict[str, tuple[Any, Replacements]] = {}
"""The owner of each function that has been replaced so far, and its replacement."""


def _replacement_of(name: str) -> Replacements:
    module, _, path = name.partition(":")
    *steps, attribute = path.split(".")
    try:
        owner = functools.reduce(getattr, steps, sys.modules[module])
        getattr(owner, attribute)
    except AttributeError as error:
        raise BridgeError(f"the registered function {name} is not there: {error}; correct the name") from None

    def make(original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            call = CURRENT.call
            if call is None:
                return original(*args, **kwargs)
            function = call.options.functions.get(name) or _REPLACEMENTS.get(name) or _FOUND.get(name) or original
            return function(*args, **kwargs)

        return chosen

    with _LOCK:
        if name not in _PLACES or _PLACES[name][0] is not owner:
            _PLACES[name] = owner, Replacements(Replacement(owner, attribute, make))
        return _PLACES[name][1]
