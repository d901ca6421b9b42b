"""What becomes of state outside parameters and buffers that a call has changed: an error, a warning, or nothing.

It is gone with the call. That is harmless where no later call would read it, and another model where one would.
`check_left` tells the two apart: it traces the module again, from the state that the call left. The same program means
that nothing reads it.
"""

from __future__ import annotations

import contextvars
import re
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

from bridge.attributes import REGISTRIES, Place, shown
from bridge.errors import BridgeError, BridgeWarning
from bridge.held_objects import GONE, Drawn, Kept
from bridge.internals import Tracer
from bridge.pytrees import convert
from bridge.tensors import BridgeTensor, blank, fresh

Trace = Callable[[Mapping[Place, Any]], tuple[Any, dict[Place, Any]]]
"""Runs the call from a changed state: (results, what it changed then)."""

_WARNED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def check_left(module: nn.Module, changes: Mapping[Place, Any], trace: Trace) -> None:
    """Raise `BridgeError` where a later call would read what this one changed; warn where the change is only lost.

    A value that the next call would write again, such as a cached table, is neither.
    """
    before, _ = _program(trace, {})
    after, left = _program(trace, _started(changes))
    drawn = [p for p, value in changes.items() if isinstance(value, Drawn) and p in left]
    if drawn:
        raise BridgeError(
            f"the call draws random numbers from {_listed(drawn)}, which was seeded before it: they would be constants "
            "of the program; draw with torch, pass the numbers as an argument, or seed the generator in the call"
        )
    kept = [p for p, value in changes.items() if isinstance(value, Kept)]
    if before != after or kept:
        readers = [p for p in changes if _program(trace, _started({p: changes[p]}))[0] != before]
        raise BridgeError(
            f"the call changes {_listed(kept or readers or list(changes))} and a later call would read it, but a call "
            f"keeps parameters and buffers only; {_remedy(kept or readers or list(changes))}"
        )
    appended = {path for path, key in left if isinstance(key, int)}
    lost = [p for p, value in changes.items() if _holds_traced(value) or p in left or p[0] in appended]
    fresh_ones = set(map(_name, lost)) - _WARNED.setdefault(module, set())
    if fresh_ones:
        _WARNED[module] |= fresh_ones
        said = f"the call writes {_listed(lost)}, which is lost with it: the module keeps what it had"
        warnings.warn(BridgeWarning(said), stacklevel=2)


def _remedy(places: list[Place]) -> str:
    registry = places[0][0].rpartition(".")[2]
    if places[0][1] == "requires_grad":
        return "assign a detached tensor"
    if registry == "_buffers":
        return "register the buffer in `__init__` as a tensor of the shape that it has in later calls"
    if registry in REGISTRIES:
        return "register it in `__init__` and leave it there"
    return "make it a buffer, or pass it in and return it"


def _program(trace: Trace, start: Mapping[Place, Any]) -> tuple[Any, set[Place]]:
    """The program from that state, comparable with `==`, and what it leaves changed."""
    left: set[Place] = set()

    def call() -> list:
        results, changes = trace(start)
        left.update(changes)  # not the values, which belong to the trace
        return jax.tree.leaves(results)

    try:
        closed = jax.make_jaxpr(call)()
    except Exception as error:
        if not start:
            raise
        # A state that the code did not expect: another program.
        return f"{type(error).__name__}: {error}", left
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))
    return (text, [_comparable(c) for c in closed.consts]), left


def _comparable(constant: Any) -> Any:
    if isinstance(constant, Tracer):
        return id(constant)
    if jnp.issubdtype(getattr(constant, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    array = np.asarray(constant)
    return array.shape, str(array.dtype), array.tobytes()


def _started(changes: Mapping[Place, Any]) -> dict[Place, Any]:
    """The values as a later call would find them; traced ones by other numbers of the same shape."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, BridgeTensor):
            return value
        numbers = np.random.default_rng(0).normal(size=tuple(value.shape)) * 3
        with jax.ensure_compile_time_eval():
            array = jnp.asarray(np.abs(numbers) + 1).astype(value.value.dtype)
        return fresh(array, blank(value.shape, value.stride(), value.dtype), tracked=value.requires_grad)

    return {place: value if value is GONE else convert(value, leaf) for place, value in changes.items()}


def _holds_traced(value: Any) -> bool:
    return any(isinstance(leaf, BridgeTensor) for leaf in jax.tree.leaves(convert(value, lambda v: v)))


def _name(place: Place) -> str:
    path, key = place[0].rstrip("\0"), place[1]
    key = key.name if isinstance(key, contextvars.ContextVar) else key
    path = ".".join(part for part in path.split(".") if part and part not in REGISTRIES)
    return ".".join(p for p in (path, str(key)) if p) if isinstance(key, str) else f"{path}[{shown(key)}]"


def _listed(places: list[Place]) -> str:
    names = list(dict.fromkeys(map(_name, places)))
    return ", ".join(f"`{n}`" for n in names[:5]) + (" …" if len(names) > 5 else "")
