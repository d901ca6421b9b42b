"""Interval arithmetic: the range of each integer operation's result from those of what it is given.

Python's own integers, so that nothing overflows here. `RULES` has the operations that models make index arithmetic of;
any other result may be whatever 32 bits hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
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


def value_range(array: jax.Array) -> Range:
    """Of a concrete array."""
    host = np.asarray(array)
    return (int(host.min()), int(host.max())) if host.size else (0, 0)


def union(*ranges: Range) -> Range:
    return min(r[0] for r in ranges), max(r[1] for r in ranges)


# The rules: name of the ATen operation, without overload and trailing underscore -> range of the result.


class Call:
    """One call of an operation as a rule sees it."""

    def __init__(self, name: str, args: tuple, kwargs: dict, inputs: list[BridgeTensor], out: torch.Tensor):
        self.name, self.args, self.kwargs, self.inputs, self.out = name, args, kwargs, inputs, out

    def get(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def range(self, index: int) -> Range:
        return range_of(self.args[index]) if len(self.args) > index else INT32

    @property
    def count(self) -> int:
        """How many elements of the input make one of the result."""
        return max(1, self.args[0].numel() // max(1, self.out.numel()))


RULES: dict[str, Callable[[Call], Range]] = {}
PRODUCTS = {
    *("mul", "square", "pow", "prod", "cumprod", "lshift", "bitwise_left_shift", "addcmul"),
    *("mm", "bmm", "addmm", "baddbmm", "addmv", "addbmm", "linear", "dot", "mv", "matmul"),
    *("lcm", "scatter_reduce", "index_reduce"),
}
"""Refused also where nothing is known of the operands."""
PICKS = {"max", "min", "topk", "sort", "kthvalue", "mode", "cummax", "cummin", "argmax", "argmin", "argsort"}
"""Results: elements of the input, and their places."""
INDEX_ONLY = {"argmax", "argmin", "argsort"}


def _rule(names: str) -> Callable[[Callable[[Call], Range]], Callable[[Call], Range]]:
    def register(function: Callable[[Call], Range]) -> Callable[[Call], Range]:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


@_rule(
    "clone to_copy contiguous alias lift_fresh lift_fresh_copy index index_select gather take flip roll repeat amax "
    "amin repeat_interleave unfold expand_copy view_copy slice_copy select_copy squeeze_copy unsqueeze_copy"
)
def _same(call: Call) -> Range:
    integers = [t for t in call.inputs[:1] if not t.dtype.is_floating_point]
    return range_of(integers[0]) if integers else INT32


@_rule("copy")
def _copied(call: Call) -> Range:
    return call.range(1) if not call.args[1].dtype.is_floating_point else INT32


@_rule("cat stack")
def _joined(call: Call) -> Range:
    return union(*map(range_of, call.args[0]))


@_rule("where")
def _where(call: Call) -> Range:
    return union(call.range(1), call.range(2))


_FILLED_BY = {"masked_fill": 2, "masked_scatter": 2, "index_put": 2, "scatter": 3, "index_fill": 3, "slice_scatter": 1}
"""Which argument holds what is put into a copy of the first one."""


@_rule(" ".join(_FILLED_BY))
def _filled(call: Call) -> Range:
    if call.name == "index_put" and call.get(3, "accumulate"):
        count = math.prod(torch.broadcast_shapes(*(i.shape for i in call.args[1] if i is not None)))
        return _add(call.range(0), union((0, 0), _repeated(call.range(2), count)))
    if "reduce" in call.kwargs:
        add = call.kwargs["reduce"] == "add" and isinstance(call.args[3], BridgeTensor)
        return _added_into(call) if add else INT32
    return union(call.range(0), call.range(_FILLED_BY[call.name]))


@_rule("tril triu constant_pad_nd")
def _padded(call: Call) -> Range:
    return union(call.range(0), range_of(call.get(2, "value", 0)) if call.name == "constant_pad_nd" else (0, 0))


@_rule("fill full full_like new_full scalar_tensor")
def _full(call: Call) -> Range:
    numbers = [v for v in call.args if type(v) in (int, float, bool)]
    tensors = [t for t in call.inputs[1:] if t.dim() == 0]
    return union(*map(range_of, numbers or tensors)) if numbers or tensors else INT32


@_rule("zeros zeros_like new_zeros empty empty_like new_empty ones ones_like new_ones eye sign sgn")
def _small(call: Call) -> Range:
    return (-1, 1)


@_rule("arange")
def _arange(call: Call) -> Range:
    numbers = [v for v in call.args if isinstance(v, (int, float))]
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return math.floor(min(low, high)), math.ceil(max(low, high))


@_rule("count_nonzero bincount histc")
def _counted(call: Call) -> Range:
    return 0, call.args[0].numel()


@_rule("randint")
def _drawn(call: Call) -> Range:
    numbers = [v for v in call.args if isinstance(v, int)]
    return (0, numbers[0] - 1) if len(numbers) == 1 else (numbers[0], numbers[1] - 1)


@_rule("randint_like")
def _drawn_like(call: Call) -> Range:
    numbers = [v for v in call.args[1:] if isinstance(v, int)]
    return (0, numbers[0] - 1) if len(numbers) == 1 else (numbers[0], numbers[1] - 1)


@_rule("randperm multinomial nonzero_static searchsorted bucketize")
def _places(call: Call) -> Range:
    sizes = [n for v in call.args for n in (v.shape if isinstance(v, BridgeTensor) else [v]) if isinstance(n, int)]
    return 0, max([1, *sizes])


@_rule("minimum fmin")
def _minimum(call: Call) -> Range:
    (a, b), (c, d) = call.range(0), call.range(1)
    return min(a, c), min(b, d)


@_rule("maximum fmax")
def _maximum(call: Call) -> Range:
    (a, b), (c, d) = call.range(0), call.range(1)
    return max(a, c), max(b, d)


@_rule("clamp clip clamp_min")
def _clamped(call: Call) -> Range:
    low, high = call.range(0)
    least, most = call.get(1, "min"), call.get(2, "max")
    if least is not None:
        low, high = max(low, range_of(least)[0]), max(high, range_of(least)[1])
    if most is not None:
        low, high = min(low, range_of(most)[0]), min(high, range_of(most)[1])
    return low, high


@_rule("clamp_max")
def _clamped_above(call: Call) -> Range:
    return _minimum(call)


@_rule("add")
def _sum_of_two(call: Call) -> Range:
    return _add(call.range(0), _times(call.range(1), range_of(call.get(2, "alpha", 1))))


@_rule("sub")
def _difference_of_two(call: Call) -> Range:
    return _add(call.range(0), _times(call.range(1), _negative(range_of(call.get(2, "alpha", 1)))))


@_rule("rsub")
def _difference_from(call: Call) -> Range:
    return _add(call.range(1), _times(call.range(0), _negative(range_of(call.get(2, "alpha", 1)))))


@_rule("neg")
def _negated(call: Call) -> Range:
    return _negative(call.range(0))


@_rule("abs")
def _absolute(call: Call) -> Range:
    low, high = call.range(0)
    return max(0, low, -high), max(abs(low), abs(high))


@_rule("mul")
def _product(call: Call) -> Range:
    return _times(call.range(0), call.range(1))


@_rule("lcm")
def _common_multiple(call: Call) -> Range:
    return 0, math.prod(max(map(abs, call.range(i))) for i in (0, 1))


@_rule("scatter_reduce index_reduce")
def _reduced_into(call: Call) -> Range:
    both = union(call.range(0), call.range(3))
    reduce = (*call.args[4:5], call.kwargs.get("reduce"))
    if "prod" in reduce:
        return _to_the(both, (64, 64))
    return _added_into(call) if "sum" in reduce else both


@_rule("square")
def _squared(call: Call) -> Range:
    return _times(call.range(0), call.range(0))


@_rule("addcmul")
def _product_added(call: Call) -> Range:
    product = _times(_times(call.range(1), call.range(2)), range_of(call.kwargs.get("value", 1)))
    return _add(call.range(0), product)


@_rule("mm bmm dot mv matmul linear")
def _contracted(call: Call) -> Range:
    return _repeated(_times(call.range(0), call.range(1)), call.args[0].shape[-1])


@_rule("addmm baddbmm addmv addbmm")
def _contracted_and_added(call: Call) -> Range:
    scale = range_of(call.kwargs.get("alpha", 1))
    count = call.args[1].shape[-1] * (call.args[1].shape[0] if call.name == "addbmm" else 1)
    product = _times(_repeated(_times(call.range(1), call.range(2)), count), scale)
    return _add(_times(call.range(0), range_of(call.kwargs.get("beta", 1))), product)


@_rule("pow")
def _power(call: Call) -> Range:
    return _to_the(call.range(0), call.range(1))


@_rule("lshift bitwise_left_shift")
def _shifted_left(call: Call) -> Range:
    return _times(call.range(0), _to_the((2, 2), call.range(1)))


@_rule("rshift bitwise_right_shift")
def _shifted_right(call: Call) -> Range:
    low, high = call.range(0)
    least, most = (min(max(k, 0), 64) for k in call.range(1))
    return min(low >> least, low >> most), max(high >> least, high >> most)


@_rule("prod cumprod")
def _multiplied(call: Call) -> Range:
    count = call.count if call.out.numel() < call.args[0].numel() else max([1, *call.args[0].shape])
    return union(call.range(0), _to_the(call.range(0), (count, count)))


@_rule("index_add scatter_add")
def _added_into(call: Call) -> Range:
    """As many terms for one place as the index has along the dimension."""
    index = call.args[2]
    count = index.shape[call.args[1]] if index.dim() else 1
    terms = _times(call.range(3), range_of(call.kwargs.get("alpha", 1)))
    return _add(call.range(0), union((0, 0), _repeated(terms, count)))


@_rule("sum")
def _added(call: Call) -> Range:
    return _repeated(call.range(0), call.count)


@_rule("cumsum")
def _running_sum(call: Call) -> Range:
    return union(call.range(0), _repeated(call.range(0), max([1, *call.args[0].shape])))


@_rule("remainder")
def _remainder(call: Call) -> Range:
    (low, high), (least, most) = call.range(0), call.range(1)
    if least > 0:
        return 0, min(most - 1, high) if low >= 0 else most - 1
    size = max(abs(least), abs(most), 1) - 1
    return -size, size


@_rule("fmod")
def _remainder_with_sign(call: Call) -> Range:
    size = max(map(abs, call.range(1))) - 1
    low, high = call.range(0)
    return max(low, -size) if low < 0 else 0, min(high, size) if high > 0 else 0


@_rule("floor_divide div")
def _quotient(call: Call) -> Range:
    (low, high), (least, most) = call.range(0), call.range(1)
    if least > 0:
        ends = [q for a in (low, high) for b in (least, most) for q in (a // b, -(-a // b))]
        return min(ends), max(ends)
    size = max(abs(low), abs(high))
    return max(-size, INT32[0]), min(size, INT32[1])


@_rule("bitwise_and and")
def _both_bits(call: Call) -> Range:
    tops = [r[1] for r in (call.range(0), call.range(1)) if r[0] >= 0]
    return (0, min(tops)) if tops else INT32


@_rule("bitwise_or bitwise_xor or xor")
def _either_bits(call: Call) -> Range:
    (a, b), (c, d) = call.range(0), call.range(1)
    return (0, 2 ** max(b, d).bit_length() - 1) if min(a, c) >= 0 else INT32


@_rule("bitwise_not")
def _no_bits(call: Call) -> Range:
    low, high = call.range(0)
    return -high - 1, -low - 1


def _add(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def _negative(a: Range) -> Range:
    return -a[1], -a[0]


def _times(a: Range, b: Range) -> Range:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _repeated(a: Range, count: int) -> Range:
    return a[0] * count, a[1] * count


def _to_the(base: Range, exponent: Range) -> Range:
    size, times = max(map(abs, base)), max(exponent[1], 0)
    if size > 1 and times * math.log2(size) > 199:
        return _HUGE
    top = size**times if size > 1 else 1
    return (0 if base[0] >= 0 else -top), max(top, 1)
