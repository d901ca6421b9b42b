"""Operations that PyTorch does not differentiate: their results have no gradient, or asking for it is an error.

The error is raised where a cotangent reaches the operation. A result that is compared, detached or returned beside the
loss may be used as in PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from bridge._compat.torch import is_differentiated, tree_map_only
from bridge.context import CallState
from bridge.errors import BridgeError
from bridge.tensor.tensor import DIFFERENTIABLE, BridgeTensor, wrap

aten = torch.ops.aten


def _without_grad(call: CallState, func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs the operation; its results require no grad, so that nothing raises."""
    with torch.no_grad():
        return call.redispatch(func, args, kwargs)


def _refused(call: CallState, func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs the operation; its results require grad, and asking for their gradient is an error."""
    sources = [t for t in (*args, *kwargs.values()) if isinstance(t, BridgeTensor) and t.may_have_gradient]
    if not sources or not torch.is_grad_enabled():
        return call.redispatch(func, args, kwargs)
    name = func.name().removeprefix("aten::").partition(".")[0].rstrip("_")
    message = f"PyTorch has no derivative of `{name}`; the gradient of one was asked for {call.where()}. "
    values = [t.value for t in sources]
    tracked = any(t.requires_grad for t in sources)

    def without(result: BridgeTensor) -> BridgeTensor:
        if result.dtype not in DIFFERENTIABLE:
            return result
        value = without_derivative(result.value, values, f"{message}Remedy: detach it, or write it otherwise.")
        if any(result is a for a in args):  # the operation wrote in place
            result.write(value, tracked=tracked, grad_enabled=True)
            return result
        return wrap(value, result._meta, tracked=tracked)

    return tree_map_only(BridgeTensor, without, call.redispatch(func, args, kwargs))


def _overloads(*names: str) -> Iterator[Any]:
    """Yields the overloads of operations, in place or not."""
    for name in names:
        for packet in (getattr(aten, name), getattr(aten, f"{name}_", None)):
            yield from (getattr(packet, overload) for overload in (packet.overloads() if packet else ()))


_OF_ONE = [name for name in torch.special.__all__ if re.search("airy|bessel", name)]
_SPECIAL = [
    *(f"special_{name}" for name in _OF_ONE if not is_differentiated(getattr(torch.special, name))),
    *(f"special_{name}" for name in torch.special.__all__ if "polynomial" in name),
]
_REFUSED = ("heaviside", "floor_divide", "bincount", "binomial", "_sample_dirichlet")
_SCATTERS = (aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_.reduce, aten.scatter_.value_reduce)
NO_DERIVATIVE: dict[Any, Callable[[CallState, Any, tuple, dict], Any]] = {
    **dict.fromkeys(_overloads("histc", *_SPECIAL), _without_grad),
    **dict.fromkeys((*_overloads(*_REFUSED), *_SCATTERS), _refused),
}
"""Operation -> the function that runs it, given the call, the operation and its arguments."""


def without_derivative(value: jax.Array, sources: Sequence[jax.Array], message: str) -> jax.Array:
    """Returns `value`, computed from `sources`; asking for its derivative raises `BridgeError`."""

    @jax.custom_jvp
    def call(value, *sources):
        return value

    def jvp(primals, tangents):
        path, *tangents = tangents
        if isinstance(path, SymbolicZero):
            path = jnp.zeros_like(primals[0])
        parts = [t for t in tangents if not isinstance(t, SymbolicZero)]
        if parts:
            path = path + _missing.bind(*parts, aval=jax.typeof(primals[0]), message=message)
        return call(*primals), path

    call.defjvp(jvp, symbolic_zeros=True)
    return call(value, *map(jnp.asarray, sources))


_missing = Primitive("missing_derivative")
"""A linear primitive of unknown result: it can be staged, but neither transposed nor run."""


def _refuse(*_operands, message, **_settings):
    raise BridgeError(message)


def _batched(operands, dims, *, aval, message):
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    return _missing.bind(*operands, aval=aval.update(shape=(size, *aval.shape)), message=message), 0


_missing.def_impl(_refuse)
_missing.def_abstract_eval(lambda *_operands, aval, **_settings: aval)
ad.deflinear2(_missing, _refuse)
batching.primitive_batchers[_missing] = _batched
mlir.register_lowering(_missing, _refuse)
