"""Operations without a translation, code that asks a tensor for its value, and errors of PyTorch's kernels.

PyTorch's kernel is run on the host, with zeros in place of traced tensors, after an operation has failed, and before a
few operations whose arguments look wrong: constant indices out of range, and dtypes that JAX would promote silently.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes, tree_map_only
from bridge.autograd.engine import Restart
from bridge.context import CallState
from bridge.dispatch.computation import LoweringError
from bridge.dispatch.metas import meta_of
from bridge.dispatch.schemas import is_random, listed, shapes_by_data, tensors_in
from bridge.errors import BridgeError, is_framework
from bridge.symbolic.bytecode import check_under_way, code_that_asks, places_inside_handlers
from bridge.symbolic.constants import as_constant
from bridge.symbolic.conversion import convert
from bridge.symbolic.numbers import NUMBERS, as_operand, number_behind, numbers_in, of_class
from bridge.symbolic.ranges import known_number
from bridge.symbolic.rows import SHAPE_REMEDY
from bridge.tensor.arrays import jax_dtype, tensor_of
from bridge.tensor.tensor import BridgeTensor, wrap

aten = torch.ops.aten

VALUE_REMEDY = (
    "use torch.where for a branch, a mask over a fixed size for a shape, fixed turns with `if i < n:` for a loop; a "
    "tensor without dimensions works as an index or a slice's bound; or pass an argument static under jit"
)
DRAW_REMEDY = "draw the numbers before the call and pass them as an argument"
UNSUPPORTED_REMEDY = (
    "write it with supported operations, or add a lowering, `bridge.LOWERINGS[torch.ops.{}] = lowering`"
)
_OF_A_LIBRARY_REMEDY = (
    "call the Python function that it was made of, or write it as a torch.autograd.Function of supported "
    "operations; a kernel in another language needs `bridge.LOWERINGS[torch.ops.{}] = lowering`"
)

_NUMBER_REMEDY = "apply the number by an operator, as in `x + n * y` or `x ** n`; or pass one of Python's"
_UNIQUE_REMEDY = (
    "for integers below a number n, `(torch.zeros(n).index_fill(0, i, 1).cumsum(0).long() - 1)[i]` is the inverse, and "
    "`torch.bincount(i, minlength=n)` counts"
)
_LIBRARY_REMEDY = 'replace the function of the library, `bridge.export(module, functions={{"{}": replacement}})`'
_REMEDIES = {
    "torch.distributions.von_mises": DRAW_REMEDY,
    "torch.distributions": "write the formula in operations of PyTorch",
}
"""Modules of PyTorch that ask for values, and remedies."""

_NESTED_REMEDY = (
    "JAX has no nested tensors; make the TransformerEncoder with enable_nested_tensor=False, or call "
    "torch.backends.mha.set_fastpath_enabled(False): PyTorch then computes rows of padding instead of filling in zeros"
)


@dataclasses.dataclass
class Survey:
    """The operations that a call made, and the source of each implementation."""

    ops: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    """(op, `ours`, `torchax`, `view`, `random`) -> times."""
    unsupported: dict[str, str] = dataclasses.field(default_factory=dict)
    """op -> the reason and the first place."""

    def note(self, func: Any, server: str) -> None:
        self.ops[func.name(), server] += 1


def untranslated(context: CallState, func: Any, args: tuple, kwargs: dict, error: NotImplementedError) -> Any:
    """Raises the error that explains why, or returns zeros if the call only lists its operations."""
    if context.survey is not None:
        return _skip(context, func, args, kwargs, str(error))
    if shapes_by_data(func):
        raise asks_values(context, func, args, kwargs) from error
    if isinstance(error, LoweringError):
        raise error
    remedy = (UNSUPPORTED_REMEDY if func.namespace in ("aten", "prims") else _OF_A_LIBRARY_REMEDY).format(func)
    if "nested" in func.name():
        remedy = _NESTED_REMEDY
    elif is_random(func):
        remedy = DRAW_REMEDY
    raise context.error(f"`{func.name()}` has no translation ({error})", remedy) from error


def asked_inside(remedy: str) -> tuple[str, str]:
    """Returns a clause that names the public function of PyTorch that needs values, or "", and the remedy."""
    frame = sys._getframe(1)
    name = ""
    helps = ""
    while frame is not None and is_framework(frame.f_code.co_filename):
        module = str(frame.f_globals.get("__name__"))
        function = frame.f_code.co_name
        if module.startswith("torch.") and module != "torch.overrides" and not f".{module}.{function}".count("._"):
            name = f", inside `{module}.{function}`"
        helps = helps or next((text for start, text in _REMEDIES.items() if module.startswith(start)), "")
        frame = frame.f_back
    if frame is not None and "-packages" in frame.f_code.co_filename:
        # Not a side of a branch that was made of a part of it, and not a comprehension in it.
        function = re.sub(r"\.<locals>\.(bridge_|<).*", "", frame.f_code.co_qualname)
        remedy = _LIBRARY_REMEDY.format(f"{frame.f_globals['__name__']}:{function}")
    return name, helps or remedy


def asks_values(context: CallState, func: Any, args: tuple, kwargs: dict) -> BridgeError:
    """Returns the error for an operation that needs values of its arguments."""
    numbers = numbers_in((*args, *kwargs.values()))
    if numbers:
        remedy = as_constant(as_operand(numbers[0]).value, _NUMBER_REMEDY)
        return context.error(f"`{func.name()}` needs the value of a traced number", remedy)
    if shapes_by_data(func):
        what = "makes a shape that depends on data"
    else:
        what = "needs a traced tensor's values"
    inside, remedy = asked_inside(_UNIQUE_REMEDY if "unique" in func.name() else SHAPE_REMEDY)
    for tensor in tensors_in(args):
        if isinstance(tensor, BridgeTensor):
            remedy = as_constant(tensor.value, remedy)
    return context.error(f"`{func.name()}` {what}{inside}", remedy)


def of_functions(func: Any) -> tuple[str, str]:
    """Returns the error text for a higher-order operation, and the remedy."""
    remedy = _OF_FUNCTIONS.get(func.name(), "write it in operations on tensors")
    return f"`{func.name()}` takes functions, which has no translation", remedy


_LOOP_REMEDY = "write a Python loop with a fixed number of steps, and torch.where for one that ends early"
_OF_FUNCTIONS = {
    "cond": "compute both branches and choose with torch.where, or branch on a Python number",
    **dict.fromkeys(("while_loop", "scan", "associative_scan", "map_impl"), _LOOP_REMEDY),
}


def _skip(context: CallState, func: Any, args: tuple, kwargs: dict, why: str) -> Any:
    """Records an unsupported operation of a survey, and returns zeros of the right shape."""
    assert context.survey is not None
    context.survey.unsupported.setdefault(func.name(), f"{why}, {context.where()}")
    metas = meta_of(func, args, kwargs)
    zeros = [wrap(jnp.zeros(m.shape, jax_dtype(m.dtype)), m) for m in listed(metas)]
    if isinstance(metas, (tuple, list)):
        return type(metas)(zeros)
    return zeros[0]


# ---- errors of PyTorch's kernels

AFFORDABLE = 2**26
"""Largest number of elements for which a kernel is run."""

_NOT_ON_THE_HOST = ("for 'Half'", "for 'BFloat16'", "for 'Float8")


def kernel_error(func: Any, args: tuple, kwargs: dict) -> Exception | None:
    """Returns the error of PyTorch's kernel for arguments of these types, shapes and constants.

    Returns None if it accepts zeros or ones in place of traced tensors, draws random numbers, is large, or is custom.
    """
    sizes = [t.numel() for t in tensors_in((args, kwargs))]
    if func.namespace != "aten" or is_random(func) or sum(sizes) > AFFORDABLE:
        return None
    kwargs = kwargs | ({"device": "cpu"} if "device" in kwargs else {})
    args, kwargs = tree_map_only(tuple(NUMBERS), of_class, (args, kwargs))
    errors: list[Exception] = []
    with below_modes(), torch.no_grad():
        for fill in (0, 1):
            given = tree_map_only(torch.Tensor, functools.partial(_on_host, fill), (args, kwargs))
            try:
                func(*given[0], **given[1])
                return None
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                errors.append(error)
    known = str(errors[0]) == str(errors[1]) and not any(n in str(errors[0]) for n in _NOT_ON_THE_HOST)
    if known:
        return errors[0]
    return None


def _on_host(fill: int, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, BridgeTensor) or tensor.is_meta:
        return torch.full(tensor.shape, fill, dtype=tensor.dtype)
    return tensor.detach().clone()


def raise_kernel_error(func: Any, args: tuple, kwargs: dict) -> None:
    """Raises PyTorch's own error for arguments that look wrong, if PyTorch refuses them."""
    error = kernel_error(func, args, kwargs)
    if error is not None:
        raise error


# ---- constant indices out of range, which PyTorch's kernels refuse and its meta device accepts


def _outside(x: torch.Tensor, dim: int, index: Any) -> bool:
    """True if a constant index along a dimension is negative or too large."""
    if not isinstance(index, torch.Tensor) or isinstance(index, BridgeTensor) or index.dtype.is_floating_point:
        return False
    with below_modes():
        return bool(((index < 0) | (index >= (x.shape[dim] if x.dim() else 1))).any())


def _outside_brackets(args: tuple) -> bool:
    """True for an index out of range, and for a mask whose shape is not that of the selected dimensions."""
    x, indices = args[:2]
    dim = 0
    for index in indices:
        is_mask = getattr(index, "dtype", None) in (torch.bool, torch.uint8)
        wide = index.dim() if is_mask else 1
        if (is_mask and index.shape != x.shape[dim : dim + wide]) or _outside(x, dim, index):
            return True
        dim += wide
    return False


def _too_few(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> bool:
    """True if a constant mask asks for more elements than the source has."""
    if isinstance(mask, BridgeTensor):
        return False
    with below_modes():
        return int(mask.expand(torch.broadcast_shapes(x.shape, mask.shape)).sum()) > source.numel()


_CHECKED: dict[Callable[[tuple], bool], tuple] = {
    lambda args: _outside(*args[:3]): (
        aten.gather, aten.index_select, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_,
        aten.index_fill, aten.index_fill_, aten.index_reduce, aten.index_reduce_, aten.scatter, aten.scatter_,
        aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_,
    ),
    lambda args: _outside(args[0], 0, args[1]): (
        aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only,
    ),
    lambda args: _too_few(*args[:3]): (aten.masked_scatter, aten.masked_scatter_),
    _outside_brackets: (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index),
}  # fmt: skip
CHECKS = {getattr(op, name): check for check, ops in _CHECKED.items() for op in ops for name in op.overloads()}
"""Operation -> True for arguments that PyTorch's kernel may refuse while its meta device accepts them."""

# ---- code that asks a tensor for its value: a branch, `.item()`, and PyTorch's own checks

CHECKING = (torch.istft, torch.Tensor.istft)
"""Functions in C++ that ask for a value in order to raise an error if it is true."""


def number_of(context: CallState, func: Any, tensor: BridgeTensor) -> Any:
    """Returns the value as a number: Python's if it is known, else a traced one."""
    if func is aten.is_nonzero.default:
        return bool(value_for_python(context, tensor))
    if not isinstance(tensor.value, Tracer) or known_number(tensor) is not None or context.is_checking:
        return value_for_python(context, tensor)
    if tensor.is_complex():
        return value_for_python(context, tensor)
    return number_behind(tensor)


def value_for_python(context: CallState, tensor: BridgeTensor) -> Any:
    """Returns the value that Python insists on. Raises `BridgeError` if it is unknown and used beyond a check."""
    value = tensor.value
    if not isinstance(value, Tracer):
        return value.item()
    known = known_number(tensor)
    if known is not None:
        if value.dtype == bool:
            return bool(known)
        return known
    if context.is_checking:
        return False
    passes = check_under_way()
    if isinstance(passes, bool):
        return passes ^ fails(context)
    if convert(code_that_asks()):
        raise Restart(context.recording)
    inside, remedy = asked_inside(VALUE_REMEDY)
    if remedy not in _REMEDIES.values():
        remedy = as_constant(value, remedy)
    how = "a shape, a loop bound, an index into a list or a branch"
    raise context.error(f"Python code asks for the value of a traced tensor ({how}){inside}", remedy)


def fails(context: CallState) -> bool:
    """True for the one check that is to fail. Reports that any other one is not made."""
    check = places_inside_handlers()
    if check and check == context.failing:
        context.failing = None
        return True
    if check:
        context.handled[check] = context.where()
    context.note_check()
    return False


def is_equal(context: CallState, _func: Any, tensor: BridgeTensor, other: torch.Tensor) -> bool:
    """Returns `torch.equal(tensor, other)`."""
    with context.taking_apart():
        return tensor.shape == other.shape and bool((tensor == other).all())


def is_all_true(_context: CallState, func: Any, tensor: BridgeTensor) -> torch.Tensor:
    """Returns the condition of a check that raises if it is false, as in `torch.distributions`: true while tracing."""
    with below_modes():
        if isinstance(tensor.value, Tracer):
            return torch.tensor(True)
        return func(tensor_of(tensor.value))


def check_matrix(_dispatch: Any, _func: Any, info: BridgeTensor, api_name: str, *, is_matrix: bool) -> None:
    """Raises what PyTorch raises, for instance for a singular matrix; for traced values, results are NaN instead."""
    if not isinstance(info.value, Tracer):
        with below_modes():
            aten._linalg_check_errors.default(tensor_of(info.value), api_name, is_matrix=is_matrix)
