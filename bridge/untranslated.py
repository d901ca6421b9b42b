"""Operations without a translation: one error that says why, or zeros while a call is only surveyed."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from bridge.arrays import jax_dtype
from bridge.kernel_checks import refused_by_kernel
from bridge.metas import listed, meta_of
from bridge.operations import shapes_by_data
from bridge.tensors import fresh

if TYPE_CHECKING:
    from bridge.dispatch import Dispatch

TRACE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
)

SHAPE_REMEDY = "keep shapes independent of data: torch.where for a branch, a mask and a sum for a selection"
DEFECT_REMEDY = "this is a defect of the lowering, please report it; `without_lowerings` switches one of ours off"
UNSUPPORTED_REMEDY = "write it with supported operations, or add a lowering to bridge.LOWERINGS"
_OF_A_LIBRARY_REMEDY = (
    "call the Python function that the operation was made of, or write it as a torch.autograd.Function of supported "
    "operations; a kernel in another language needs a lowering in bridge.LOWERINGS"
)

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


class LoweringError(NotImplementedError):
    """A lowering raised for arguments that it takes: its own defect."""


def untranslated(dispatch: Dispatch, func: Any, args: tuple, kwargs: dict, error: NotImplementedError) -> Any:
    """Raise what says why, or give zeros if `dispatch` surveys."""
    if dispatch.survey is not None:
        return _skip(dispatch, func, args, kwargs, str(error))
    if shapes_by_data(func):
        raise dispatch.error(f"`{func.name()}` makes a shape that depends on data", SHAPE_REMEDY) from error
    if isinstance(error, LoweringError):
        of_pytorch = refused_by_kernel(func, args, kwargs)
        if of_pytorch is not None:
            raise of_pytorch
        raise dispatch.error(f"the lowering of `{func.name()}` failed ({error})", DEFECT_REMEDY) from error
    remedy = UNSUPPORTED_REMEDY if func.namespace in ("aten", "prims") else _OF_A_LIBRARY_REMEDY
    remedy = _NESTED_REMEDY if "nested" in func.name() else remedy
    raise dispatch.error(f"`{func.name()}` has no translation ({error})", remedy) from error


def of_functions(func: Any) -> tuple[str, str]:
    """What is said of a higher-order operation, and the remedy."""
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


def _skip(dispatch: Dispatch, func: Any, args: tuple, kwargs: dict, why: str) -> Any:
    """While surveying: note it, and go on with zeros of the right shape."""
    assert dispatch.survey is not None
    dispatch.survey.unsupported.setdefault(func.name(), f"{why}, {dispatch.where()}")
    metas = meta_of(func, args, kwargs)
    zeros = [fresh(jnp.zeros(m.shape, jax_dtype(m.dtype)), m) for m in listed(metas)]
    return type(metas)(zeros) if isinstance(metas, (tuple, list)) else zeros[0]
