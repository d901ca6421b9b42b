"""Intervals of integers, followed while tracing by the operations that index arithmetic is made of.

An unknown end is infinite, so every finite end is known. A tensor whose elements are all one integer also records
that integer: `pos + 2` is the root `pos` and the offset 2, so the length of `x[pos : pos + 2]` is known. The intervals
also show where 64-bit integers do not fit into the 32 bits in which JAX stores them: a result that is known not to fit
is an error, a product of unknown integers a warning.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, inf, isinf, log2
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import torch

from bridge._compat.jax import same_values
from bridge._compat.torch import arguments as arguments_of
from bridge._compat.torch import below_modes, schema_name
from bridge.context import CallState
from bridge.errors import BridgeError
from bridge.tensor.pytrees import TRACED_NUMBERS
from bridge.tensor.tensor import BridgeTensor


class Interval(NamedTuple):
    """Least and largest value, both included, and the integer that all elements are equal to, if there is one."""

    low: float
    high: float
    root: Any = None
    """An integer `root + offset`; the root is an array without dimensions."""
    offset: int = 0
    factor: float | None = None
    """The largest known factor of a product of unknown integers, at least 1; None for any other result."""


UNKNOWN = Interval(-inf, inf)
_ZERO = np.zeros((), np.int32)
"""The root of Python numbers."""
_HUGE = 2**200

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ENDS = {d: Interval(torch.iinfo(d).min, torch.iinfo(d).max) for d in _INTEGERS} | {torch.bool: Interval(0, 1)}


def range_of(value: Any) -> Interval:
    """Returns the interval of a tensor or a Python number."""
    if isinstance(value, TRACED_NUMBERS):
        value = value.node.tensor
    if not isinstance(value, BridgeTensor):
        if not isinstance(value, (int, float)) or not abs(value) < _HUGE:
            return UNKNOWN
        if isinstance(value, int):
            return Interval(value, value, _ZERO, value)
        return Interval(floor(value), ceil(value))
    storage = value._handle.storage
    dtype = value.dtype
    known = storage.bounds
    if known is None or (storage.layout is not None and storage.layout.dtype != dtype):
        if dtype in (torch.int32, torch.int64):
            known = UNKNOWN
        else:
            known = _ENDS.get(dtype, UNKNOWN)
    if known.root is None and dtype in _INTEGERS and not value.dim():
        return Interval(known.low, known.high, value.value)
    return known


def known_number(tensor: BridgeTensor) -> int | None:
    """Returns the only possible value of a traced number, for instance of a decided comparison; None if several are."""
    low, high = range_of(tensor)[:2]
    if low == high:
        return int(low)
    return None


def distance(a: BridgeTensor | int, b: BridgeTensor | int) -> int | None:
    """Returns `a - b` of two integers that differ from the same one by numbers; None for others."""
    return _apart(range_of(a), range_of(b))


def _apart(a: Interval, b: Interval) -> int | None:
    known = a.root is not None and b.root is not None and same_values(a.root, b.root)
    if known:
        return a.offset - b.offset
    return None


def after_write(target: BridgeTensor, source: BridgeTensor) -> Interval | None:
    """Returns the known interval of the memory of `target` after a write of `source`; None if nothing is known."""
    known = source._handle.storage.bounds
    if known is None or source.dtype != target.dtype:
        return None
    layout = target._handle.storage.layout
    same_size = layout is not None and layout.dtype == target.dtype and layout.numel() == target.numel()
    is_whole = same_size and target._meta.is_contiguous()
    if target._views and not is_whole:
        return union(range_of(target), known)
    return known


def union(*ranges: Interval) -> Interval:
    return Interval(min(r.low for r in ranges), max(r.high for r in ranges))


def times(a: Interval, b: Interval) -> Interval:
    if a.root is _ZERO and b.root is _ZERO:
        return range_of(a.low * b.low)
    ends = [x * y if x and y else 0 for x in a[:2] for y in b[:2]]  # infinity times 0 is 0 here
    return Interval(min(ends), max(ends), factor=a.factor or b.factor)


def is_finite(r: Interval) -> bool:
    return not (isinf(r.low) or isinf(r.high))


class Operation(NamedTuple):
    """An operation and its arguments as a rule sees them, with the intervals of its first two arguments."""

    args: tuple
    named: dict[str, Any]
    """The arguments by name, without those that have their default."""
    out: torch.Tensor
    a: Interval
    b: Interval

    def size(self) -> int:
        """Returns the number of elements along `dim`, or of all if the call names none."""
        x = self.args[0]
        dim = self.named.get("dim")
        if isinstance(dim, int) and x.dim():
            return x.shape[dim]
        return x.numel()


def _product(a: Interval, b: Interval) -> Interval:
    result = times(a, b)
    if is_finite(result) or any(r.low >= -1 and r.high <= 1 for r in (a, b)):
        return result
    return result._replace(factor=max([1, *(abs(end) for r in (a, b) for end in r[:2] if not isinf(end))]))


def _power(base: Interval, exponent: Interval) -> Interval:
    size = max(abs(base.low), abs(base.high), 1)
    count = max(exponent.high, 0)
    if size > 1 and inf in (size, count):
        return Interval(0 if base.low >= 0 else -inf, inf, factor=1)
    top = _HUGE if size > 1 and count * log2(size) > 199 else size**count
    return Interval(0 if base.low >= 0 else -top, top)


def _sum(operation: Operation, sign: int = 1) -> Interval:
    a = operation.a
    b = operation.b
    alpha = operation.named.get("alpha", 1)
    if isinstance(alpha, TRACED_NUMBERS):
        b = times(times(b, range_of(alpha)), range_of(sign))
    elif sign * alpha != 1:
        b = times(b, range_of(sign * alpha))
    return Interval(a.low + b.low, a.high + b.high, a.root if b.root is _ZERO else None, a.offset + b.offset)


def _clamped(operation: Operation) -> Interval:
    low, high = operation.a[:2]
    least = operation.named.get("min")
    most = operation.named.get("max")
    if least is not None:
        low = max(low, range_of(least).low)
        high = max(high, range_of(least).high)
    if most is not None:
        low = min(low, range_of(most).low)
        high = min(high, range_of(most).high)
    return Interval(low, high)


def _quotient(operation: Operation) -> Interval:
    a = operation.a
    b = operation.b
    if b.low <= 0 or not is_finite(a) or not is_finite(b):
        return UNKNOWN
    ends = [q for x in a[:2] for y in b[:2] for q in (x // y, -(-x // y))]
    return Interval(min(ends), max(ends))


def _compared(holds: Callable[[float, float], bool], operation: Operation) -> Interval:
    a = operation.a
    b = operation.b
    apart = _apart(operation.a, operation.b)
    if apart is None:
        low, high = (a.low - b.high, a.high - b.low)
    else:
        low, high = (apart, apart)
    answers = [holds(difference, 0) for difference in (low, high, min(max(low, 0), high))]
    return Interval(min(answers), max(answers))


Rule = Callable[[Operation], Interval]


def _uniform(operation: Operation) -> Interval:
    low = operation.named.get("from", 0)
    high = operation.named.get("to", 1)
    return union(range_of(low), range_of(high))


_COPIES = "clone to_copy index index_select gather take embedding flip roll repeat amax amin unsafe_view unsafe_index"
_RULES: dict[str, Rule] = {
    _COPIES: lambda c: c.a,
    "constant_pad_nd tril triu": lambda c: union(c.a, range_of(c.named.get("value", 0))),
    "copy fill": lambda c: c.b,
    "cat stack": lambda c: union(*map(range_of, c.args[0])),
    "where": lambda c: union(c.b, range_of(c.args[2])),
    "max min": lambda c: Interval(0, c.size() - 1) if "dim" in c.named else c.a,
    "argmax argmin argsort topk sort": lambda c: Interval(0, c.size() - 1),
    "maximum": lambda c: Interval(max(c.a.low, c.b.low), max(c.a.high, c.b.high)),
    "minimum": lambda c: Interval(min(c.a.low, c.b.low), min(c.a.high, c.b.high)),
    "masked_fill": lambda c: union(c.a, range_of(c.args[2])),
    "index_put": lambda c: UNKNOWN if c.named.get("accumulate") else union(c.a, range_of(c.args[2])),
    "index_fill scatter": lambda c: UNKNOWN if "reduce" in c.named else union(c.a, range_of(c.args[3])),
    "full full_like new_full": lambda c: range_of(c.named["fill_value"]),
    "randint randint_like": lambda c: Interval(c.named.get("low", 0), c.named["high"] - 1),
    "rand rand_like uniform": _uniform,
    "arange": lambda c: union(range_of(c.named.get("start", 0)), range_of(c.named["end"])),
    "clamp clamp_min clamp_max": _clamped,
    "add": _sum,
    "sub": functools.partial(_sum, sign=-1),
    "rsub": lambda c: _sum(c._replace(a=c.b, b=c.a), sign=-1),
    "neg": lambda c: times(c.a, range_of(-1)),
    "abs": lambda c: Interval(0, max(abs(c.a.low), abs(c.a.high))),
    "mul": lambda c: _product(c.a, c.b),
    "mm bmm mv dot": lambda c: times(_product(c.a, c.b), range_of(c.args[0].shape[-1])),
    "pow": lambda c: _power(c.a, c.b),
    "prod cumprod": lambda c: _power(c.a, range_of(c.size())),
    "lshift bitwise_left_shift": lambda c: _product(c.a, _power(range_of(2), c.b)),
    "rshift bitwise_right_shift": lambda c: union(c.a, Interval(-1, 0)),
    "bitwise_and": lambda c: Interval(0, c.b.high) if c.b.low >= 0 else UNKNOWN,
    "floor_divide div": _quotient,
    "remainder": lambda c: Interval(0, c.b.high - 1) if c.b.low > 0 else UNKNOWN,
    "cumsum": lambda c: union(c.a, times(c.a, range_of(c.size()))),
    "sum": lambda c: times(c.a, range_of(c.args[0].numel() // max(1, c.out.numel()))),
    "count_nonzero": lambda c: Interval(0, c.args[0].numel()),
    **{name: functools.partial(_compared, getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
RULES = {name: rule for names, rule in _RULES.items() for name in names.split()}
"""Name of the ATen operation without underscores around it -> interval of its result, or of the last of several."""


@functools.cache
def rule_of(func: Any) -> tuple[Rule, tuple[str, ...]] | None:
    """Returns the rule of an operation and its arguments' names; None if any number may result."""
    name = schema_name(func).removeprefix("aten::").strip("_")
    if name in RULES:
        return (RULES[name], tuple(a.name for a in arguments_of(func)))
    return None


def follow(context: CallState, func: Any, args: tuple, kwargs: dict, results: Sequence[Any]) -> None:
    """Records the intervals of integers and of uniform draws, with which layers are dropped.

    Raises `BridgeError` for integers of 64 bits known not to fit into 32 bits.
    """
    found = rule_of(func)
    if found is None:
        return
    rule, names = found
    is_float = results[-1].dtype.is_floating_point
    if is_float and rule is not _uniform:
        return
    a = range_of(args[0]) if args else UNKNOWN
    b = range_of(args[1]) if len(args) > 1 else UNKNOWN
    out = results[-1]
    known = rule(Operation(args, {**dict(zip(names, args, strict=False)), **kwargs}, out, a, b))
    if out.dtype == torch.int64:
        known = _of_64_bits(context, func, known)
    elif not is_float:
        ends = _ENDS.get(out.dtype)
        if ends is None or known.low < ends.low or known.high > ends.high:
            known = None
    out._handle.storage.bounds = known


def _of_64_bits(context: CallState, func: Any, known: Interval) -> Interval | None:
    """Returns the interval of a result of 64 bits; None if it may be any number."""
    factor = None if is_finite(known) else known.factor
    if factor is None and _fits(known):
        return known
    if context.checks_int64 and factor is not None and factor < _OF_HASHES:
        context.warn(
            f"`{func.name()}` multiplies 64-bit integers of which nothing is known, in 32 bits",
            f"limit them before, as in x.clamp(0, n) or x % n; {REMEDY}",
        )
    elif context.checks_int64:
        _refuse(context, func, known if factor is None else Interval(-factor * 128, factor * 128))
    return None


# ---- 64-bit integers that JAX stores in 32 bits

Int64 = Literal["refuse", "wrap", "exact"]
"""The treatment of 64-bit integers. "refuse": an error where some are known not to fit into 32 bits, a warning
where a product of unknown ones may not. "wrap": 32 bits, modulo 2**32, as the caller has decided. "exact": 64 bits, an
error while JAX has none."""

REMEDY = (
    "set JAX_ENABLE_X64=1 for 64-bit integers, or choose int64='wrap' in bridge.export if the numbers stay below 2**31 "
    "or may wrap"
)
_OF_HASHES = 2**24
"""A factor with which only numbers below 128 stay within 32 bits, as in a hash whose other factor is an input."""


def check_policy(int64: str) -> None:
    """Raises `BridgeError` for a policy that does not exist, or that JAX in its present setup cannot keep."""
    if int64 not in ("refuse", "wrap", "exact"):
        raise BridgeError(f"int64 is {int64!r}; choose 'refuse', 'wrap' or 'exact'")
    if int64 == "exact" and not jax.config.read("jax_enable_x64"):
        raise BridgeError("int64='exact' needs JAX's 64-bit types: set JAX_ENABLE_X64=1")


def checked(int64: str) -> bool:
    """True if results are checked; False if integers have 64 bits, or may wrap."""
    return int64 == "refuse" and not jax.config.read("jax_enable_x64")


def check_values(name: str, values: torch.Tensor | np.ndarray | np.generic) -> None:
    """Raises `BridgeError` for a concrete array of integers that 32 bits do not hold."""
    if isinstance(values, torch.Tensor) and values.is_meta:
        return
    known = _of_values(values)
    if not _fits(known):
        raise BridgeError(f"{name} holds {_beyond(known)}. Remedy: {REMEDY}.")


def check_integers(arrays: Mapping[str, Any], int64: str) -> None:
    """Raises `BridgeError` for a policy that JAX cannot keep, and for integers that do not fit under it."""
    check_policy(int64)
    for name, values in arrays.items() if checked(int64) else ():
        check_values(name, values)


def note_constant(context: CallState, real: torch.Tensor, tensor: BridgeTensor) -> None:
    """Records the values of `real` for its stand-in `tensor`, unless `real` is state of the module."""
    storage = tensor._handle.storage
    if real.dtype not in (torch.int32, torch.int64) or storage.bounds is not None or tensor._handle.live:
        return
    with below_modes():
        known = _of_values(real)
    if _fits(known):
        storage.bounds = known
    elif context.checks_int64:
        raise context.error(f"a constant holds {_beyond(known)}", REMEDY)


def fitting(context: CallState, func: Any, inputs: Sequence[BridgeTensor], outs: Sequence[Any], args: tuple) -> tuple:
    """Returns the arguments; Python integers beyond 32 bits become floats beside floats, and wrap otherwise.

    Raises `BridgeError` for integers that PyTorch holds in 64 bits, as in `ids == 2**40`.
    """
    limit = _limit()
    dtypes = [t.dtype for t in (*inputs, *outs) if isinstance(t, torch.Tensor)]
    floating = any(d.is_floating_point or d.is_complex for d in dtypes)

    def fit(argument: Any, value: Any) -> Any:
        if type(value) is not int or -limit <= value < limit or "int" in str(argument.type):
            return value
        if context.checks_int64 and not floating and torch.int64 in dtypes:
            _refuse(context, func, Interval(value, value))
        if floating:
            return float(value)
        return (value + limit) % (2 * limit) - limit

    return tuple(map(fit, arguments_of(func), args))


def _refuse(context: CallState, func: Any, known: Interval) -> None:
    what = f"`{func.name()}` makes or takes {_beyond(known)}"
    if context.survey is None:
        raise context.error(what, REMEDY)
    context.survey.unsupported.setdefault(func.name(), f"{what}, {context.where()}")


def _of_values(values: torch.Tensor | np.ndarray | np.generic) -> Interval:
    if str(values.dtype).removeprefix("torch.") not in ("int32", "int64", "uint64"):
        return UNKNOWN
    size = values.numel() if isinstance(values, torch.Tensor) else values.size
    if size:
        return Interval(int(values.min()), int(values.max()))
    return Interval(0, 0)


def _limit() -> int:
    if jax.config.read("jax_enable_x64"):
        return 2**63
    return 2**31


def _fits(known: Interval) -> bool:
    """True if no finite end is beyond the integers that JAX has."""
    limit = _limit()
    return all(isinf(end) or -limit <= end < limit for end in known[:2])


def _beyond(known: Interval) -> str:
    low, high = (str(n) if abs(n) < 10**12 else f"{'-' * (n < 0)}2**{abs(int(n)).bit_length() - 1}" for n in known[:2])
    said = f"include {low}" if low == high else f"may be from {low} to {high}"
    return f"64-bit integers that 32 bits do not hold: they {said}"
