"""What is known, while tracing, of integers without dimensions: their range, and how far apart two of them are.

Code that keeps keys and values of earlier tokens computes with a position: `x[pos : pos + n]`, `if pos + n > size`. The
number is traced, but the length of that slice is n, and the branch is decided where the range of the position is known:
by `pos.clamp(low, high)`, or a remainder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from bridge.integer_ranges import Range, add
from bridge.tensors import BridgeTensor

aten = torch.ops.aten


class Position(NamedTuple):
    """The integer `root + offset`, or the number `offset` if `root` is None."""

    root: jax.Array | None
    offset: int
    range: Range
    """Least and largest value, both included."""


class Positions:
    """The integers without dimensions of one call, by their arrays."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[jax.Array, Position]] = {}
        """`id(array)` -> the array, which keeps the id valid, and what is known of it."""
        self._clamped: dict[tuple, tuple[Position, Position]] = {}
        """`id(root)`, offset and limits -> what was clamped, which keeps the id valid, and the result."""

    def of(self, value: BridgeTensor | int) -> Position:
        """What is known of a tensor without dimensions or of a number."""
        if not isinstance(value, BridgeTensor):
            return Position(None, int(value), (int(value), int(value)))
        array = value.value
        known = self._known.get(id(array))
        return known[1] if known is not None else Position(array, 0, _range_of_dtype(array))

    def number(self, value: jax.Array) -> int | None:
        """The value, if it is known: of a comparison that the ranges decide."""
        known = self._known.get(id(value))
        return known[1].offset if known is not None and known[1].root is None else None

    def distance(self, a: BridgeTensor | int, b: BridgeTensor | int) -> int | None:
        """`a - b` of two integers that are the same one plus numbers, which may have wrapped; None for others."""
        left, right = self.of(a), self.of(b)
        return left.offset - right.offset if left.root is right.root else None

    def difference(self, a: BridgeTensor | int, b: BridgeTensor | int) -> Range:
        """The range of `a - b`."""
        left, right = self.of(a), self.of(b)
        if left.root is right.root and left.range[0] - left.offset == right.range[0] - right.offset:  # none has wrapped
            return left.offset - right.offset, left.offset - right.offset
        return left.range[0] - right.range[1], left.range[1] - right.range[0]

    def clamped(self, result: jax.Array, before: Position, low: int | None, high: int | None) -> Position:
        """What is known of a number between two others. The same number clamped again is the same position."""
        least, most = before.range
        if (low is None or low <= least) and (high is None or most <= high):
            return before
        new = Position(result, 0, (_clamp(least, low, high), _clamp(most, low, high)))
        return self._clamped.setdefault((id(before.root), before.offset, low, high), (before, new))[1]

    def note(self, func: Any, args: tuple, kwargs: dict, results: tuple) -> None:
        """Remembers what is known of the result of an operation."""
        rule = _RULES.get(func)
        if rule is not None and not kwargs and isinstance(args[0], BridgeTensor) and all(map(_is_integer, args)):
            array = results[0].value
            known = rule(self, array, *args)
            if known is not None:
                self._known[id(array)] = array, known


def _is_integer(value: Any) -> bool:
    if isinstance(value, BridgeTensor):
        return not value.dim() and jnp.issubdtype(value.value.dtype, jnp.integer)
    return value is None or type(value) is int


def _range_of_dtype(array: jax.Array) -> Range:
    limits = jnp.iinfo(array.dtype)
    return int(limits.min), int(limits.max)


def _sum(positions: Positions, result: jax.Array, a: Any, b: Any) -> Position | None:
    if isinstance(b, BridgeTensor):
        return None
    known, (least, most) = positions.of(a), _range_of_dtype(result)
    low, high = add(known.range, (b, b))
    return Position(known.root, known.offset + b, (low, high) if least <= low and high <= most else (least, most))


def _difference(positions: Positions, result: jax.Array, a: Any, b: Any) -> Position | None:
    return None if isinstance(b, BridgeTensor) else _sum(positions, result, a, -b)


def _clamped(
    positions: Positions, result: jax.Array, x: Any, low: int | None = None, high: int | None = None
) -> Position | None:
    if isinstance(low, BridgeTensor) or isinstance(high, BridgeTensor):
        return None
    return positions.clamped(result, positions.of(x), low, high)


def _clamp(number: int, low: int | None, high: int | None) -> int:
    number = number if low is None else max(number, low)
    return number if high is None else min(number, high)  # as PyTorch: the upper end decides where they cross


def _remainder(positions: Positions, result: jax.Array, x: Any, divisor: Any) -> Position | None:
    return Position(result, 0, (0, divisor - 1)) if type(divisor) is int and divisor > 0 else None


def _compared(always: Callable[[Range], bool], never: Callable[[Range], bool]) -> Callable[..., Position | None]:
    """A comparison that is true or false for every difference in a range."""

    def rule(positions: Positions, result: jax.Array, a: Any, b: Any) -> Position | None:
        difference = positions.difference(a, b)
        if not always(difference) and not never(difference):
            return None
        answer = int(always(difference))
        return Position(None, answer, (answer, answer))

    return rule


def _is_zero(r: Range) -> bool:
    return r == (0, 0)


def _excludes_zero(r: Range) -> bool:
    return r[0] > 0 or r[1] < 0


_COMPARISONS = {
    "eq": _compared(_is_zero, _excludes_zero),
    "ne": _compared(_excludes_zero, _is_zero),
    "lt": _compared(lambda r: r[1] < 0, lambda r: r[0] >= 0),
    "le": _compared(lambda r: r[1] <= 0, lambda r: r[0] > 0),
    "gt": _compared(lambda r: r[0] > 0, lambda r: r[1] <= 0),
    "ge": _compared(lambda r: r[0] >= 0, lambda r: r[1] < 0),
}
_RULES: dict[Any, Callable[..., Position | None]] = {
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _difference,
    aten.clamp.default: _clamped,
    aten.clamp_min.default: _clamped,
    aten.clamp_max.default: lambda positions, result, x, high: _clamped(positions, result, x, None, high),
    aten.remainder.Scalar: _remainder,
    **{
        getattr(getattr(aten, name), overload): rule
        for name, rule in _COMPARISONS.items()
        for overload in ("Scalar", "Tensor")
    },
}
"""Operations whose result is known from their arguments; of any other result nothing is known but its dtype."""
