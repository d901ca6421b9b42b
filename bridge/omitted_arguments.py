"""Arguments that functions of PyTorch leave out where they hand themselves to a `TorchFunctionMode`."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_OMITTED: dict[Any, str] = {F.l1_loss: "weight", torch.chain_matmul: "out"}


def with_omitted(func: Callable, kwargs: dict) -> dict:
    """`kwargs` with the argument that the running call of `func` was given and does not pass on."""
    name = _OMITTED.get(func, "")
    frame = frame_of(func) if name else None
    value = None if frame is None else frame.f_locals[name]
    return kwargs if value is None else {**kwargs, name: value}


def frame_of(func: Any) -> types.FrameType | None:
    """The innermost running call of a Python function."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    return frame
