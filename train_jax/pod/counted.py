"""Counts the FLOPs of matrix products in a JAX program, before the compiler changes it."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend import core


def product_flops(jaxpr: core.Jaxpr) -> float:
    """Returns the FLOPs of every matrix product and convolution, two for a multiplication and addition.

    Loops count as often as they run. A `while`, whose length is not known, counts once, as the longest branch of a
    `cond` does.
    """
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracting)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[outputs]
    parts = [product_flops(inner) for value in params.values() for inner in _programs(value)]
    if name == "cond":
        return max(parts, default=0.0)
    return sum(parts) * (params["length"] if name == "scan" else 1)


def _programs(value: Any) -> list[core.Jaxpr]:
    leaves = jax.tree.leaves(value, is_leaf=lambda each: isinstance(each, core.Jaxpr | core.ClosedJaxpr))
    return [
        each.jaxpr if isinstance(each, core.ClosedJaxpr) else each
        for each in leaves
        if isinstance(each, core.Jaxpr | core.ClosedJaxpr)
    ]
