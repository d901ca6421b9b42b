"""64-bit integers that JAX stores in 32 bits: what is known of their range while tracing, and who may leave it.

Interval arithmetic over the integers of a call. Constants know their range, results of comparisons, remainders, masks
and indexing have small ones, inputs have all of 32 bits. Products, powers and shifts whose range is not within 32 bits
are refused; sums only where the range of what they add is known, because a sum of unknown numbers would always be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
import torch

from bridge import (
    float_ranges,
    integer_arithmetic,  # noqa: F401 (importing it fills the table of rules)
)
from bridge._compat.torch import arguments as arguments_of
from bridge._compat.torch import below_modes, schema_name
from bridge.errors import BridgeError
from bridge.integer_ranges import INT32, Bounds, Range, is_known, is_wide, range_of, union
from bridge.integer_rules import INDEX_ONLY, PICKS, PRODUCTS, RULES, Call, size_along
from bridge.tensors import BridgeTensor

Int64 = Literal["refuse", "wrap", "exact"]
"""What a call does with 64-bit integers. "refuse": an error where they may not fit into 32 bits. "wrap": 32 bits,
modulo 2**32, as the caller has decided. "exact": 64 bits, an error while JAX has none."""

REMEDY = (
    "set JAX_ENABLE_X64=1 for 64-bit integers, or choose int64='wrap' in bridge.export if the numbers stay below 2**31 "
    "or may wrap"
)


def check_policy(int64: str) -> None:
    """Raise `BridgeError` for a policy that does not exist, or that JAX cannot keep as it is set up."""
    if int64 not in ("refuse", "wrap", "exact"):
        raise BridgeError(f"int64 is {int64!r}; choose 'refuse', 'wrap' or 'exact'")
    if int64 == "exact" and not jax.config.read("jax_enable_x64"):
        raise BridgeError("int64='exact' needs JAX's 64-bit types: set JAX_ENABLE_X64=1")


def checked(int64: str) -> bool:
    """Whether ranges are followed: not where integers have 64 bits, nor where they may wrap."""
    return int64 == "refuse" and not jax.config.read("jax_enable_x64")


def check_values(name: str, values: torch.Tensor | np.ndarray | np.generic) -> None:
    """Raise `BridgeError` for a concrete array of integers that 32 bits do not hold."""
    try:
        _range_of_values(values)
    except RangeError as error:
        what = f"{name} holds 64-bit integers that 32 bits do not hold: they {error}"
        raise BridgeError(f"{what}. Remedy: {REMEDY}.") from None


def _range_of_values(values: torch.Tensor | np.ndarray | np.generic) -> Range | None:
    """`None` for other types than integers of 32 and 64 bits."""
    if str(values.dtype).removeprefix("torch.") not in ("int32", "int64", "uint64"):
        return None
    size = values.numel() if isinstance(values, torch.Tensor) else values.size
    low, high = (int(values.min()), int(values.max())) if size else (0, 0)
    if not _within((low, high)):
        raise RangeError(low, high)
    return low, high


def fitting(func: Any, args: tuple, kwargs: dict, floating: bool) -> tuple[tuple, dict]:
    """The arguments, Python's integers beyond JAX's as it takes them: floats beside floats, otherwise wrapped."""
    limit = 2**63 if jax.config.read("jax_enable_x64") else 2**31
    if all(type(v) is not int or -limit <= v < limit for v in (*args, *kwargs.values())):
        return args, kwargs

    def fit(argument: Any, value: Any) -> Any:
        if type(value) is not int or -limit <= value < limit or "int" in str(argument.type):
            return value
        return float(value) if floating else (value + limit) % (2 * limit) - limit

    declared = {a.name: a for a in arguments_of(func)}
    fitted = tuple(fit(argument, value) for argument, value in zip(declared.values(), args, strict=False))
    return fitted, {name: fit(declared[name], value) for name, value in kwargs.items()}


_TYPES = (torch.int32, torch.int64)


class Integers:
    """Follows the ranges of one call."""

    def constant(self, real: torch.Tensor, tensor: BridgeTensor) -> None:
        """`tensor` stands for `real`; where that is no state of the module, its values are known."""
        storage = tensor._cell.storage
        if real.dtype in _TYPES and storage.bounds is None and not tensor._cell.live:
            with below_modes():
                known = _range_of_values(real)
            storage.bounds = Bounds(known or INT32, wide=real.dtype == torch.int64, known=known is not None)

    def input(self, tensor: BridgeTensor) -> None:
        """An integer input of 32 bits may be one of 64 in PyTorch: JAX has no other to give."""
        if tensor.dtype in _TYPES:
            tensor._cell.storage.bounds = Bounds(INT32, wide=True)

    def bounds(self, func: Any, args: tuple, kwargs: dict, outs: Sequence[Any]) -> list[Bounds | None]:
        """Of each result. Raises `RangeError` if one that has 64 bits in PyTorch may lie outside 32."""
        inputs = _tensors((args, kwargs))
        wide = any(is_wide(t) for t in inputs)
        if not any(t.dtype.is_floating_point or t.dtype.is_complex for t in inputs):
            _check_numbers(func, args, kwargs, outs, wide)
        results: list[Bounds | None] = []
        for i, out in enumerate(outs):
            if not isinstance(out, torch.Tensor) or out.dtype not in _TYPES:
                floating = isinstance(out, torch.Tensor) and out.dtype.is_floating_point and i == 0
                results.append(float_ranges.bounds_of(_name(func), args, kwargs, out.dtype) if floating else None)
                continue
            # `.int()` of 64 bits keeps the lower ones in PyTorch, too.
            as_64 = out.dtype == torch.int64 or (wide and schema_name(func) != "aten::_to_copy")
            try:
                range_ = self._range(func, args, kwargs, inputs, out, i)
                results.append(Bounds(range_, as_64, _says_something(range_, inputs)))
            except RangeError:
                if as_64:
                    raise
                results.append(Bounds(INT32, wide=False))
        return results

    def note(self, results: Sequence[Any], bounds: Sequence[Bounds | None]) -> None:
        for result, known in zip(results, bounds, strict=True):
            if known is not None:
                result._cell.storage.bounds = known

    def written(self, target: BridgeTensor, source: BridgeTensor) -> None:
        """A part of `target`, or all of it, now holds `source`."""
        if target.dtype in _TYPES:
            old = target._cell.storage.bounds
            both = range_of(source) if not target._views else union(range_of(target), range_of(source))
            wide = target.dtype == torch.int64 or (old is not None and old.wide)
            target._cell.storage.bounds = Bounds(both, wide, is_known(target) and is_known(source))
        elif target.dtype.is_floating_point and target.dtype == source.dtype and not target._views:
            target._cell.storage.bounds = source._cell.storage.bounds

    def _range(
        self, func: Any, args: tuple, kwargs: dict, inputs: list[BridgeTensor], out: torch.Tensor, index: int
    ) -> Range:
        name = _name(func)
        if name in PICKS:
            if index == 0 and name not in INDEX_ONLY:
                return range_of(args[0])
            given = dict(zip((a.name for a in arguments_of(func)), args, strict=False)) | kwargs
            return 0, size_along(args[0], given.get("dim", None if name in INDEX_ONLY else -1)) - 1
        rule = RULES.get(name)
        if rule is None:
            return INT32
        low, high = rule(Call(name, args, kwargs, inputs, out))
        if _within((low, high)):
            return low, high
        # One more or one less than 32 bits hold, say, comes from that limit and not from the numbers.
        if name in PRODUCTS or all(map(is_known, inputs)):
            raise RangeError(low, high)
        return max(low, INT32[0]), min(high, INT32[1])


def _name(func: Any) -> str:
    """Without namespace, overload and underscores around it."""
    return schema_name(func).removeprefix("aten::").strip("_")


def _says_something(r: Range, inputs: list[BridgeTensor]) -> bool:
    """Whether the range comes from known numbers, or is small whatever they are: a remainder, an index."""
    return r != INT32 and (max(map(abs, r)) < 2**30 or all(map(is_known, inputs)))


class RangeError(Exception):
    """A result whose range is known not to be within 32 bits."""

    def __init__(self, low: int, high: int):
        one = f"include {_said(low)}"
        super().__init__(one if low == high else f"may be from {_said(low)} to {_said(high)}")


def _said(n: int) -> str:
    return str(n) if abs(n) < 10**12 else f"{'-' if n < 0 else ''}2**{abs(n).bit_length() - 1}"


def _check_numbers(func: Any, args: tuple, kwargs: dict, outs: Sequence[Any], wide: bool) -> None:
    """Python numbers beside integer tensors, or that make one: `ids == 2**40`, `torch.full(size, 2**40)`."""
    made = [o for o in outs if isinstance(o, torch.Tensor)]
    if not wide and not any(o.dtype == torch.int64 for o in made):
        return
    if any(o.dtype.is_floating_point or o.dtype.is_complex for o in made):
        return
    declared = arguments_of(func)
    given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
    for argument, value in given:
        if type(value) is int and "int" not in str(argument.type) and not _within((value, value)):
            raise RangeError(value, value)


def _within(r: Range) -> bool:
    return INT32[0] <= r[0] and r[1] <= INT32[1]


def _tensors(value: Any) -> list[BridgeTensor]:
    if isinstance(value, BridgeTensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if type(value) in (list, tuple) else []
