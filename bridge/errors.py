"""Errors and warnings of the bridge: the operation, the submodule, the source line, the remedy."""

import contextlib
import importlib.util
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping

import jax
import torch

_TORCHAX = importlib.util.find_spec("torchax")
FRAMEWORK = tuple(
    os.path.dirname(file) + os.sep
    for file in (torch.__file__, jax.__file__, __file__, _TORCHAX.origin if _TORCHAX else None)
    if file
)
HERE = os.path.dirname(__file__) + os.sep
_LIBRARY = os.path.dirname(contextlib.__file__) + os.sep
"""The folder of Python's own library; packages may be installed inside it."""

WITHOUT_MEMORY = "asks for the memory of a traced tensor"
WITHOUT_MEMORY_REMEDY = (
    "write what is done with it in operations of PyTorch, or compute it before the call and pass it in"
)


class BridgeError(RuntimeError):
    """A part of the module has no faithful translation; the message names the part, the place and the remedy."""


class BridgeWarning(UserWarning):
    """The translation continues, but differs from PyTorch in some respect; the warning appears once per place."""


def is_framework(path: str) -> bool:
    """True if a source file does not belong to the user."""
    of_python = path.startswith(_LIBRARY) and "-packages" not in path
    return of_python or path.startswith((*FRAMEWORK, "<"))


def add_place(error: Exception, where: Callable[[BaseException], str]) -> None:
    """Adds `where(error)` as a note to an error that PyTorch's own code raises and that names no place yet."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    noted = isinstance(error, BridgeError) or hasattr(error, "__notes__")
    if not noted and is_framework(frame.f_code.co_filename):
        error.add_note(where(error))


def where_in_module(names: Mapping[int, str], error: BaseException | None = None) -> str:
    """Returns the innermost running submodule and its source line, read from the Python stack or from an error's.

    `names` maps `id(submodule)` to its qualified name. The stack is walked only when there is a message.
    """
    line = module = None
    for frame, number in _frames(sys._getframe(1), error):
        path = frame.f_code.co_filename
        if line is None and not is_framework(path):
            source = linecache.getline(path, number).strip()
            line = f"{path}:{number}: `{source}`"
        owner = _owner(names, frame) if module is None else None
        if owner is not None:
            module = f"{names[id(owner)] or 'the module itself'} ({type(owner).__name__})"
        if line is not None and module is not None:
            break
    return f"in {module or 'the call'}, at {line or 'an unknown line'}"


def _owner(names: Mapping[int, str], frame: types.FrameType) -> torch.nn.Module | None:
    owner = frame.f_locals.get("self")
    if issubclass(type(owner), torch.nn.Module) and id(owner) in names:
        return owner
    return None


def _frames(innermost: types.FrameType, error: BaseException | None) -> Iterator[tuple[types.FrameType, int]]:
    """Yields frames and lines from the inside out; for an error, from its traceback, since generators lose `f_back`."""
    outer: types.FrameType | None = innermost
    if error is not None:
        raised = [*traceback.walk_tb(error.__traceback__)]
        yield from reversed(raised)
        outer = raised[0][0].f_back
    yield from traceback.walk_stack(outer) if outer is not None else ()


@contextlib.contextmanager
def named_failure(what: str, remedy: str = "") -> Iterator[None]:
    """Raises any exception of the code under it as one `BridgeError` that names what failed."""
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        raise BridgeError(f"{what}: {first_line(error)}{remedy}") from error


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
