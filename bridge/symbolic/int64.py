"""64-bit integers that JAX stores in 32 bits: results that are known not to fit are errors, unknown products warn.

What is known are the intervals of `ranges.py`: of constants, comparisons, remainders, masks, indices and sizes. Of an
input nothing is known. Sums of unknown numbers would always be suspect, so only products of them are announced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np
import torch

from bridge._compat.torch import arguments as arguments_of
from bridge._compat.torch import below_modes
from bridge.errors import BridgeError
from bridge.symbolic.ranges import LIMITING, OF_FLOATS, Call, Interval, is_finite, rule_of
from bridge.tensor.tensor import BridgeTensor

Int64 = Literal["refuse", "wrap", "exact"]
"""What a call does with 64-bit integers. "refuse": an error where some are known not to fit into 32 bits, a warning
where a product of unknown ones may not. "wrap": 32 bits, modulo 2**32, as the caller has decided. "exact": 64 bits, an
error while JAX has none."""

REMEDY = (
    "set JAX_ENABLE_X64=1 for 64-bit integers, or choose int64='wrap' in bridge.export if the numbers stay below 2**31 "
    "or may wrap"
)
_OF_HASHES = 2**24
"""A factor with which only numbers below 128 stay within 32 bits: a hash, say, whose other factor is an input."""
_TYPES = (torch.int32, torch.int64)


class Context(Protocol):
    """The interface of a traced call that this file uses."""

    checks_int64: bool
    """True if results are checked: not where integers have 64 bits, nor where they may wrap."""
    survey: Any

    def where(self) -> str: ...

    def warn(self, what: str, remedy: str = "") -> None: ...

    def error(self, what: str, remedy: str) -> BridgeError: ...


def check_policy(int64: str) -> None:
    """Raise `BridgeError` for a policy that does not exist, or that JAX cannot keep as it is set up."""
    if int64 not in ("refuse", "wrap", "exact"):
        raise BridgeError(f"int64 is {int64!r}; choose 'refuse', 'wrap' or 'exact'")
    if int64 == "exact" and not jax.config.read("jax_enable_x64"):
        raise BridgeError("int64='exact' needs JAX's 64-bit types: set JAX_ENABLE_X64=1")


def checked(int64: str) -> bool:
    """True if results are checked: not where integers have 64 bits, nor where they may wrap."""
    return int64 == "refuse" and not jax.config.read("jax_enable_x64")


def check_values(name: str, values: torch.Tensor | np.ndarray | np.generic, error: Any = None) -> None:
    """Raise `BridgeError`, or `error(what, remedy)`, for a concrete array of integers that 32 bits do not hold."""
    known = _of_values(values)
    if known is not None and not _fits(known):
        what = f"{name} holds 64-bit integers that 32 bits do not hold: they {_said(known)}"
        raise error(what, REMEDY) if error is not None else BridgeError(f"{what}. Remedy: {REMEDY}.")


def note_constant(context: Context, real: torch.Tensor, tensor: BridgeTensor) -> None:
    """`tensor` stands for `real`; where that is no state of the module, its values are known."""
    storage = tensor._cell.storage
    if real.dtype in _TYPES and storage.bounds is None and not tensor._cell.live:
        with below_modes():
            if context.checks_int64:
                check_values("a constant", real, context.error)
            known = _of_values(real)
        storage.bounds = known if known is not None and _fits(known) else None


def fitting(
    context: Context, func: Any, inputs: Sequence[BridgeTensor], outs: Sequence[Any], args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Returns the arguments, Python's integers beyond JAX's as it takes them: floats beside floats, otherwise wrapped.

    Raises `BridgeError` for those that 64 bits hold in PyTorch: `ids == 2**40`.
    """
    limit = _limit()
    beyond = [v for v in (*args, *kwargs.values()) if type(v) is int and not -limit <= v < limit]
    if not beyond:
        return args, kwargs
    tensors = [*inputs, *(o for o in outs if isinstance(o, torch.Tensor))]
    floating = any(t.dtype.is_floating_point or t.dtype.is_complex for t in inputs)
    among_integers = not any(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors)
    declared = {a.name: a for a in arguments_of(func)}

    def fit(argument: Any, value: Any) -> Any:
        if type(value) is not int or -limit <= value < limit or "int" in str(argument.type):
            return value
        if context.checks_int64 and among_integers and any(t.dtype == torch.int64 for t in tensors):
            _refuse(context, func, Interval(value, value))
        return float(value) if floating else (value + limit) % (2 * limit) - limit

    fitted = tuple(fit(argument, value) for argument, value in zip(declared.values(), args, strict=False))
    return fitted, {name: fit(declared[name], value) for name, value in kwargs.items()}


def follow(context: Context, func: Any, args: tuple, kwargs: dict, results: Sequence[Any]) -> None:
    """Note what is known of the results. Raises `BridgeError` for 64-bit integers known not to fit into 32 bits."""
    named = rule_of(func)
    if named is None or not _says_something(named[0], args, results):
        return
    name, rule = named
    call = Call(name, func, args, kwargs, results[0])
    known = rule(call)
    for result, interval in zip(results, (known,) if isinstance(known, Interval) else known, strict=False):
        if result.dtype.is_floating_point:
            if name in OF_FLOATS:
                slack = torch.finfo(result.dtype).eps
                low, high = interval.low - abs(interval.low) * slack, interval.high + abs(interval.high) * slack
                result._cell.storage.bounds = Interval(low, high)
        elif not result.dtype.is_complex:
            result._cell.storage.bounds = _stored(context, call, result.dtype, interval)


def _says_something(name: str, args: tuple, results: Sequence[Any]) -> bool:
    """True unless the result is one of floats that nothing limits, as that of nearly all operations of a model."""
    if len(results) != 1 or not results[0].dtype.is_floating_point or name in LIMITING:
        return True
    for value in args:
        if isinstance(value, BridgeTensor) and value._cell.storage.bounds is not None:
            return name in OF_FLOATS
    return False


def _stored(context: Context, call: Call, dtype: torch.dtype, known: Interval) -> Interval | None:
    """Returns the interval of integers of a type, None if they may be any of them."""
    if any(isinstance(end, float) and math.isfinite(end) for end in known[:2]):  # of floats, among which nan becomes 0
        if dtype == torch.bool:
            return None
        low, high = (end if math.isinf(end) else math.trunc(end) for end in known[:2])
        known = Interval(min(low, 0), max(high, 0))
    if dtype != torch.int64:
        least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        return known if least <= known.low and known.high <= most else None
    if call.factor is None or is_finite(known):
        if context.checks_int64 and not _fits(known):
            _refuse(context, call.func, known)
        return known if _fits(known) else None
    if context.checks_int64 and call.factor >= _OF_HASHES:
        _refuse(context, call.func, Interval(-call.factor * 128, call.factor * 128))
    elif context.checks_int64:
        context.warn(
            f"`{call.func.name()}` multiplies 64-bit integers of which nothing is known, in 32 bits",
            f"limit them before, as in x.clamp(0, n) or x % n; {REMEDY}",
        )
    return None


def _refuse(context: Context, func: Any, known: Interval) -> None:
    what = f"`{func.name()}` makes or takes 64-bit integers that 32 bits do not hold: they {_said(known)}"
    if context.survey is None:
        raise context.error(what, REMEDY)
    context.survey.unsupported.setdefault(func.name(), f"{what}, {context.where()}")


def _of_values(values: torch.Tensor | np.ndarray | np.generic) -> Interval | None:
    """Returns None for other types than integers of 32 and 64 bits."""
    if str(values.dtype).removeprefix("torch.") not in ("int32", "int64", "uint64"):
        return None
    size = values.numel() if isinstance(values, torch.Tensor) else values.size
    return Interval(int(values.min()), int(values.max())) if size else Interval(0, 0)


def _limit() -> int:
    return 2**63 if jax.config.read("jax_enable_x64") else 2**31


def _fits(known: Interval) -> bool:
    """True if no finite end is beyond the integers that JAX has."""
    limit = _limit()
    return all(math.isinf(end) or -limit <= end < limit for end in known[:2])


def _said(known: Interval) -> str:
    low, high = (_short(end) for end in known[:2])
    return f"include {low}" if low == high else f"may be from {low} to {high}"


def _short(n: float) -> str:
    return str(n) if abs(n) < 10**12 else f"{'-' if n < 0 else ''}2**{abs(int(n)).bit_length() - 1}"
