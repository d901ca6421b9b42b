"""PyTorch's own checks of values, which nobody can make while values are traced."""

from __future__ import annotations

import os
import sys

import torch.distributions
import torch.nn.functional

from bridge.errors import is_framework

_FUNCTIONAL = torch.nn.functional.__file__
_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__) + os.sep
_CHECKS = ("__init__", "_validate_sample", "check", "_mvdigamma")
"""Functions of `torch.distributions` that ask for a value only to raise if it is false."""


def answer_to_a_check() -> bool | None:
    """What Python code of PyTorch wants to hear that asks for a value only to raise; None if it is not such code."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_DISTRIBUTIONS):
            return True if frame.f_code.co_name in _CHECKS else None
        if path == _FUNCTIONAL and frame.f_code.co_name == "gaussian_nll_loss":
            return False  # it asks for a negative variance
        if not is_framework(path):
            return None
        frame = frame.f_back
    return None
