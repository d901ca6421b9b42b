"""Builds modules without filling large tensors, where only their shapes matter."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 2**20
"""Elements from which a tensor is not filled."""
_FILLERS = {getattr(torch.ops.aten, name) for name in ("normal_", "uniform_", "zero_", "fill_")}


class Uninitialized(TorchDispatchMode):
    """A context in which large tensors keep the values that they are allocated with.

    The operating system gives memory to a tensor when it is written, so an unfilled one needs almost none.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _FILLERS and args[0].numel() >= LARGE:
            return args[0]
        return func(*args, **(kwargs or {}))
