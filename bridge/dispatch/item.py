"""Operations by which Python code asks a tensor for its value: a branch, `.item()`, and PyTorch's own checks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes
from bridge.context import TraceContext
from bridge.dispatch.compute import compute
from bridge.dispatch.unsupported import VALUE_REMEDY, asked_inside
from bridge.symbolic.ranges import known_number
from bridge.tensor.convert import tensor_of
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten

CHECKING: dict[Any, str] = {
    torch.istft: "",
    torch.Tensor.istft: "",
    F.gaussian_nll_loss: "the variances",
}
"""Functions that ask for a value to raise an error if it is true, and what they check, which a warning names."""


def number_of(context: TraceContext, func: Any, tensor: BridgeTensor) -> Any:
    """The value as a Python number. Raises `BridgeError` if it is traced, not known, and more than checked."""
    value = tensor.value
    if not isinstance(value, Tracer):
        return bool(value) if func is aten.is_nonzero.default else value.item()
    known = known_number(tensor)
    if known is not None:
        return bool(known) if value.dtype == bool else known
    if context.checked is not None:
        if context.checked:
            context.warn(f"{context.checked} are traced and not checked")
        return False
    inside, remedy = asked_inside(VALUE_REMEDY)
    how = "a branch, `.item()`, `int()` or a loop bound"
    raise context.error(f"Python code asks for the value of a traced tensor ({how}){inside}", remedy)


def is_equal(context: TraceContext, func: Any, tensor: BridgeTensor, other: torch.Tensor) -> bool:
    """`torch.equal`."""
    if isinstance(tensor.value, Tracer) and context.checked is not None:
        return False
    return compute(context, func, (tensor, context.adopt(other)), {})


def is_all_true(_context: TraceContext, func: Any, tensor: BridgeTensor) -> torch.Tensor:
    """The condition of a check that raises if it is false, as `torch.distributions` makes them: true while tracing."""
    with below_modes():
        return torch.tensor(True) if isinstance(tensor.value, Tracer) else func(tensor_of(tensor.value))


def check_matrix(_dispatch: Any, _func: Any, info: BridgeTensor, api_name: str, *, is_matrix: bool) -> None:
    """Raise what PyTorch raises for a singular matrix, say; where values are traced, results are NaN instead."""
    if not isinstance(info.value, Tracer):
        with below_modes():
            aten._linalg_check_errors.default(tensor_of(info.value), api_name, is_matrix=is_matrix)
