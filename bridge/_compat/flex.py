"""Private names of `torch.nn.attention.flex_attention`, which the code that uses it imports."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention as FLEX_ATTENTION
from torch._higher_order_ops.flex_attention import sdpa_dense

from bridge._compat.torch import Replacement, Replacements

__all__ = ["FLEX_ATTENTION", "SAFE_SOFTMAX", "as_operations", "is_identity", "is_without_mask", "sdpa_dense"]

SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
"""A softmax that is 0 where all scores are -inf."""
_MODULE = "torch.nn.attention.flex_attention"


def is_identity(score_mod: Callable) -> bool:
    """True for the function that PyTorch puts in the place of None."""
    return score_mod is sys.modules[_MODULE]._identity


def is_without_mask(mask_mod: Callable) -> bool:
    """True for the function that PyTorch puts in the place of None."""
    return mask_mod is sys.modules[_MODULE].noop_mask


@functools.cache
def _replacements(module: Any) -> Replacements:
    return Replacements(
        Replacement(module, "_validate_device", lambda _: lambda *_tensors: None),
        Replacement(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", lambda _: True),
    )


def as_operations() -> AbstractContextManager:
    """Returns a context in which flex attention is not compiled, and has a gradient on a CPU, too."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return contextlib.nullcontext()
    return _replacements(module)
