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
from bridge.tensor.tensor import BridgeTensor, differentiable, fresh, stop_gradient

aten = torch.ops.aten


class Rule(NamedTuple):
    """PyTorch's answer when it is asked for the derivative of an operation."""

    of: tuple[str, ...] | None = None
    """The arguments that have no derivative; `None`: none has."""
    is_checked: bool = False
    """True if PyTorch raises as soon as one of these arguments requires grad."""
    is_silent: bool = False
    """True if the result requires no grad, so that nothing raises."""
    without_grad: tuple[int, ...] = ()
    """The results that require none, where others do."""
    applies: Callable[..., bool] = lambda *args, **kwargs: True
    """To which arguments of the operation."""
    remedy: str = "detach it, or write it otherwise"


NO_DERIVATIVE: dict[Any, Rule] = {}


def _enter(rule: Rule, names: str) -> None:
    """For every overload, in place or not."""
    for name in names.split():
        name, _, overload = name.partition(".")
        for packet in (getattr(aten, name), getattr(aten, f"{name}_", None)):
            for known in packet.overloads() if packet is not None else ():
                if known == overload or not overload:
                    NO_DERIVATIVE[getattr(packet, known)] = rule


_enter(
    Rule(is_silent=True),
    "histc special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 "
    "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_spherical_bessel_j0 "
    "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_airy_ai",
)
_enter(
    Rule(is_silent=True),
    " ".join(
        f"special_{kind}"
        for kind in (
            "chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w",
            "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
        )
    ),
)  # fmt: skip
_enter(
    Rule(),
    "heaviside floor_divide scatter.reduce scatter.value_reduce _chunk_cat linalg_ldl_factor_ex _unique2 unique_dim "
    "unique_consecutive",
)
_enter(Rule(("self",)), "igamma igammac special_zeta")
_enter(Rule(("target",), is_checked=True), "soft_margin_loss")
_enter(Rule(("weight", "pos_weight"), is_checked=True), "binary_cross_entropy_with_logits binary_cross_entropy")
_enter(Rule(("weight",), is_checked=True), "multi_margin_loss nll_loss_forward nll_loss2d_forward")
_enter(Rule(("atol", "rtol"), is_checked=True), "linalg_pinv.atol_rtol_tensor")


_enter(Rule((), without_grad=(1, 2)), "native_layer_norm")
_enter(Rule((), without_grad=(0,)), "linalg_lu lu_unpack")
_enter(Rule(), "bincount")
_enter(
    Rule(applies=lambda a, mode="reduced": mode == "r", remedy="choose mode='reduced', which has one"),
    "linalg_qr.default",
)
_enter(
    Rule(("scale",), is_checked=True),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams fake_quantize_per_channel_affine_cachemask",
)


def apply_rule(
    rule: Rule, run: Callable[..., Any], func: Any, args: tuple, kwargs: dict, where: Callable[[], str]
) -> Any:
    """`run(func, args, kwargs)`, its derivative as PyTorch has it. `where`: the place for an error."""
    if rule.is_silent:
        with torch.no_grad():
            return run(func, args, kwargs)
    if rule.without_grad:
        return _some_without_grad(rule.without_grad, run(func, args, kwargs))
    names = [a.name for a in arguments(func)]
    held = [(n, t) for n, t in (*zip(names, args, strict=False), *kwargs.items()) if rule.of is None or n in rule.of]
    sources = [(n, t) for n, t in held if isinstance(t, BridgeTensor) and t.may_have_gradient]
    if not sources or not torch.is_grad_enabled():
        return run(func, args, kwargs)
    name = func.name().removeprefix("aten::").partition(".")[0].rstrip("_")
    for argument, tensor in sources:
        if rule.is_checked and tensor.requires_grad:
            raise RuntimeError(
                f"The function '{name}' is not differentiable with respect to argument '{argument}'. This input cannot "
                "have requires_grad True."
            )
    message = f"PyTorch has no derivative of `{name}`"
    message += "" if rule.of is None else f" with respect to {' and '.join(f'`{n}`' for n, _ in sources)}"
    refused = f"{message}; the gradient of one was asked for {where()}. Remedy: {rule.remedy}."
    values, tracked = [t.value for _, t in sources], any(t.requires_grad for _, t in sources)
    out = run(func, args, kwargs)

    def without(result: BridgeTensor) -> BridgeTensor:
        if not differentiable(result.dtype):
            return result
        value = without_derivative(result.value, values, refused)
        if any(result is a for a in args):  # written in place
            result.write(value, tracked=tracked, grad_enabled=True)
            return result
        return fresh(value, result._meta, tracked=tracked or result._cell.tracked, live=True)

    return tree_map_only(BridgeTensor, without, out)


def _some_without_grad(places: tuple[int, ...], results: tuple) -> tuple:
    if not torch.is_grad_enabled():
        return results
    stopped = {i: fresh(stop_gradient(results[i].value), results[i]._meta, live=False) for i in places}
    return tuple(stopped.get(i, result) for i, result in enumerate(results))


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


@_missing.def_abstract_eval
def _abstract(*_operands, aval, message):
    return aval


def _refuse(*_operands, message, **_):
    raise BridgeError(message)


def _jvp(primals, tangents, **settings):
    parts = [t for t in tangents if type(t) is not ad.Zero]
    return _missing.bind(*primals, **settings), _missing.bind(*parts, **settings)


def _transposed(cotangent, *operands, message, **_):
    if type(cotangent) is not ad.Zero:
        raise BridgeError(message)
    return [None] * len(operands)


def _batched(operands, dims, *, aval, message):
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    return _missing.bind(*operands, aval=aval.update(shape=(size, *aval.shape)), message=message), 0


_missing.def_impl(_refuse)
ad.primitive_jvps[_missing] = _jvp
ad.primitive_transposes[_missing] = _transposed
batching.primitive_batchers[_missing] = _batched
mlir.register_lowering(_missing, lambda _context, *operands, **settings: _refuse(*operands, **settings))
