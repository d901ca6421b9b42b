"""SciPy's `linear_sum_assignment` of traced costs, as DETR and its successors call it between two parts of a loss.

SciPy's function is C code, which asks a tensor for its memory. At the first such question, the names are found under
which modules hold the function, and the call starts again with the function of the bridge in its place
(`replacements.replaced`).
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import Any

import jax
import torch

from bridge._compat.jax import Tracer
from bridge._compat.torch import Replacement
from bridge.context import current, refusal
from bridge.dispatch.replacements import replace_everywhere
from bridge.errors import FRAMEWORK, WITHOUT_MEMORY, WITHOUT_MEMORY_REMEDY
from bridge.lowerings.assignment import least_cost
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.tensor import BridgeTensor, empty_meta, wrap

_NAME = "linear_sum_assignment"
_REQUIRES_GRAD = "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."


class TracedArray:
    """`x.numpy()` of a traced tensor, in code that calls SciPy's function, which takes it. Nothing else does."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise _refused()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    @property
    def ndim(self) -> int:
        return self._tensor.dim()

    @property
    def T(self) -> TracedArray:  # noqa: N802 (a name of NumPy's)
        return TracedArray(self._tensor.T)

    def __len__(self) -> int:
        return len(self._tensor)

    def __getitem__(self, index: Any) -> TracedArray:
        return TracedArray(self._tensor[index])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else _refused()


def _refuse(*_arguments: Any, **_keywords: Any) -> Any:
    raise _refused()


for _operator in (
    *("array", "setitem", "iter", "bool", "int", "float", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul"),
):
    setattr(TracedArray, f"__{_operator}__", _refuse)


def _refused() -> Exception:
    return refusal(f"`numpy()` {WITHOUT_MEMORY}", WITHOUT_MEMORY_REMEDY)


def is_assigning() -> bool:
    """True if the code that asks a tensor for its memory names SciPy's function."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(FRAMEWORK):
        frame = frame.f_back
    original = _of_scipy()
    if frame is None or original is None:
        return False
    todo = [frame.f_code]
    for code in todo:
        todo += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        if any(name == _NAME or _unwrapped(frame.f_globals.get(name)) is original for name in code.co_names):
            return True
    return False


def _of_scipy() -> Any:
    """Returns SciPy's function, or None if it is not imported."""
    return _unwrapped(getattr(sys.modules.get("scipy.optimize"), _NAME, None))


def _unwrapped(value: Any) -> Any:
    if callable(value) and not isinstance(value, type):
        return inspect.unwrap(value)
    return value


def replace_assignments() -> bool:
    """Replaces SciPy's function in all modules that hold it, in calls from now on; False if it was before."""
    return replace_everywhere(_of_scipy(), _assigned)


def _assigned(cost_matrix: Any, maximize: bool = False) -> tuple[Any, Any]:
    """Returns the positions as tensors where the costs are traced."""
    cost = cost_matrix._tensor if type(cost_matrix) is TracedArray else cost_matrix
    if type(cost) is not BridgeTensor or not isinstance(cost.value, Tracer):
        return _of_scipy()(cost, maximize)
    if cost.requires_grad:
        raise RuntimeError(_REQUIRES_GRAD)
    if cost.dim() != 2:
        raise ValueError(f"expected a matrix (2-D array), got a {cost.dim()} array")
    call = current()
    if call is not None:
        call.note_check()  # SciPy looks for what is not a number
    try:
        found = least_cost(-cost.value if maximize else cost.value)
    except ImportError as error:
        what = "SciPy's `linear_sum_assignment` of traced costs needs Optax, which is not installed"
        raise refusal(what, 'pip install "trm-bridge[train]", or optax alone') from error
    rows, columns = (_positions(array, size) for array, size in zip(found, cost.shape, strict=True))
    return rows, columns


def _positions(array: jax.Array, size: int) -> torch.Tensor:
    tensor = wrap(array.astype(jax_dtype(torch.int64)), empty_meta(array.shape, None, torch.int64), live=False)
    return tensor.clamp(0, max(size - 1, 0))  # so that their range is known


def _from_numpy(original: Any) -> Any:
    """Returns `torch.from_numpy` for a call, which may be given positions."""

    @functools.wraps(original)
    def made(array: Any) -> torch.Tensor:
        if type(array) is BridgeTensor:
            return array
        return original(array)

    return made


FROM_NUMPY = Replacement(torch, "from_numpy", _from_numpy)
