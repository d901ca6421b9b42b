"""The range of an integer operation's result: sums, products, quotients, bits and limits."""

from __future__ import annotations

import math

from bridge.integer_ranges import INT32, Range, add, negative, range_of, repeated, times, to_the, union
from bridge.integer_rules import Call, rule


@rule("minimum fmin")
def _minimum(call: Call) -> Range:
    (a, b), (c, d) = call.range(0), call.range(1)
    return min(a, c), min(b, d)


@rule("maximum fmax")
def _maximum(call: Call) -> Range:
    (a, b), (c, d) = call.range(0), call.range(1)
    return max(a, c), max(b, d)


@rule("clamp clip clamp_min")
def _clamped(call: Call) -> Range:
    low, high = call.range(0)
    least, most = call.get(1, "min"), call.get(2, "max")
    if least is not None:
        low, high = max(low, range_of(least)[0]), max(high, range_of(least)[1])
    if most is not None:
        low, high = min(low, range_of(most)[0]), min(high, range_of(most)[1])
    return low, high


@rule("clamp_max")
def _clamped_above(call: Call) -> Range:
    return _minimum(call)


@rule("add")
def _sum_of_two(call: Call) -> Range:
    return add(call.range(0), times(call.range(1), range_of(call.get(2, "alpha", 1))))


@rule("sub")
def _difference_of_two(call: Call) -> Range:
    return add(call.range(0), times(call.range(1), negative(range_of(call.get(2, "alpha", 1)))))


@rule("rsub")
def _difference_from(call: Call) -> Range:
    return add(call.range(1), times(call.range(0), negative(range_of(call.get(2, "alpha", 1)))))


@rule("neg")
def _negated(call: Call) -> Range:
    return negative(call.range(0))


@rule("abs")
def _absolute(call: Call) -> Range:
    low, high = call.range(0)
    return max(0, low, -high), max(abs(low), abs(high))


@rule("mul")
def _product(call: Call) -> Range:
    return times(call.range(0), call.range(1))


@rule("lcm")
def _common_multiple(call: Call) -> Range:
    return 0, math.prod(max(map(abs, call.range(i))) for i in (0, 1))


@rule("square")
def _squared(call: Call) -> Range:
    return times(call.range(0), call.range(0))


@rule("addcmul")
def _product_added(call: Call) -> Range:
    product = times(times(call.range(1), call.range(2)), range_of(call.kwargs.get("value", 1)))
    return add(call.range(0), product)


@rule("mm bmm dot mv matmul linear")
def _contracted(call: Call) -> Range:
    return repeated(times(call.range(0), call.range(1)), call.args[0].shape[-1])


@rule("addmm baddbmm addmv addbmm")
def _contracted_and_added(call: Call) -> Range:
    scale = range_of(call.kwargs.get("alpha", 1))
    count = call.args[1].shape[-1] * (call.args[1].shape[0] if call.name == "addbmm" else 1)
    product = times(repeated(times(call.range(1), call.range(2)), count), scale)
    return add(times(call.range(0), range_of(call.kwargs.get("beta", 1))), product)


@rule("pow")
def _power(call: Call) -> Range:
    return to_the(call.range(0), call.range(1))


@rule("lshift bitwise_left_shift")
def _shifted_left(call: Call) -> Range:
    return times(call.range(0), to_the((2, 2), call.range(1)))


@rule("rshift bitwise_right_shift")
def _shifted_right(call: Call) -> Range:
    low, high = call.range(0)
    least, most = (min(max(k, 0), 64) for k in call.range(1))
    return min(low >> least, low >> most), max(high >> least, high >> most)


@rule("prod cumprod")
def _multiplied(call: Call) -> Range:
    count = call.count if call.out.numel() < call.args[0].numel() else call.size
    return union(call.range(0), to_the(call.range(0), (count, count)))


@rule("sum")
def _added(call: Call) -> Range:
    return repeated(call.range(0), call.count)


@rule("cumsum")
def _running_sum(call: Call) -> Range:
    return union(call.range(0), repeated(call.range(0), call.size))


@rule("remainder")
def _remainder(call: Call) -> Range:
    (low, high), (least, most) = call.range(0), call.range(1)
    if least > 0:
        return 0, min(most - 1, high) if low >= 0 else most - 1
    size = max(abs(least), abs(most), 1) - 1
    return -size, size


@rule("fmod")
def _remainder_with_sign(call: Call) -> Range:
    size = max(map(abs, call.range(1))) - 1
    low, high = call.range(0)
    return max(low, -size) if low < 0 else 0, min(high, size) if high > 0 else 0


@rule("floor_divide div")
def _quotient(call: Call) -> Range:
    (low, high), (least, most) = call.range(0), call.range(1)
    if least > 0:
        ends = [q for a in (low, high) for b in (least, most) for q in (a // b, -(-a // b))]
        return min(ends), max(ends)
    size = max(abs(low), abs(high))
    return max(-size, INT32[0]), min(size, INT32[1])


@rule("bitwise_and and")
def _both_bits(call: Call) -> Range:
    tops = [r[1] for r in (call.range(0), call.range(1)) if r[0] >= 0]
    return (0, min(tops)) if tops else INT32


@rule("bitwise_or bitwise_xor or xor")
def _either_bits(call: Call) -> Range:
    (a, b), (c, d) = call.range(0), call.range(1)
    return (0, 2 ** max(b, d).bit_length() - 1) if min(a, c) >= 0 else INT32


@rule("bitwise_not")
def _no_bits(call: Call) -> Range:
    low, high = call.range(0)
    return -high - 1, -low - 1
