"""The range of floating-point numbers that become integers: `x.round().clamp(0, 255).long()`.

Only operations that limit, round and scale are followed; of any other result nothing is known.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from bridge.integer_ranges import Bounds, Range, add, negative, times, union
from bridge.tensors import BridgeTensor

_UNBOUNDED = (-math.inf, math.inf)
_SAME = {"round", "floor", "ceil", "trunc", "clone", "contiguous", "to_copy", "copy"}
_LIMITS = {"clamp": (1, 2), "clip": (1, 2), "hardtanh": (1, 2), "clamp_min": (1, None), "clamp_max": (None, 1)}
"""Operation -> the places of its lower and its upper limit."""
_FIXED: dict[str, Range] = {
    "relu6": (0, 6),
    **dict.fromkeys(("sigmoid", "hardsigmoid", "softmax", "rand", "rand_like"), (0, 1)),
    **dict.fromkeys(("tanh", "sin", "cos", "sign", "erf"), (-1, 1)),
}


def bounds_of(name: str, args: tuple, kwargs: dict, dtype: torch.dtype) -> Bounds | None:
    """Of the result of an operation, by its ATen name without overload and underscores around it."""
    range_ = _range(name, args, kwargs)
    if range_ is None or not all(map(math.isfinite, range_)):
        return None
    return Bounds(_stored(range_, dtype), wide=False, known=True)


def _range(name: str, args: tuple, kwargs: dict) -> Any:
    if name in _FIXED:
        return _FIXED[name]
    if name in _SAME:
        return _of(args[1 if name == "copy" else 0])
    if name in _LIMITS:
        return _limited(name, args, kwargs)
    if name in ("mul", "add", "sub", "div"):
        return _arithmetic(name, args, kwargs)
    return None


def _limited(name: str, args: tuple, kwargs: dict) -> Any:
    low, high = _of(args[0])
    keys, default = (("min_val", "max_val"), 1) if name == "hardtanh" else (("min", "max"), None)
    places = _LIMITS[name]
    least, most = (
        args[at] if at is not None and len(args) > at else kwargs.get(key) for at, key in zip(places, keys, strict=True)
    )
    least, most = -1 if least is None and default else least, default if most is None else most
    if least is not None:
        low, high = max(low, _of(least)[0]), max(high, _of(least)[1])
    if most is not None:
        low, high = min(low, _of(most)[0]), min(high, _of(most)[1])
    return low, high


def _arithmetic(name: str, args: tuple, kwargs: dict) -> Any:
    a, b = _of(args[0]), _of(args[1])
    alpha = kwargs.get("alpha", 1)
    if not all(map(math.isfinite, (*a, *b))):
        return None
    if name == "mul":
        return times(a, b)
    if name == "div":
        least = min(map(abs, b)) if b[0] * b[1] > 0 else 0
        size = max(map(abs, a))
        return (-size / least, size / least) if least and "rounding_mode" not in kwargs else None
    if not isinstance(alpha, (int, float)):
        return None
    scale: Any = (alpha, alpha)
    return add(a, times(scale, b if name == "add" else negative(b)))


def _of(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return (value, value) if math.isfinite(value) else _UNBOUNDED
    if isinstance(value, BridgeTensor):
        known = value._cell.storage.bounds
        return known.range if known is not None and value.dtype.is_floating_point else _UNBOUNDED
    return _UNBOUNDED


def _stored(range_: Any, dtype: torch.dtype) -> Range:
    """With the rounding of the dtype, and 0: XLA makes that of nan when it casts to an integer."""
    slack = torch.finfo(dtype).eps
    low, high = (math.floor(range_[0] - abs(range_[0]) * slack), math.ceil(range_[1] + abs(range_[1]) * slack))
    return union((low, high), (0, 0))
