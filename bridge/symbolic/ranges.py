"""Intervals of integers, followed while tracing by the operations that index arithmetic is made of.

An end that is not known is infinite, so a finite end says something. A tensor whose elements are all one integer also
knows which: `pos + 2` is the root `pos` and the offset 2, so the length of `x[pos : pos + 2]` is known. The intervals
also show where 64-bit integers do not fit into the 32 bits in which JAX stores them: a result that is known not to fit
is an error, a product of unknown integers a warning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
import torch

from bridge._compat.torch import arguments as arguments_of
from bridge._compat.torch import below_modes, schema_name
from bridge.errors import BridgeError
from bridge.tensor.tensor import BridgeTensor


class Interval(NamedTuple):
    """Least and largest value, both included, and the integer that all elements are equal to, if there is one."""

    low: float
    high: float
    root: Any = None
    """That integer is `root + offset`; `NUMBER` stands for 0."""
    offset: int = 0


UNKNOWN = Interval(-math.inf, math.inf)
NUMBER = "number"
_HUGE = 2**200


class _Root:
    """The integer in an array without dimensions."""

    def __init__(self, array: jax.Array):
        self._array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Root) and other._array is self._array

    __hash__ = None  # pyright: ignore[reportAssignmentType]


_NARROW = (torch.uint8, torch.int8, torch.int16)
_INTEGERS = (*_NARROW, torch.int32, torch.int64)
_OF_DTYPE = {d: Interval(torch.iinfo(d).min, torch.iinfo(d).max) for d in _NARROW} | {torch.bool: Interval(0, 1)}


def range_of(value: Any) -> Interval:
    """Returns the interval of a tensor or a Python number."""
    if not isinstance(value, BridgeTensor):
        is_number = isinstance(value, (int, float)) and abs(value) < _HUGE
        return Interval(value, value, NUMBER, value) if is_number else UNKNOWN  # pyright: ignore
    storage, dtype = value._cell.storage, value.dtype
    known = storage.bounds
    if known is None or (storage.layout is not None and storage.layout.dtype != dtype):
        known = _OF_DTYPE.get(dtype, UNKNOWN)
    if known.root is None and not value.dim() and dtype in _INTEGERS:
        return Interval(known.low, known.high, _Root(value.value))
    return known


def known_number(tensor: BridgeTensor) -> int | None:
    """Returns the only value that a traced number can have, that of a decided comparison, say; None if several."""
    low, high = range_of(tensor)[:2]
    return int(low) if low == high and not tensor.dtype.is_floating_point else None


def distance(a: BridgeTensor | int, b: BridgeTensor | int) -> int | None:
    """Returns `a - b` of two integers that are the same one plus numbers; None for others."""
    left, right = range_of(a), range_of(b)
    return left.offset - right.offset if left.root is not None and left.root == right.root else None


def after_write(target: BridgeTensor, source: BridgeTensor) -> Interval | None:
    """Returns what is known of the memory of `target` once that holds `source`; None if nothing is."""
    if source.dtype != target.dtype:
        return None
    return union(range_of(target), range_of(source)) if target._views else range_of(source)


def union(*ranges: Interval) -> Interval:
    return Interval(min(r.low for r in ranges), max(r.high for r in ranges))


def _plus(a: Interval, b: Interval) -> Interval:
    root = a.root if b.root == NUMBER else None
    return Interval(a.low + b.low, a.high + b.high, root, a.offset + b.offset)


def times(a: Interval, b: Interval) -> Interval:
    if a.root == b.root == NUMBER:
        return range_of(a.low * b.low)
    ends = [x * y if x and y else 0 for x in a[:2] for y in b[:2]]  # infinity times 0 is 0 here
    return Interval(min(ends), max(ends))


def is_finite(r: Interval) -> bool:
    return not (math.isinf(r.low) or math.isinf(r.high))


class Call:
    """One call of an operation as a rule sees it."""

    def __init__(self, name: str, func: Any, args: tuple, kwargs: dict, out: torch.Tensor):
        self.name, self.func, self.args, self.kwargs, self.out = name, func, args, kwargs, out
        self.factor: float | None = None
        """The largest known factor of a product of which nothing is known, at least 1; None for any other result."""

    def named(self, name: str, default: Any = None) -> Any:
        for argument, value in zip(arguments_of(self.func), self.args, strict=False):
            if argument.name == name:
                return value
        return self.kwargs.get(name, default)

    def range(self, index: int) -> Interval:
        return range_of(self.args[index]) if index < len(self.args) else UNKNOWN

    def size(self) -> Interval:
        """Returns the number of elements along `dim`, or of all if the call names none."""
        x, dim = self.args[0], self.named("dim")
        count = x.shape[dim] if isinstance(dim, int) and x.dim() else x.numel()
        return Interval(count, count)

    def product(self, b: Interval | None = None) -> Interval:
        """Returns the interval of the first argument times the second one, or times `b`."""
        a, b = self.range(0), b or self.range(1)
        result = times(a, b)
        if not is_finite(result) and not any(r.low >= -1 and r.high <= 1 for r in (a, b)):
            finite = [abs(end) for r in (a, b) for end in r[:2] if not math.isinf(end)]
            self.factor = max(finite, default=1)
        return result

    def power(self, base: Interval, exponent: Interval) -> Interval:
        size, count = max(abs(base.low), abs(base.high)), max(exponent.high, 0)
        if size <= 1:
            top: float = 1
        elif math.isinf(size) or math.isinf(count):
            top, self.factor = math.inf, 1
        else:
            top = _HUGE if count * math.log2(size) > 199 else size**count
        return Interval(0 if base.low >= 0 else -top, max(top, 1))


def _with_zero(r: Interval) -> Interval:
    return Interval(min(r.low, 0), max(r.high, 0))


def _picked(call: Call) -> Interval | tuple[Interval, ...]:
    """Returns the intervals of elements of the input and of their places; `max(a, b)` is `maximum(a, b)`."""
    if call.name in ("max", "min") and isinstance(call.named("other"), torch.Tensor):
        return _larger(call)
    x, is_place = call.args[0], call.name.startswith("arg")
    dim = call.named("dim", None if is_place else -1)
    places = Interval(0, max((x.shape[dim] if isinstance(dim, int) and x.dim() else x.numel()) - 1, 0))
    return (places,) if is_place else (union(call.range(0)), places)


def _larger(call: Call) -> Interval:
    a, b, choose = call.range(0), call.range(1), min if call.name.startswith("min") else max
    return Interval(choose(a.low, b.low), choose(a.high, b.high))


_FILLED_BY = {"masked_fill": 2, "index_put": 2, "scatter": 3, "index_fill": 3}
"""Which argument holds what is put into a copy of the first one."""


def _filled(call: Call) -> Interval:
    if call.named("accumulate") or call.named("reduce"):
        return UNKNOWN
    return union(call.range(0), call.range(_FILLED_BY[call.name]))


def _added_into(call: Call) -> Interval:
    """As many terms for one place as the index has along the dimension; that of `index_add` has only one."""
    index = call.args[2]
    count = index.numel() if index.dim() < 2 else index.shape[call.args[1]]
    terms = times(times(call.range(3), range_of(call.named("alpha", 1))), range_of(count))
    return _plus(call.range(0), _with_zero(terms))


_LIMITS = {
    **dict.fromkeys(["clamp", "clamp_min", "clamp_max"], ("min", "max")),
    "hardtanh": ("min_val", "max_val"),
}


def _clamped(call: Call) -> Interval:
    known = call.range(0)
    of_hardtanh = (-1, 1) if call.name == "hardtanh" else (None, None)
    least, most = map(call.named, _LIMITS[call.name], of_hardtanh)
    low, high = known[:2]
    if least is not None:
        low, high = max(low, range_of(least).low), max(high, range_of(least).high)
    if most is not None:
        low, high = min(low, range_of(most).low), min(high, range_of(most).high)
    if (low, high) == known[:2]:
        return known
    by_numbers = not isinstance(least, torch.Tensor) and not isinstance(most, torch.Tensor)
    same = ("clamp", known.root, known.offset, least, most) if by_numbers and known.root is not None else None
    return Interval(low, high, same)


def _sum(call: Call) -> Interval:
    a, b = (call.range(1), call.range(0)) if call.name == "rsub" else (call.range(0), call.range(1))
    scale = call.named("alpha", 1) * (1 if call.name == "add" else -1)
    return _plus(a, b if isinstance(scale, int) and scale == 1 else times(b, range_of(scale)))


def _remainder(call: Call) -> Interval:
    a, b = call.range(0), call.range(1)
    if b.low > 0:
        return Interval(0, min(b.high - 1, a.high) if a.low >= 0 else b.high - 1)
    size = max(abs(b.low), abs(b.high), 1) - 1
    return Interval(-size, size)


def _quotient(call: Call) -> Interval:
    a, b = call.range(0), call.range(1)
    if call.out.dtype.is_floating_point:
        exact = b.low * b.high > 0 and call.named("rounding_mode") is None
        return times(a, Interval(1 / b.high, 1 / b.low)) if exact else UNKNOWN
    if b.low <= 0:
        size = max(abs(a.low), abs(a.high))
        return Interval(-size, size)
    if not is_finite(a) or not is_finite(b):
        return _with_zero(a)
    ends = [q for x in a[:2] for y in b[:2] for q in (x // y, -(-x // y))]
    return Interval(min(ends), max(ends))


def _both_bits(call: Call) -> Interval:
    tops = [r.high for r in (call.range(0), call.range(1)) if r.low >= 0]
    return Interval(0, min(tops)) if tops else UNKNOWN


_COMPARISONS: dict[str, Callable[[float, float], tuple[bool, bool]]] = {
    "eq": lambda low, high: (low == high == 0, low > 0 or high < 0),
    "ne": lambda low, high: (low > 0 or high < 0, low == high == 0),
    "lt": lambda low, high: (high < 0, low >= 0),
    "ge": lambda low, high: (low >= 0, high < 0),
    "gt": lambda low, high: (low > 0, high <= 0),
    "le": lambda low, high: (high <= 0, low > 0),
}
"""True if the ends of `a - b` say that the comparison holds, and whether they say that it does not."""


def _compared(call: Call) -> Interval:
    if any(isinstance(a, BridgeTensor) and a.dtype.is_floating_point for a in call.args):
        return Interval(0, 1)  # of nan, no comparison but `!=` holds
    a, b, apart = call.range(0), call.range(1), distance(*call.args[:2])
    ends = (a.low - b.high, a.high - b.low) if apart is None else (apart, apart)
    holds, fails = _COMPARISONS[call.name](*ends)
    return Interval(int(holds), int(not fails))


Rule = Callable[[Call], Interval | tuple[Interval, ...]]
_COPIES = "clone to_copy index index_select gather take embedding flip roll repeat amax amin unsafe_view unsafe_index"
_PADDED = "constant_pad_nd tril triu"
_OF_FLOATS = f"{_COPIES} {_PADDED} copy round floor ceil trunc add sub mul div neg abs where cat"
LIMITING = {*_LIMITS, "sigmoid"}
"""Operations that limit floats whatever is known of these."""
OF_FLOATS = {*LIMITING, *_OF_FLOATS.split()}
"""Operations that are followed for floats, because these become indices: `x.round().clamp(0, 255).long()`."""


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_each(_COPIES, lambda c: c.range(0)),
    **_each(_PADDED, lambda c: union(c.range(0), range_of(c.named("value", 0)))),
    **_each("round floor ceil trunc", lambda c: c.range(0)),
    **_each("cat stack", lambda c: union(*map(range_of, c.args[0]))),
    **_each("max min topk sort argmax argmin argsort", _picked),
    **_each("maximum minimum", _larger),
    **dict.fromkeys(_FILLED_BY, _filled),
    **_each("index_add scatter_add", _added_into),
    **_each("full full_like new_full", lambda c: range_of(c.named("fill_value"))),
    **dict.fromkeys(_LIMITS, _clamped),
    **_each("add sub rsub", _sum),
    **_each("mm bmm mv dot", lambda c: times(c.product(), range_of(c.args[0].shape[-1]))),
    **_each("lshift bitwise_left_shift", lambda c: c.product(c.power(range_of(2), c.range(1)))),
    **_each("rshift bitwise_right_shift", lambda c: union(c.range(0), Interval(-1, 0))),
    **_each("prod cumprod", lambda c: union(c.range(0), c.power(c.range(0), c.size()))),
    **_each("floor_divide div", _quotient),
    **_each("bitwise_and and", _both_bits),
    **dict.fromkeys(_COMPARISONS, _compared),
    "abs": lambda c: Interval(0, max(map(abs, c.range(0)[:2]))),
    "arange": lambda c: union(range_of(c.named("start", 0)), range_of(c.named("end"))),
    "copy": lambda c: c.range(1),
    "count_nonzero": lambda c: Interval(0, c.args[0].numel()),
    "cumsum": lambda c: union(c.range(0), times(c.range(0), c.size())),
    "fill": lambda c: c.range(1),
    "mul": lambda c: c.product(),
    "neg": lambda c: times(c.range(0), range_of(-1)),
    "pow": lambda c: c.power(c.range(0), c.range(1)),
    "remainder": _remainder,
    "sigmoid": lambda c: Interval(0, 1),
    "sum": lambda c: times(c.range(0), range_of(c.args[0].numel() // max(1, c.out.numel()))),
    "where": lambda c: union(c.range(1), c.range(2)),
}
"""Name of the ATen operation without underscores around it -> interval of its result, or of each."""


@functools.cache
def rule_of(func: Any) -> tuple[str, Rule] | None:
    """Returns the name of an operation and its rule; None if any number may come out of it."""
    name = schema_name(func).removeprefix("aten::").strip("_")
    return (name, RULES[name]) if name in RULES else None


# ---- 64-bit integers that JAX stores in 32 bits

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
