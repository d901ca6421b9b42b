"""The range of an integer operation's result: results that hold integers of the arguments, or new ones.

`RULES` has the operations that models make index arithmetic of; any other result may be whatever 32 bits hold. Those
that compute new integers from old ones are in `integer_arithmetic.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from bridge.integer_ranges import INT32, Range, add, range_of, repeated, times, to_the, union
from bridge.tensors import BridgeTensor


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

    @property
    def size(self) -> int:
        """Of the dimension along which the operation acts, at least 1; the number of all elements if it names none."""
        return size_along(self.args[0], self.get(1, "dim"))


def size_along(x: torch.Tensor, dim: Any) -> int:
    return max(1, x.shape[dim] if isinstance(dim, int) and x.dim() else x.numel())


RULES: dict[str, Callable[[Call], Range]] = {}
"""Name of the ATen operation, without overload and trailing underscore -> range of the result."""

PRODUCTS = {
    *("mul", "square", "pow", "prod", "cumprod", "lshift", "bitwise_left_shift", "addcmul"),
    *("mm", "bmm", "addmm", "baddbmm", "addmv", "addbmm", "linear", "dot", "mv", "matmul"),
    *("lcm", "scatter_reduce", "index_reduce"),
}
"""Refused also where nothing is known of the operands."""
PICKS = {"max", "min", "topk", "sort", "kthvalue", "mode", "cummax", "cummin", "argmax", "argmin", "argsort"}
"""Results: elements of the input, and their places."""
INDEX_ONLY = {"argmax", "argmin", "argsort"}


def rule(names: str) -> Callable[[Callable[[Call], Range]], Callable[[Call], Range]]:
    def register(function: Callable[[Call], Range]) -> Callable[[Call], Range]:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


@rule(
    "clone to_copy contiguous alias lift_fresh lift_fresh_copy index index_select gather take flip roll repeat amax "
    "amin repeat_interleave unfold unsafe_view unsafe_index pixel_shuffle pixel_unshuffle channel_shuffle rot90 "
    "permute_copy transpose_copy t_copy diagonal_copy expand_copy view_copy slice_copy select_copy squeeze_copy "
    "unsqueeze_copy"
)
def _same(call: Call) -> Range:
    return range_of(call.inputs[0]) if call.inputs else INT32


@rule("copy")
def _copied(call: Call) -> Range:
    return call.range(1)


@rule("cat stack")
def _joined(call: Call) -> Range:
    return union(*map(range_of, call.args[0]))


@rule("where")
def _where(call: Call) -> Range:
    return union(call.range(1), call.range(2))


_FILLED_BY = {"masked_fill": 2, "masked_scatter": 2, "index_put": 2, "scatter": 3, "index_fill": 3, "slice_scatter": 1}
"""Which argument holds what is put into a copy of the first one."""


@rule(" ".join(_FILLED_BY))
def _filled(call: Call) -> Range:
    if call.name == "index_put" and call.get(3, "accumulate"):
        count = math.prod(torch.broadcast_shapes(*(i.shape for i in call.args[1] if i is not None)))
        return add(call.range(0), union((0, 0), repeated(call.range(2), count)))
    if "reduce" in call.kwargs:
        sums = call.kwargs["reduce"] == "add" and isinstance(call.args[3], BridgeTensor)
        return _added_into(call) if sums else INT32
    return union(call.range(0), call.range(_FILLED_BY[call.name]))


@rule("scatter_reduce index_reduce")
def _reduced_into(call: Call) -> Range:
    both = union(call.range(0), call.range(3))
    reduce = (*call.args[4:5], call.kwargs.get("reduce"))
    if "prod" in reduce:
        return to_the(both, (64, 64))
    return _added_into(call) if "sum" in reduce else both


@rule("index_add scatter_add")
def _added_into(call: Call) -> Range:
    """As many terms for one place as the index has along the dimension; that of `index_add` has only one."""
    index = call.args[2]
    count = index.numel() if index.dim() < 2 else index.shape[call.args[1]]
    terms = times(call.range(3), range_of(call.kwargs.get("alpha", 1)))
    return add(call.range(0), union((0, 0), repeated(terms, count)))


@rule("tril triu constant_pad_nd")
def _padded(call: Call) -> Range:
    return union(call.range(0), range_of(call.get(2, "value", 0)) if call.name == "constant_pad_nd" else (0, 0))


@rule("fill full full_like new_full scalar_tensor")
def _full(call: Call) -> Range:
    numbers = [v for v in call.args if type(v) in (int, float, bool)]
    tensors = [t for t in call.inputs[1:] if t.dim() == 0]
    return union(*map(range_of, numbers or tensors)) if numbers or tensors else INT32


@rule("zeros zeros_like new_zeros empty empty_like new_empty ones ones_like new_ones eye sign sgn")
def _small(call: Call) -> Range:
    return (-1, 1)


@rule("arange")
def _arange(call: Call) -> Range:
    numbers = [v for v in call.args if isinstance(v, (int, float))]
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return math.floor(min(low, high)), math.ceil(max(low, high))


@rule("count_nonzero bincount histc")
def _counted(call: Call) -> Range:
    return 0, call.args[0].numel()


@rule("randint")
def _drawn(call: Call) -> Range:
    numbers = [v for v in call.args if isinstance(v, int)]
    return (0, numbers[0] - 1) if len(numbers) == 1 else (numbers[0], numbers[1] - 1)


@rule("randint_like")
def _drawn_like(call: Call) -> Range:
    numbers = [v for v in call.args[1:] if isinstance(v, int)]
    return (0, numbers[0] - 1) if len(numbers) == 1 else (numbers[0], numbers[1] - 1)


@rule("randperm multinomial nonzero_static searchsorted bucketize")
def _places(call: Call) -> Range:
    sizes = [n for v in call.args for n in (v.shape if isinstance(v, BridgeTensor) else [v]) if isinstance(n, int)]
    return 0, max([1, *sizes])
