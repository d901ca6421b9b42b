"""Interval arithmetic: what is known of the integers in a tensor, and the range of a sum, a product or a power.

Python's own integers, so that nothing overflows here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from bridge.tensors import BridgeTensor

Range = tuple[int, int]
"""Least and largest value, both included."""


class Bounds(NamedTuple):
    """What is known of the integers in one piece of memory."""

    range: Range
    wide: bool
    """Whether they may have 64 bits in PyTorch; integers of 32 bits wrap there as here."""
    known: bool = False
    """Whether the range comes from numbers that are known; otherwise one that ends near 2**31 says nothing."""


INT32: Range = (-(2**31), 2**31 - 1)
_HUGE: Range = (-(2**200), 2**200)


def range_of(value: Any) -> Range:
    """Of a tensor or a Python number."""
    if not isinstance(value, BridgeTensor):
        return (math.floor(value), math.ceil(value)) if isinstance(value, (int, float)) and abs(value) < 1e60 else INT32
    if value._cell.storage.bounds is not None:
        return value._cell.storage.bounds.range
    if value.dtype == torch.bool:
        return (0, 1)
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype in (torch.int32, torch.int64):
        return INT32
    return torch.iinfo(value.dtype).min, torch.iinfo(value.dtype).max


def is_known(tensor: BridgeTensor) -> bool:
    """Whether the range of the tensor says more than its type."""
    if tensor._cell.storage.bounds is not None:
        return tensor._cell.storage.bounds.known
    return tensor.dtype not in (torch.int32, torch.int64) and not tensor.dtype.is_floating_point


def is_wide(tensor: BridgeTensor) -> bool:
    """Whether the tensor may hold 64-bit integers in PyTorch."""
    known = tensor._cell.storage.bounds
    return tensor.dtype == torch.int64 or (known is not None and known.wide)


def union(*ranges: Range) -> Range:
    return min(r[0] for r in ranges), max(r[1] for r in ranges)


def add(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def negative(a: Range) -> Range:
    return -a[1], -a[0]


def times(a: Range, b: Range) -> Range:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def repeated(a: Range, count: int) -> Range:
    return a[0] * count, a[1] * count


def to_the(base: Range, exponent: Range) -> Range:
    size, count = max(map(abs, base)), max(exponent[1], 0)
    if size > 1 and count * math.log2(size) > 199:
        return _HUGE
    top = size**count if size > 1 else 1
    return (0 if base[0] >= 0 else -top), max(top, 1)
