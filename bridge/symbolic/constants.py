"""Values that code has to know while tracing: the inputs that are known, and the remedy for one that is traced."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridge._compat.jax import Tracer, depends_on
from bridge.context import CallState, current
from bridge.errors import BridgeError, named_failure
from bridge.tensor.pytrees import convert, is_array, named_inputs

_KNOWN_REMEDY = (
    "the input {names}, if it stays the same as the edges of a graph do, may be known while tracing: "
    '`known_inputs=r"{pattern}"` of `bridge.export` and `bridge.verify`, with the input outside of the arguments of '
    "`jax.jit`: `jax.jit(lambda p, x: fn(p, {{}}, x, edges))`"
)


def check_expression(known_inputs: str) -> None:
    """Raises `BridgeError` for an option that is no regular expression."""
    with named_failure(f"known_inputs is {known_inputs!r}, which is no regular expression"):
        re.compile(known_inputs)


def with_known(known_inputs: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns the inputs with NumPy arrays, whose values Python may read, for those that the expression names.

    Raises `BridgeError` for one that is traced.
    """
    known = {}
    for name, value in named_inputs(args, kwargs)[0].items():
        if not re.fullmatch(known_inputs, name) or not is_array(value):
            continue
        if isinstance(value, Tracer):
            raise BridgeError(
                f"the input {name} is traced, and known_inputs {known_inputs!r} names it; let the compiled function "
                "enclose it: `jax.jit(lambda p, x: fn(p, {}, x, edges))`"
            )
        known[id(value)] = np.asarray(value)
    return convert((args, kwargs), lambda value: known.get(id(value), value), objects=True)


def _pattern(names: list[str]) -> str:
    """Returns the expression that matches these names of inputs."""
    return "|".join(map(re.escape, names))


def _known_remedy(call: CallState, inputs: Mapping[str, Any], new: list[str]) -> str:
    """Returns the remedy for values of these inputs; its expression has those that are known already, too."""
    option = call.options.known_inputs
    known = [name for name in inputs if option and re.fullmatch(option, name)]
    return _KNOWN_REMEDY.format(names=" and ".join(new), pattern=_pattern([*known, *new]))


def as_constant(value: Any, otherwise: str) -> str:
    """Returns the remedy for code that has to know a value: `static=` if it is computed from buffers alone."""
    call = current()
    if call is None:
        return otherwise
    if not (buffers := depends_on(value, call.buffers)):
        inputs = named_inputs(*call.arguments)[0].items()
        whole = {name: v for name, v in inputs if is_array(v) and not jnp.issubdtype(v.dtype, jnp.inexact)}
        names = [name for name in depends_on(value, {**call.buffers, **whole}) or () if name in whole]
        if names:
            return f"{_known_remedy(call, dict(inputs), names)}; otherwise {otherwise}"
        return otherwise
    patterns = dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", name.replace(".", r"\.")) for name in buffers)  # all layers
    option = f'bridge.export(module, static=r"{"|".join(patterns)}")'
    return (
        f"{option} makes constants of the buffers it is computed of, if no call writes them; if only the first call "
        f"writes them, call the module once before; otherwise {otherwise}"
    )
