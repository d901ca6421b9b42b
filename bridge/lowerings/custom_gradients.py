"""Functions of arrays whose derivative is written down, because PyTorch's choice is not what JAX derives."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from bridge.lowerings.cache import inlined

Derivative = Callable[..., jax.Array]
"""(tangent, result, *arguments) -> what the tangent of one argument adds to that of the result; linear in it."""


def converted(argument: Any, dtype: np.dtype) -> jax.Array:
    """A Python integer beside integers of few bits wraps, as in PyTorch."""
    wraps = isinstance(argument, int) and jnp.issubdtype(dtype, jnp.integer)
    return jnp.asarray(np.asarray(argument).astype(dtype) if wraps else argument, dtype)


def with_derivatives(*derivatives: Derivative) -> Callable[[Callable], Callable[..., jax.Array]]:
    """Give the decorated function of elements these derivatives, one for each argument.

    Arguments are brought to one shape and dtype. Derivatives of constants are not computed. The derivatives are
    differentiated in turn, so a second derivative is that of PyTorch's formula, too.
    """

    def decorate(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        rule = jax.custom_jvp(function)

        def jvp(primals, tangents):
            out = rule(*primals)
            parts = [
                derivative(tangent, out, *primals)
                for derivative, tangent in zip(derivatives, tangents, strict=True)
                if not isinstance(tangent, SymbolicZero)
            ]
            return out, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(out)

        rule.defjvp(jvp, symbolic_zeros=True)

        @inlined
        @functools.wraps(function)
        def lowering(*arguments: Any) -> jax.Array:
            dtype = jnp.result_type(*arguments)
            arrays = jnp.broadcast_arrays(*(converted(a, dtype) for a in arguments))
            return rule(*arrays) if jnp.issubdtype(dtype, jnp.floating) else function(*arrays)

        return lowering

    return decorate
