"""Operations without a translation: one error that says why, or zeros while a call is only surveyed."""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp

from bridge.context import TraceContext
from bridge.dispatch.meta import listed, meta_of
from bridge.dispatch.schema import is_random, shapes_by_data
from bridge.errors import is_framework
from bridge.tensor.convert import jax_dtype
from bridge.tensor.tensor import fresh

TRACE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
)

SHAPE_REMEDY = "keep shapes independent of data: torch.where for a branch, a mask and a sum for a selection"
VALUE_REMEDY = (
    "use torch.where for a branch; a tensor works as an index or a slice's bound without `int()` or `.item()`; or pass "
    "the number as a Python argument that is static under jit"
)
DRAW_REMEDY = "draw the numbers before the call and pass them as an argument"
DEFECT_REMEDY = "this is a defect of the lowering, please report it; `without_lowerings` switches one of ours off"
UNSUPPORTED_REMEDY = "write it with supported operations, or add a lowering to bridge.LOWERINGS"
_OF_A_LIBRARY_REMEDY = (
    "call the Python function that the operation was made of, or write it as a torch.autograd.Function of supported "
    "operations; a kernel in another language needs a lowering in bridge.LOWERINGS"
)

_LIBRARY_REMEDY = (
    "replace the function of the library that asks by "
    '`bridge.register_function("package.module:function", replacement)`, or switch its check off'
)
_REMEDIES = {
    "torch.nn.modules.adaptive": 'export it with `method="log_prob"`, or call its `log_prob` and gather the targets',
    "torch.nn.modules.batchnorm": "give the layer a number as its momentum; None needs the number of calls so far",
    "torch.distributions": "leave validate_args=True out, or write the formula in operations of PyTorch",
}
"""Modules of PyTorch that ask for values, and what helps."""

_NESTED_REMEDY = (
    "JAX has no nested tensors; make the TransformerEncoder with enable_nested_tensor=False, or call "
    "torch.backends.mha.set_fastpath_enabled(False): PyTorch then computes rows of padding instead of filling in zeros"
)


@dataclasses.dataclass
class Survey:
    """The operations that a call made, and who serves them."""

    ops: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    """(op, `ours`, `torchax`, `view`, `random`) -> times."""
    unsupported: dict[str, str] = dataclasses.field(default_factory=dict)
    """op -> why and where first."""

    def note(self, func: Any, server: str) -> None:
        self.ops[func.name(), server] += 1


class LoweringError(NotImplementedError):
    """A lowering raised for arguments that it takes: its own defect."""


def untranslated(context: TraceContext, func: Any, args: tuple, kwargs: dict, error: NotImplementedError) -> Any:
    """Raise what says why, or give zeros if the call only lists its operations."""
    if context.survey is not None:
        return _skip(context, func, args, kwargs, str(error))
    if shapes_by_data(func):
        inside, remedy = asked_inside(SHAPE_REMEDY)
        raise context.error(f"`{func.name()}` makes a shape that depends on data{inside}", remedy) from error
    if isinstance(error, LoweringError):
        raise error
    remedy = UNSUPPORTED_REMEDY if func.namespace in ("aten", "prims") else _OF_A_LIBRARY_REMEDY
    remedy = DRAW_REMEDY if is_random(func) else remedy
    remedy = _NESTED_REMEDY if "nested" in func.name() else remedy
    raise context.error(f"`{func.name()}` has no translation ({error})", remedy) from error


def asked_inside(remedy: str) -> tuple[str, str]:
    """Returns the public function of PyTorch that needs values, if one does, as a part of an error; and the remedy."""
    frame, name, helps = sys._getframe(1), "", ""
    while frame is not None and is_framework(frame.f_code.co_filename):
        module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if module.startswith("torch.") and not f".{module}.{function}".count("._"):
            name = f", inside `{module}.{function}`"
        helps = helps or next((text for start, text in _REMEDIES.items() if module.startswith(start)), "")
        frame = frame.f_back
    if frame is not None and "-packages" in frame.f_code.co_filename:
        remedy = _LIBRARY_REMEDY
    return name, helps or remedy


def of_functions(func: Any) -> tuple[str, str]:
    """Returns the error text for a higher-order operation, and the remedy."""
    remedy = _OF_FUNCTIONS.get(func.name(), "write it in operations on tensors")
    return f"`{func.name()}` takes functions, which has no translation", remedy


_LOOP_REMEDY = "write a Python loop with a fixed number of steps, and torch.where for one that ends early"
_OF_FUNCTIONS = {
    "cond": "compute both branches and choose with torch.where, or branch on a Python number",
    "flex_attention": "use F.scaled_dot_product_attention, with a mask or an additive bias for what the functions do",
    "map_impl": "use torch.vmap, or a Python loop",
    "while_loop": _LOOP_REMEDY,
    "scan": _LOOP_REMEDY,
    "associative_scan": _LOOP_REMEDY,
}


def _skip(context: TraceContext, func: Any, args: tuple, kwargs: dict, why: str) -> Any:
    """While surveying: note it, and go on with zeros of the right shape."""
    assert context.survey is not None
    context.survey.unsupported.setdefault(func.name(), f"{why}, {context.where()}")
    metas = meta_of(func, args, kwargs)
    zeros = [fresh(jnp.zeros(m.shape, jax_dtype(m.dtype)), m) for m in listed(metas)]
    return type(metas)(zeros) if isinstance(metas, (tuple, list)) else zeros[0]
