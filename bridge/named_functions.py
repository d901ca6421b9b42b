"""Python functions that a traced call replaces, by the name under which code looks them up.

PyTorch code calls functions that cannot be traced: kernels of other packages, or Python that asks a tensor for its
value. A function of the same meaning, made of operations that can be traced, takes their place.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from bridge.errors import BridgeError
from bridge.tracing import active

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


def install(functions: Iterable[str]) -> None:
    """Replace the registered functions, and these, of modules that have been imported since the last call."""
    for name in {**_REPLACEMENTS, **dict.fromkeys(functions)}:
        module, _, path = name.partition(":")
        if module in sys.modules:
            _replace(name, sys.modules[module], path.split("."))


def _replace(name: str, owner: Any, path: list[str]) -> None:
    try:
        for step in path[:-1]:
            owner = getattr(owner, step)
        original = getattr(owner, path[-1])
    except AttributeError as error:
        raise BridgeError(f"the registered function {name} is not there: {error}; correct the name") from None
    if getattr(original, "registered_name", None) == name:
        return

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        dispatch = active()
        function: Any = original
        if dispatch is not None:
            function = dispatch.functions.get(name) or _REPLACEMENTS.get(name, original)
        return function(*args, **kwargs)

    setattr(chosen, "registered_name", name)  # noqa: B010
    setattr(owner, path[-1], chosen)
