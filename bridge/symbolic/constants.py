"""The remedy for code that has to know a traced value: make constants of the buffers that it is computed from."""

import re
from typing import Any

from bridge._compat.jax import depends_on
from bridge.context import current

_KNOWN_REMEDY = (
    "integer inputs that stay the same, such as the edges of a graph, may be NumPy arrays that the compiled function "
    'encloses: `jax.jit(lambda p, x: fn(p, {}, x, edges))`, `bridge.verify(…, known_inputs="1")`'
)


def as_constant(value: Any, otherwise: str) -> str:
    """Returns the remedy for code that has to know a value: `static=` if it is computed from buffers alone."""
    call = current()
    if call is None:
        return otherwise
    if not (buffers := depends_on(value, call.buffers)):
        inputs = {str(i): t for i, t in enumerate(call.inputs)}
        whole = {i: t.value for i, t in inputs.items() if not (t.is_floating_point() or t.is_complex())}
        known = depends_on(value, {**call.buffers, **whole})
        return f"{_KNOWN_REMEDY}; otherwise {otherwise}" if known else otherwise
    patterns = dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", name.replace(".", r"\.")) for name in buffers)  # all layers
    option = f'bridge.export(module, static=r"{"|".join(patterns)}")'
    return f"{option} makes constants of the buffers it is computed of, if no call writes them; otherwise {otherwise}"
