"""The tables that lowerings enter themselves into; what each table means is said beside it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LOWERINGS: dict[Any, Callable] = {}
"""ATen op -> function of arrays. Shape and dtype of the result are PyTorch's: the dispatcher casts."""

DECOMPOSITIONS: dict[Any, Callable] = {}
"""ATen op -> the same in simpler torch operations, where PyTorch's own op hides an in-place write."""

BY_LAYOUT: dict[Any, Callable] = {}
"""ATen op -> a function of its tensors that gives more keyword arguments of its lowering, which depend on strides."""

METAS: dict[Any, Callable] = {}
"""ATen op -> its result on the meta device, where PyTorch's answer depends on the kernel it picks."""

FUNCTIONS: dict[Any, Any] = {}
"""Python-level functions taken whole, before PyTorch breaks them up, and the op whose lowering serves them."""


def lowers(*ops: Any) -> Callable[[Callable], Callable]:
    """Enter the decorated function as the lowering of these ops."""

    def register(function: Callable) -> Callable:
        LOWERINGS.update(dict.fromkeys(ops, function))
        return function

    return register


def decomposes(*ops: Any) -> Callable[[Callable], Callable]:
    """Enter the decorated function, written in torch operations, as what these ops are made of."""

    def register(function: Callable) -> Callable:
        DECOMPOSITIONS.update(dict.fromkeys(ops, function))
        return function

    return register


def widened(x: jax.Array) -> jax.Array:
    """At least float32: what PyTorch computes in inside, whatever the dtype it is given."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def of_widened(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The decorated function of arrays, taken in float32 at least; the dispatcher rounds to PyTorch's dtype."""

    @functools.wraps(function)
    def lowering(*arguments: Any) -> jax.Array:
        return function(*(widened(jnp.asarray(a)) for a in arguments))

    return lowering
