"""Operations that PyTorch does not differentiate: their results have no gradient, or asking for it is an error.

The error comes where a cotangent reaches the operation. A result that is compared, detached or returned beside the loss
may be used as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from bridge._compat.torch import arguments, tree_map_only
from bridge.errors import BridgeError
from bridge.tensor.tensor import BridgeTensor, differentiable, fresh

aten = torch.ops.aten


class Rule(NamedTuple):
    """PyTorch's answer when it is asked for the derivative of an operation."""

    of: tuple[str, ...] = ()
    """The arguments that have no derivative; empty if none has."""
    is_silent: bool = False
    """True if the result requires no grad, so that nothing raises."""


NO_DERIVATIVE: dict[Any, Rule] = {}


def _enter(rule: Rule, *names: str) -> None:
    """For the overloads of these names, in place or not."""
    for name in names:
        name, _, overload = name.partition(".")
        for packet in (getattr(aten, name), getattr(aten, f"{name}_", None)):
            for known in packet.overloads() if packet is not None else ():
                if known == overload or not overload:
                    NO_DERIVATIVE[getattr(packet, known)] = rule


_SPECIAL = (f"special_{name}" for name in torch.special.__all__ if "bessel" in name or "polynomial" in name)
_enter(Rule(is_silent=True), "histc", *_SPECIAL)
_enter(Rule(), "heaviside", "floor_divide", "scatter.reduce", "scatter.value_reduce", "bincount")
_enter(Rule(("self",)), "igamma", "igammac", "special_zeta")
_enter(Rule(("target",)), "soft_margin_loss")
_enter(Rule(("weight", "pos_weight")), "binary_cross_entropy_with_logits", "binary_cross_entropy")
_enter(Rule(("weight",)), "multi_margin_loss", "nll_loss_forward", "nll_loss2d_forward")
_enter(
    Rule(("scale",)),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
)


def apply_rule(
    rule: Rule, run: Callable[..., Any], func: Any, args: tuple, kwargs: dict, where: Callable[[], str]
) -> Any:
    """`run(func, args, kwargs)`, its derivative as PyTorch has it. `where`: the place for an error."""
    if rule.is_silent:
        with torch.no_grad():
            return run(func, args, kwargs)
    held = (*zip((a.name for a in arguments(func)), args, strict=False), *kwargs.items())
    sources = [
        (name, t)
        for name, t in held
        if (not rule.of or name in rule.of) and isinstance(t, BridgeTensor) and t.may_have_gradient
    ]
    if not sources or not torch.is_grad_enabled():
        return run(func, args, kwargs)
    name = func.name().removeprefix("aten::").partition(".")[0].rstrip("_")
    message = f"PyTorch has no derivative of `{name}`"
    message += f" with respect to {' and '.join(f'`{n}`' for n, _ in sources)}" if rule.of else ""
    message += f"; the gradient of one was asked for {where()}. Remedy: detach it, or write it otherwise."
    values, tracked = [t.value for _, t in sources], any(t.requires_grad for _, t in sources)
    out = run(func, args, kwargs)

    def without(result: BridgeTensor) -> BridgeTensor:
        if not differentiable(result.dtype):
            return result
        value = without_derivative(result.value, values, message)
        if any(result is a for a in args):  # written in place
            result.write(value, tracked=tracked, grad_enabled=True)
            return result
        return fresh(value, result._meta, tracked=tracked or result._cell.tracked)

    return tree_map_only(BridgeTensor, without, out)


def without_derivative(value: jax.Array, sources: Sequence[jax.Array], message: str) -> jax.Array:
    """`value`, computed from `sources`, without whose derivative it is: a `BridgeError` where one is asked for it."""

    @jax.custom_jvp
    def call(value, *sources):
        return value

    def jvp(primals, tangents):
        path, *tangents = tangents
        path = jnp.zeros_like(primals[0]) if isinstance(path, SymbolicZero) else path
        parts = [t for t in tangents if not isinstance(t, SymbolicZero)]
        if parts:
            path = path + _missing.bind(*parts, aval=jax.typeof(primals[0]), message=message)
        return call(*primals), path

    call.defjvp(jvp, symbolic_zeros=True)
    return call(value, *map(jnp.asarray, sources))


_missing = Primitive("missing_derivative")
"""Linear in its operands, and what it gives is unknown: it can be staged, but neither transposed nor run."""


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
