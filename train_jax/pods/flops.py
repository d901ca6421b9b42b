"""The FLOPs of the matrix products in the JAX program of a train step, before the compiler changes it."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core

from train_jax.pods.yardsticks import module_of


@dataclasses.dataclass(frozen=True)
class Products:
    """FLOPs of the matrix products of a train step on one device, two for a multiplication and addition."""

    by_name: Mapping[str, float]
    """FLOPs by the scopes and transformations around, such as `jit(step)/transpose(jvp([Net]))/layers.0[Block]`."""

    @cached_property
    def total(self) -> float:
        return self._sum(lambda name: True)

    @cached_property
    def recomputed(self) -> float:
        """FLOPs of the forward pass that the backward pass computes again."""
        return self._sum(lambda name: "rematted_computation" in name)

    @cached_property
    def outside(self) -> float:
        """FLOPs outside of the PyTorch module and its gradient, such as Newton-Schulz iterations of Muon."""
        return self._sum(lambda name: not module_of(name).name and "jvp(" not in name)

    @property
    def of_model(self) -> float:
        """FLOPs of one forward and one backward pass of the module."""
        return self.total - self.recomputed - self.outside

    def _sum(self, counts: Callable[[str], bool]) -> float:
        return sum(flops for name, flops in self.by_name.items() if counts(name))


def products(program: core.ClosedJaxpr) -> Products:
    """Counts the FLOPs of every matrix product and convolution; by module if it was exported with `name_scopes`.

    Loops count as often as they run. A `while`, whose length is not known, counts once, as the longest branch of a
    `cond` does. A Pallas kernel counts for its whole grid, but for the blocks that splash attention skips, unless
    `jax.checkpoint` hides which these are.
    """
    return Products(_by_name(program, [], ""))


def _by_name(program: core.ClosedJaxpr, arguments: list[Any], scope: str) -> dict[str, float]:
    """Returns the FLOPs by the scopes and transformations around each product, after those in `scope`.

    `arguments`: the values of the inputs that are constants, None for others.
    """
    flops = defaultdict[str, float](float)
    known = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    known |= {v: value for v, value in zip(program.jaxpr.invars, arguments, strict=False) if value is not None}
    for equation in program.jaxpr.eqns:
        name = equation.primitive.name
        params = equation.params
        inside = f"{scope}/{equation.source_info.name_stack}"
        if name in _PRODUCTS:
            flops[inside] += _PRODUCTS[name](equation)
            continue
        given = [None if isinstance(v, core.Literal) else known.get(v) for v in equation.invars]
        parts = []
        for inner in (each for value in params.values() for each in _programs(value)):
            passes_on = name not in ("scan", "while") and len(inner.jaxpr.invars) == len(given)
            parts.append(_by_name(inner, given if passes_on else [], inside))
        if name == "cond":
            parts = sorted(parts, key=lambda part: sum(part.values()))[-1:]
        times = _times(name, params) * _computed_share(name, params, given)
        for part in parts:
            for each, count in part.items():
                flops[each] += count * times
    return flops


def _times(name: str, params: Mapping[str, Any]) -> int:
    """Returns how often an equation runs the programs inside it."""
    if name == "scan":
        return params["length"]
    return math.prod(params["grid_mapping"].grid) if name == "pallas_call" else 1


def _computed_share(name: str, params: Mapping[str, Any], arguments: list[Any]) -> float:
    """Returns the share of a kernel's blocks that it computes: splash attention has a number for each, 0 to skip it."""
    if name != "pallas_call" or not str(params.get("name")).startswith("splash") or len(arguments) < 2:
        return 1
    blocks = arguments[1] if params["grid_mapping"].num_index_operands >= 2 else None
    return 1 if blocks is None or isinstance(blocks, Tracer) else np.count_nonzero(blocks) / blocks.size


def _of_dot(equation: Any) -> float:
    (contracting, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracting)


def _of_convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    outputs = equation.params["dimension_numbers"].rhs_spec[0]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[outputs]


def _of_attention(equation: Any, count: int) -> float:
    """Returns the FLOPs of the products in fused attention of cuDNN, with every score that a mask removes."""
    query, key = (variable.aval.shape for variable in equation.invars[:2])
    batch, length, heads, width = query  # `jax.nn.dot_product_attention` has this layout
    return 2.0 * count * batch * heads * length * key[1] * width


_PRODUCTS = {
    "dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
    "dot_product_attention_fwd_wrapper": lambda equation: _of_attention(equation, 2),
    "dot_product_attention_bwd_wrapper": lambda equation: _of_attention(equation, 5),  # one for the scores, again
}


def _programs(value: Any) -> list[core.ClosedJaxpr]:
    leaves = jax.tree.leaves(value, is_leaf=lambda each: isinstance(each, core.Jaxpr | core.ClosedJaxpr))
    return [
        each if isinstance(each, core.ClosedJaxpr) else core.ClosedJaxpr(each, [None] * len(each.constvars))
        for each in leaves
        if isinstance(each, core.Jaxpr | core.ClosedJaxpr)
    ]
