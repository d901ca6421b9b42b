"""Traced programs as expressions of their inputs, so that two that compute the same are recognised."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from bridge._compat.jax import Tracer

_MOVES = frozenset({"broadcast_in_dim", "concatenate", "reshape", "rev", "slice", "squeeze", "transpose"})
"""Primitives that only move elements."""


class Expressions:
    """Numbers expressions, equal ones alike, whatever the order in which a program computes them.

    A part of a constant is a constant, too: whether PyTorch or the program took it makes no difference.
    """

    def __init__(self):
        self._numbers: dict[Hashable, int] = {}
        self._constants: dict[int, Any] = {}
        self._inputs: dict[int, frozenset[int]] = {}

    def of(self, function: Callable[..., Any], *arguments: Any) -> list[int]:
        """The expressions of the results, in terms of the arrays among the arguments."""
        closed = jax.make_jaxpr(function)(*arguments)
        known: dict[Any, int] = {}
        for i, variable in enumerate(closed.jaxpr.invars):
            known[variable] = self._number(("input", i), [], {i})
        for variable, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            known[variable] = self._constant(constant)

        def number(atom: Any) -> int:
            if isinstance(atom, Literal):
                return self._number(("literal", str(atom.aval), comparable(atom.val)), [])
            return known[atom]

        for equation in closed.jaxpr.eqns:
            operands = [*map(number, equation.invars)]
            if equation.primitive.name in _MOVES and all(n in self._constants for n in operands):
                with jax.ensure_compile_time_eval():
                    moved = equation.primitive.bind(*(self._constants[n] for n in operands), **equation.params)
                known[equation.outvars[0]] = self._constant(moved)
                continue
            params = [(name, _text(value)) for name, value in sorted(equation.params.items())]
            for i, out in enumerate(equation.outvars):
                key = equation.primitive.name, tuple(params), tuple(operands), i
                known[out] = self._number(key, operands)
        return [*map(number, closed.jaxpr.outvars)]

    def inputs(self, expressions: Iterable[int]) -> frozenset[int]:
        """The places of the inputs that the expressions depend on."""
        return frozenset().union(*(self._inputs[n] for n in expressions))

    def _constant(self, value: Any) -> int:
        number = self._number(("constant", comparable(value)), [])
        if not isinstance(value, Tracer):
            self._constants[number] = value
        return number

    def _number(self, key: Hashable, operands: list[int], inputs: Iterable[int] = ()) -> int:
        number = self._numbers.setdefault(key, len(self._numbers))
        self._inputs[number] = frozenset(inputs) | self.inputs(operands)
        return number


def _text(value: Any) -> Hashable:
    """A parameter of an operation, without addresses in memory but with the constants of a program in it."""
    constants = [comparable(c) for c in getattr(value, "consts", ())]
    return re.sub(r"0x[0-9a-f]+", "", str(value)), tuple(constants)


def comparable(constant: Any) -> Any:
    if isinstance(constant, Tracer):
        return id(constant)
    if jnp.issubdtype(getattr(constant, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # under `jit`, too
            constant = jax.random.key_data(constant)
    array = np.asarray(constant)
    return array.shape, str(array.dtype), array.tobytes()
