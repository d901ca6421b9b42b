"""What the bridge says when it cannot keep a meaning: the op, the submodule, the source line, the remedy."""

import importlib.util
import linecache
import os
import sys
from collections.abc import Mapping

import jax
import torch

_TORCHAX = importlib.util.find_spec("torchax")
_FRAMEWORK = tuple(
    os.path.dirname(file) + os.sep
    for file in (torch.__file__, jax.__file__, __file__, _TORCHAX.origin if _TORCHAX else None)
    if file
)


class BridgeError(RuntimeError):
    """Something in the module has no faithful translation; the message says what, where and what to do."""


class BridgeWarning(UserWarning):
    """The translation goes on, but something is not what PyTorch would have done; said once per place."""


def is_framework(path: str) -> bool:
    """Whether a source file is none of the user's."""
    return path.startswith((*_FRAMEWORK, "<"))


def where_in_module(names: Mapping[int, str]) -> str:
    """The innermost submodule being called and its source line, read off the Python stack.

    `names` maps `id(submodule)` to its qualified name. Walking the stack costs nothing until there is something to say.
    """
    frame, line, module = sys._getframe(1), None, None
    while frame is not None and (line is None or module is None):
        path = frame.f_code.co_filename
        if line is None and not is_framework(path):
            source = linecache.getline(path, frame.f_lineno).strip()
            line = f"{path}:{frame.f_lineno}: `{source}`"
        owner = frame.f_locals.get("self")
        if module is None and isinstance(owner, torch.nn.Module) and id(owner) in names:
            module = f"{names[id(owner)] or 'the module itself'} ({type(owner).__name__})"
        frame = frame.f_back
    return f"in {module or 'the module'}, at {line or 'an unknown line'}"
