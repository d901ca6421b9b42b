"""Operations by which Python code asks for a value: a branch, `.item()`, and PyTorch's own checks of arguments."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributions
import torch.nn.functional

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes
from bridge.arrays import tensor_of
from bridge.cumulative_average import asks_for_counter
from bridge.errors import is_framework
from bridge.exception_handlers import caught_by_the_module
from bridge.tensors import BridgeTensor

if TYPE_CHECKING:
    from bridge.dispatch import Dispatch

aten = torch.ops.aten

_FUNCTIONAL = torch.nn.functional.__file__
_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__) + os.sep
_CHECKS = ("__init__", "_validate_sample", "check", "_mvdigamma")
"""Functions of `torch.distributions` that ask for a value only to raise if it is false."""
_WISHART = os.path.join(_DISTRIBUTIONS, "wishart.py"), "__init__"
_UNCHECKED = "validate_args=False, or Distribution.set_default_validate_args(False) for those that another one makes"


def answer_to_a_check() -> tuple[bool, str, str] | None:
    """What Python code of PyTorch wants to hear that asks for a value only to raise; None if it is not such code.

    With it, what is not checked, and how not to ask; empty if there is no way.
    """
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_DISTRIBUTIONS):
            if (path, frame.f_code.co_name) == _WISHART:
                return False, "the degrees of freedom of a Wishart distribution", ""  # it asks for small ones
            return (True, "the values of a distribution", _UNCHECKED) if frame.f_code.co_name in _CHECKS else None
        if path == _FUNCTIONAL and frame.f_code.co_name == "gaussian_nll_loss":
            return False, "the variances", ""  # it asks for a negative one
        if not is_framework(path):
            return None
        frame = frame.f_back
    return None


def asked_inside() -> str:
    """The public function of PyTorch's that asks for a value, where none of the module's own code does."""
    frame, name = sys._getframe(1), ""
    while frame is not None and is_framework(frame.f_code.co_filename):
        path = (*str(frame.f_globals.get("__name__")).split("."), frame.f_code.co_name)
        if path[0] == "torch" and not any(part.startswith("_") for part in path):
            name = f", inside `{'.'.join(path)}`"
        frame = frame.f_back
    return name


def number_of(dispatch: Dispatch, func: Any, tensor: BridgeTensor) -> Any:
    """The value as a Python number. Raises `BridgeError` if it is traced, not known, and more than checked."""
    value = tensor.value
    if isinstance(value, Tracer):
        known = dispatch.positions.number(value)
        if known is not None:
            return bool(known) if value.dtype == bool else known
        answer = answer_to_a_check()
        if answer is not None:
            expected, what, remedy = answer
            dispatch.warn(f"{what} are traced and not checked", remedy)
            return expected
        if asks_for_counter():
            return 1  # `cumulative_average.batch_norm` takes the traced one
        how = "a branch, `.item()`, `int()` or a loop bound"
        raise dispatch.error(
            f"Python code asks for the value of a traced tensor ({how}){asked_inside()}",
            "use torch.where, or pass the number as a Python argument that is static under jit",
        )
    return bool(value) if func is aten.is_nonzero.default else value.item()


def check_matrix(dispatch: Dispatch, _func: Any, info: BridgeTensor, api_name: str, *, is_matrix: bool) -> None:
    """Raise what PyTorch raises for a singular matrix, say; where values are traced, results are NaN instead."""
    if not isinstance(info.value, Tracer):
        with below_modes():
            aten._linalg_check_errors.default(tensor_of(info.value), api_name, is_matrix=is_matrix)
    elif caught_by_the_module(torch.linalg.LinAlgError, dispatch.entry):
        name = f"torch.{api_name.removeprefix('torch.')}"
        raise dispatch.error(
            f"the module catches the error of `{name}` for some matrices, which traced values never raise",
            "choose by the info of torch.linalg.cholesky_ex, inv_ex or solve_ex with torch.where",
        )
