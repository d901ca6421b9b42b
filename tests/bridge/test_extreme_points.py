"""Values and first to third derivatives of functions of elements at large and small numbers, beside PyTorch's.

Some of the derivatives are taken inside the call, by PyTorch's engine, and the others outside of it, by `jax.grad`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call
from special_points import BINARY, UNARY
from support.markers import slow_unless

import bridge

POINTS = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4])
ORDER = 3
FUNCTIONS = (
    UNARY
    | {"F.softplus 100": lambda x: torch.nn.functional.softplus(x, 100)}
    | {f"{name} of x": lambda x, f=f: f(x, torch.full_like(x, 0.7).detach()) for name, f in BINARY.items()}
    | {f"{name} by x": lambda x, f=f: f(torch.full_like(x, 0.7).detach(), x) for name, f in BINARY.items()}
)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-5}
DIFFERS = {
    "digamma": (lambda x: x <= 0, "PyTorch rounds pi beside the poles"),
    "lgamma": (lambda x: x <= 0, "its derivative is digamma"),
    "special.erfcx": (lambda x: x >= 100, "PyTorch's formula is a difference of numbers that are almost equal"),
}
"""Name -> the points that are not compared, and why."""
CASES = [(name, dtype) for dtype in TOLERANCES for name in FUNCTIONS]
FAST = {
    ("F.elu", torch.float32),
    ("F.selu", torch.float32),
    ("F.softplus 100", torch.float32),
    ("exp2", torch.bfloat16),
}


def derivatives(function, x, order):
    """Returns the value and the derivatives up to this order, as code in a module asks PyTorch's engine for them."""
    if not x.requires_grad:
        x.requires_grad_()
    results = [function(x)]
    for _ in range(order):
        last = results[-1]
        slope = (
            torch.autograd.grad(last.sum(), x, create_graph=True, allow_unused=True)[0] if last.requires_grad else None
        )
        results.append(torch.zeros_like(x) if slope is None else slope)
    return results


def in_pytorch(function, dtype):
    """Returns as many derivatives as PyTorch has."""
    for order in range(ORDER, -1, -1):
        try:
            results = derivatives(function, POINTS.to(dtype, copy=True), order)
            return [t.detach().double().numpy(force=True) for t in results]
        except (RuntimeError, NotImplementedError) as error:
            assert "not implemented" in str(error), error
    return []


def slope_and_known(function):
    """Returns the derivative of `function`, whose second result is a list; its own value is appended to that."""

    def total(x):
        value, known = function(x)
        return value.sum(), [*known, value]

    return jax.grad(total, has_aux=True)


EAGER = {"F.softplus 100"}
"""Functions with derivatives of the size 1e4 that cancel at a point, exactly only if XLA fuses nothing."""


def in_the_bridge(name, function, x, orders):
    """Returns, for each order, the derivative of this order taken in the call, and the next ones taken outside of it.

    All are one program: operations outside of `jit` would be compiled one by one.
    """

    def all_of(x):
        return [from_inside(function, x, inside, orders - 1 - inside) for inside in range(orders)]

    run = all_of if name in EAGER else jax.jit(all_of)
    return [[np.asarray(value, np.float64) for value in results] for results in run(x)]


def from_inside(function, x, inside, outside):
    """Returns derivative number `inside`, taken in the call, and the next ones up to `outside` more."""
    fn = bridge.export(Call(lambda x: derivatives(function, x, inside)[inside]))
    slope = lambda x: (fn({}, {}, x)[0], [])  # noqa: E731 (is replaced by its own derivative)
    for _ in range(outside):
        slope = slope_and_known(slope)
    last, known = slope(x)
    return [*known, last]


@pytest.mark.parametrize(
    "case",
    slow_unless(lambda case: case in FAST, CASES),
    ids=[f"{name} {dtype}" for name, dtype in CASES],
)
def test_derivatives(case):
    """Where PyTorch has rounded more than the tolerance, a distance to float64 of 8 times PyTorch's own is right."""
    name, dtype = case
    function = FUNCTIONS[name]
    tolerance = TOLERANCES[dtype]
    wanted = in_pytorch(function, dtype)
    exact = in_pytorch(function, torch.float64)
    differs, _ = DIFFERS.get(name, (lambda x: False, ""))
    compared = np.array([not differs(x) for x in POINTS.tolist()])
    x = jnp.asarray(POINTS.numpy(), str(dtype).removeprefix("torch."))
    for inside, results in enumerate(in_the_bridge(name, function, x, len(wanted))):
        for more, ours in enumerate(results):
            theirs = wanted[inside + more]
            true = exact[inside + more]
            with np.errstate(invalid="ignore"):
                allowed = tolerance * (0.05 + abs(theirs))
                right = (abs(ours - theirs) <= allowed) | (
                    abs(ours - true) <= np.maximum(allowed, 8 * abs(theirs - true))
                )
            wrong = compared & np.isfinite(theirs) & ~right
            where = f"{inside} inside, {more} outside, at {POINTS[wrong].tolist()}"
            assert not wrong.any(), f"{where}: {ours[wrong]}, PyTorch {theirs[wrong]}, float64 {true[wrong]}"
