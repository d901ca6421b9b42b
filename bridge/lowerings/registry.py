"""The tables in which lowerings register themselves, and functions of arrays that JAX traces once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge._compat.jax import INLINED, Tracer

LOWERINGS: dict[Any, Callable] = {}
"""ATen op -> function of arrays. Shape and dtype of the result are PyTorch's: the dispatcher casts."""

DECOMPOSITIONS: dict[Any, Callable] = {}
"""ATen op -> the same in simpler torch operations, where PyTorch's own op hides an in-place write."""

BY_LAYOUT: dict[Any, Callable] = {}
"""ATen op -> a function of its tensors that returns further keyword arguments of the lowering, by strides."""

METAS: dict[Any, Callable] = {}
"""ATen op -> its result on the meta device, where PyTorch's own result depends on the kernel it picks."""

FUNCTIONS: dict[Any, Any] = {}
"""Python-level functions handled before PyTorch decomposes them -> the op whose lowering serves them."""


def lowers(*ops: Any) -> Callable[[Callable], Callable]:
    """Enters the decorated function, of arrays, as the lowering of these ATen ops."""

    def enter(function: Callable) -> Callable:
        LOWERINGS.update(dict.fromkeys(ops, function))
        return function

    return enter


def decomposes(*ops: Any) -> Callable[[Callable], Callable]:
    """Enters the decorated function, written in operations of PyTorch, as the decomposition of these ATen ops."""

    def enter(function: Callable) -> Callable:
        DECOMPOSITIONS.update(dict.fromkeys(ops, function))
        return function

    return enter


def widened(x: jax.Array) -> jax.Array:
    """Returns at least float32, in which PyTorch computes internally, whatever the dtype of the arguments."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def is_known(number: Any, value: float) -> bool:
    """True if a number is known to be this one; nothing is known of a traced one."""
    return not isinstance(number, jax.Array) and number == value


def is_number(x: Any) -> bool:
    """True for a number of Python's or a traced one, which does not decide the dtype of a result."""
    return isinstance(x, (int, float)) or (isinstance(x, jax.Array) and not x.ndim and x.weak_type)  # pyright: ignore


_KEPT = 1024
"""The number of traces of a function that are kept, so that numbers that change from call to call do not add up."""
_ARRAY = (jax.Array, jax.Array)
"""A placeholder for an array in the key of a trace, where other arguments have their type and value."""
_flatten = jax.tree_util.default_registry.flatten


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, whose operations are copied into the trace from the first call with such arguments.

    JAX spends 0.03 ms on an operation that it traces and 0.4 ms on one that it also differentiates. With
    `jax.jit(inline=True)` it does both once for all layers of a model, and the program stays the same.

    `function` may depend on shapes, dtypes and Python values of its arguments, but not on numbers in arrays, and not
    on whether an argument carries a tangent.
    """

    @functools.lru_cache(_KEPT)
    def staged(tree: Any, *key: tuple[type, Any]) -> Callable[..., Any]:
        def run(*arrays: jax.Array) -> Any:
            rest = iter(arrays)
            values = (float(value) if kind is float else value for kind, value in key)
            leaves = [next(rest) if value is jax.Array else value for value in values]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return function(*args, **kwargs)

        run.__name__ = function.__name__.lstrip("_")
        return jax.jit(run, inline=INLINED)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = _flatten((args, kwargs))
        arrays = []
        key = []
        traced = False
        for leaf in leaves:
            kind = type(leaf)
            if isinstance(leaf, (jax.Array, np.ndarray)):
                arrays.append(leaf)
                key.append(_ARRAY)
                traced = traced or isinstance(leaf, Tracer)
            else:  # zeros of different signs are different arguments, and so are 1, 1.0 and True
                key.append((kind, repr(leaf) if kind is float else leaf))
        if traced:
            return staged(tree, *key)(*arrays)
        return function(*args, **kwargs)

    return call


def of_widened(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function of arrays that computes in float32 at least; the dispatcher rounds to PyTorch's dtype."""

    @inlined
    @functools.wraps(function)
    def lowering(*arguments: Any) -> jax.Array:
        return function(*(widened(jnp.asarray(a)) for a in arguments))

    return lowering


@inlined
def cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype)
