"""PyTorch's own checks of values, which nobody can make while values are traced."""

from __future__ import annotations

import os
import sys

import torch.distributions

_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__) + os.sep
_FRAMEWORK = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, "<")
_CHECKS = ("__init__", "_validate_sample", "check", "_mvdigamma")
"""Functions of `torch.distributions` that ask for a value only to raise if it is false."""


def asked_by_a_check() -> bool:
    """Whether it is the validation of a distribution that asks for the value of a tensor."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_DISTRIBUTIONS):
            return frame.f_code.co_name in _CHECKS
        if not path.startswith(_FRAMEWORK):
            return False
        frame = frame.f_back
    return False
