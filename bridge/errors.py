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

from bridge.context import RUNNING, current

_TORCHAX = importlib.util.find_spec("torchax")
FRAMEWORK = tuple(
    os.path.dirname(file) + os.sep
    for file in (torch.__file__, jax.__file__, __file__, _TORCHAX.origin if _TORCHAX else None)
    if file
)
HERE = os.path.dirname(__file__) + os.sep
_LIBRARY = os.path.dirname(contextlib.__file__) + os.sep
"""Python's own, in which packages may be installed."""

WITHOUT_MEMORY = "asks for the memory of a traced tensor"
WITHOUT_MEMORY_REMEDY = (
    "write what is done with it in operations of PyTorch, or compute it before the call and pass it in"
)


class BridgeError(RuntimeError):
    """Something in the module has no faithful translation; the message says what, where and what to do."""


class BridgeWarning(UserWarning):
    """The translation goes on, but something is not what PyTorch would have done; said once per place."""


def refusal(what: str, remedy: str) -> BridgeError:
    """The error of this thread's call.

    A thread without one may have been started inside a call, which would not notice if it ended here: then it is the
    error of every call that is being traced.
    """
    call = current()
    errors = [each.error(what, remedy) for each in ([call] if call is not None else tuple(RUNNING))]
    return errors[-1] if errors else BridgeError(f"{what} {where_in_module({})}. Remedy: {remedy}.")


def is_framework(path: str) -> bool:
    """True if a source file is none of the user's."""
    of_python = path.startswith(_LIBRARY) and "-packages" not in path
    return of_python or path.startswith((*FRAMEWORK, "<"))


def add_place(error: Exception, where: Callable[[BaseException], str]) -> None:
    """Add `where(error)` as a note to an error that PyTorch's own code raises and that names no place so far."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    noted = isinstance(error, BridgeError) or hasattr(error, "__notes__")
    if not noted and is_framework(frame.f_code.co_filename):
        error.add_note(where(error))


def where_in_module(names: Mapping[int, str], error: BaseException | None = None) -> str:
    """The innermost submodule being called and its source line, read off the Python stack, or off that of an error.

    `names` maps `id(submodule)` to its qualified name. Walking the stack costs nothing until there is something to say.
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
    return owner if issubclass(type(owner), torch.nn.Module) and id(owner) in names else None


def _frames(innermost: types.FrameType, error: BaseException | None) -> Iterator[tuple[types.FrameType, int]]:
    """Frames and their lines from the inside out. Those of an error are in its traceback: generators lose `f_back`."""
    outer: types.FrameType | None = innermost
    if error is not None:
        raised = [*traceback.walk_tb(error.__traceback__)]
        yield from reversed(raised)
        outer = raised[0][0].f_back
    yield from traceback.walk_stack(outer) if outer is not None else ()


@contextlib.contextmanager
def named_failure(what: str, remedy: str = "") -> Iterator[None]:
    """Raise whatever is raised under it as one `BridgeError` that says what failed."""
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        raise BridgeError(f"{what}: {first_line(error)}{remedy}") from error


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
