"""Counts the FLOPs of matrix products in a JAX program, before the compiler changes it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from train_jax.pod.yardsticks import module_of

Names = Callable[[str], bool]
_RECOMPUTED = "rematted_computation"


@dataclasses.dataclass(frozen=True)
class Products:
    """FLOPs of the matrix products of a train step on one device, two for a multiplication and addition."""

    total: float
    recomputed: float = 0.0
    """Those of the forward pass that the backward pass computes again."""
    outside: float = 0.0
    """Those outside of the PyTorch module and its gradient, such as Newton-Schulz iterations of Muon."""

    @property
    def of_model(self) -> float:
        """Those of one forward and one backward pass of the module."""
        return self.total - self.recomputed - self.outside


def products(jaxpr: core.Jaxpr) -> Products:
    """Counts the products of a step whose module was exported with `name_scopes`."""
    return Products(
        product_flops(jaxpr),
        product_flops(jaxpr, lambda name: _RECOMPUTED in name),
        product_flops(jaxpr, lambda name: not module_of(name).name and "jvp(" not in name),
    )


def product_flops(jaxpr: core.Jaxpr, counts: Names = lambda name: True, scope: str = "") -> float:
    """Returns the FLOPs of every matrix product and convolution, two for a multiplication and addition.

    Loops count as often as they run. A `while`, whose length is not known, counts once, as the longest branch of a
    `cond` does. With `counts`, only products for whose name it is true: the scopes and transformations around it, such
    as `transpose(jvp(model))`, after those in `scope`.
    """
    return sum(_of_equation(equation, counts, scope) for equation in jaxpr.eqns)


def _of_equation(equation: Any, counts: Names, scope: str) -> float:
    name, params = equation.primitive.name, equation.params
    scope = f"{scope}/{equation.source_info.name_stack}"
    if name in _PRODUCTS:
        return _PRODUCTS[name](equation) if counts(scope) else 0.0
    parts = [product_flops(inner, counts, scope) for value in params.values() for inner in _programs(value)]
    if name == "cond":
        return max(parts, default=0.0)
    return sum(parts) * (params["length"] if name == "scan" else 1)


def _of_dot(equation: Any) -> float:
    (contracting, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracting)


def _of_convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    outputs = equation.params["dimension_numbers"].rhs_spec[0]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[outputs]


_PRODUCTS = {"dot_general": _of_dot, "conv_general_dilated": _of_convolution}


def _programs(value: Any) -> list[core.Jaxpr]:
    leaves = jax.tree.leaves(value, is_leaf=lambda each: isinstance(each, core.Jaxpr | core.ClosedJaxpr))
    return [
        each.jaxpr if isinstance(each, core.ClosedJaxpr) else each
        for each in leaves
        if isinstance(each, core.Jaxpr | core.ClosedJaxpr)
    ]
