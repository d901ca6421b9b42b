"""Builds modules without filling large tensors, for uses in which only their shapes matter."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 2**20
"""Number of elements from which a tensor is not filled."""
_FILLERS = {getattr(torch.ops.aten, name) for name in ("normal_", "uniform_", "zero_", "fill_")}

_TRUNCATED = "_no_grad_trunc_normal_"
"""Name of the function that `nn.init.trunc_normal_` calls, also if it was imported by name."""


class Uninitialized(TorchDispatchMode):
    """A context in which large tensors keep the values that they are allocated with.

    The operating system gives memory to a tensor when it is written, so an unfilled one needs almost none. Not for
    several threads: `nn.init.trunc_normal_`, which draws until all values are within its bounds, is replaced meanwhile.
    """

    def __enter__(self) -> "Uninitialized":
        self._draws_until_within = getattr(nn.init, _TRUNCATED)
        setattr(nn.init, _TRUNCATED, self._truncated_normal)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        setattr(nn.init, _TRUNCATED, self._draws_until_within)

    def _truncated_normal(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if tensor.numel() >= LARGE else self._draws_until_within(tensor, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _FILLERS and args[0].numel() >= LARGE:
            return args[0]
        return func(*args, **(kwargs or {}))
