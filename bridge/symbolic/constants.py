"""The remedy for code that has to know a traced value: make constants of the buffers that it is computed from."""

import re
from typing import Any

import jax.numpy as jnp

from bridge._compat.jax import depends_on
from bridge.context import current
from bridge.tensor.pytrees import is_array, named_inputs

_KNOWN_REMEDY = (
    "the input {}, if it stays the same as the edges of a graph do, may be a NumPy array that the compiled function "
    'encloses: `jax.jit(lambda p, x: fn(p, {{}}, x, edges))`, `bridge.verify(…, known_inputs="{}")`'
)


def as_constant(value: Any, otherwise: str) -> str:
    """Returns the remedy for code that has to know a value: `static=` if it is computed from buffers alone."""
    call = current()
    if call is None:
        return otherwise
    if not (buffers := depends_on(value, call.buffers)):
        inputs = named_inputs(*call.arguments)[0].items()
        whole = {name: v for name, v in inputs if is_array(v) and not jnp.issubdtype(v.dtype, jnp.inexact)}
        names = [name for name in depends_on(value, {**call.buffers, **whole}) or () if name in whole]
        known = _KNOWN_REMEDY.format(" and ".join(names), "|".join(names))
        if names:
            return f"{known}; otherwise {otherwise}"
        return otherwise
    patterns = dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", name.replace(".", r"\.")) for name in buffers)  # all layers
    option = f'bridge.export(module, static=r"{"|".join(patterns)}")'
    return (
        f"{option} makes constants of the buffers it is computed of, if no call writes them; if only the first call "
        f"writes them, call the module once before; otherwise {otherwise}"
    )
