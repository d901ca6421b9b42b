"""What becomes of state outside parameters and buffers that a call changes: an error, a warning, or nothing.

It is gone with the call. That is harmless where no later call would read it, and another model where one would.
`check_left` tells the two apart: it traces the module again, from the state that the call left. The same program means
that nothing reads it. A program that computes the same from it, as from a table that depends on buffers and constants
only, means that reading it makes no difference.
"""

from __future__ import annotations

import contextvars
import dataclasses
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

from bridge.attributes import REGISTRIES, Place, shown
from bridge.errors import BridgeError, BridgeWarning
from bridge.expressions import Expressions, comparable
from bridge.held_objects import CODE, GONE, ORDER, Drawn, Kept
from bridge.pytrees import convert, is_array, is_number
from bridge.tensors import BridgeTensor, blank, fresh

if TYPE_CHECKING:
    from bridge.call import Call, Request, Result

Trace = Callable[..., "tuple[Result, Call]"]
"""`(start, first=None, request=None)`: runs the call from a changed state, which the call `first` has left.

Without `first` that is the call at hand, without `request` the numbers are its own.
"""

_WARNED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def check_left(module: nn.Module, request: Request, changes: Mapping[Place, Any], trace: Trace) -> None:
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
    # A parameter is trained, so it matters where it stays even if every call that makes it would make the same.
    kept = [p for p, v in changes.items() if isinstance(v, Kept) or (isinstance(v, nn.Parameter) and p not in left)]
    if kept or (before != after and not _makes_no_difference(trace, request)):
        readers = [p for p in changes if _program(trace, _started({p: changes[p]}))[0] != before]
        raise BridgeError(
            f"the call changes {_listed(kept or readers or list(changes))} and a later call would read it, but a call "
            f"keeps parameters and buffers only; {_remedy(kept or readers or list(changes), changes)}"
        )
    appended = {path for path, key in left if isinstance(key, int)}
    lost = [p for p, value in changes.items() if _holds_traced(value) or p in left or p[0] in appended]
    lost += _unread(trace, changes, [p for p in changes if p not in lost], after)
    warned = _WARNED.setdefault(module, set())
    if not set(map(_name, lost)) <= warned:
        said = [p for p in lost if p[0] in appended or not _is_of_state(trace, request, p)]
        warned |= set(map(_name, lost))
        if said:
            what = f"the call writes {_listed(said)}, which is lost with it: the module keeps what it had"
            warnings.warn(BridgeWarning(what), stacklevel=2)


def _unread(trace: Trace, changes: Mapping[Place, Any], places: list[Place], program: Any) -> list[Place]:
    """Those whose values a call like this one does not read, so that another kind of call may: of another mode, say.

    `program`: that of a later call. One that does read them finds what it would write again, such as a cached table.
    """

    def reads(some: list[Place]) -> bool:
        return _program(trace, _started(changes) | dict.fromkeys(some, _UNREADABLE))[0] != program

    if not places or not reads(places):
        return places
    return [place for place in places if not reads([place])] if len(places) > 1 else []


class _Unreadable:
    """In the place of a value: what asks anything of it fails."""

    def _fail(self, *_: Any) -> Any:
        raise LookupError("a value of an earlier call was read")

    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __index__ = __len__ = __iter__ = __call__ = _fail
    __getattr__ = __getitem__ = __setitem__ = __contains__ = __hash__ = _fail


_UNREADABLE = _Unreadable()


def warn_of_arguments(module: nn.Module, names: list[str]) -> None:
    """Warn once of arguments that a call changes and does not return."""
    warned = _WARNED.setdefault(module, set())
    new = [name for name in names if f"argument {name}" not in warned]
    warned |= {f"argument {name}" for name in new}
    if new:
        listed = ", ".join(f"`{name}`" for name in new)
        what = f"the call changes its argument {listed}, and the caller's own stays as it was; return it from the call"
        warnings.warn(BridgeWarning(what), stacklevel=2)


def _makes_no_difference(trace: Trace, request: Request) -> bool:
    """Whether a later call from what an earlier one left computes what it would from the original state.

    The two calls have numbers of their own, buffers apart, which the later one has from the earlier one.
    """
    numbers = _Numbers(request)

    def later(from_what_is_left: bool) -> Callable:
        def calls(first: list, second: list) -> list:
            result, call = trace({}, None, numbers.put(first))
            start = call.changes if from_what_is_left else {}
            again, _ = trace(start, call, numbers.put(second, result.buffers))
            return [*filter(is_number, jax.tree.leaves(again))]

        return calls

    expressions = Expressions()
    try:
        alone, after = (expressions.of(later(left), numbers.shapes, numbers.shapes) for left in (False, True))
    except Exception:  # code that needs values, or that the changed state does not fit
        return False
    return alone == after


def _is_of_state(trace: Trace, request: Request, place: Place) -> bool:
    """Whether what the call puts there depends on parameters and buffers only: the next one puts the same there."""
    numbers = _Numbers(request)

    def values(given: list) -> tuple:
        _, call = trace({}, None, numbers.put(given))
        _, again = trace(call.changes, call, numbers.put(given))
        both = call.changes[place], again.changes.get(place, call.changes[place])
        return tuple([t.value for t in _traced_in(value)] for value in both)

    expressions = Expressions()
    try:
        values_of_both = expressions.of(values, numbers.shapes)
    except Exception:
        return False
    count = len(values_of_both) // 2
    same = values_of_both[:count] == values_of_both[count:]
    return count > 0 and same and all(i < numbers.of_params for i in expressions.inputs(values_of_both))


class _Numbers:
    """The arrays in a request but its buffers, and requests with others in their place."""

    def __init__(self, request: Request):
        self._request = request
        parts = [dict(request.params), request.args, request.kwargs, request.rng, dict(request.overrides)]
        leaves, self._structure = jax.tree.flatten(convert(parts, lambda v: v))
        self._leaves = leaves
        self._places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        self.shapes = [jax.typeof(jnp.asarray(leaves[i])) for i in self._places]
        self.of_params = sum(map(is_array, jax.tree.leaves(parts[0])))
        """How many of them, at the beginning, are parameters."""

    def put(self, arrays: list, buffers: Mapping[str, Any] | None = None) -> Request:
        leaves = [*self._leaves]
        for place, array in zip(self._places, arrays, strict=True):
            leaves[place] = array
        params, args, kwargs, rng, overrides = jax.tree.unflatten(self._structure, leaves)
        given = {"params": params, "args": args, "kwargs": kwargs, "rng": rng, "overrides": overrides}
        return dataclasses.replace(self._request, **given, buffers=buffers or self._request.buffers)


def _remedy(places: list[Place], changes: Mapping[Place, Any]) -> str:
    registry, key = places[0][0].rpartition(".")[2], places[0][1]
    registries = {path.rpartition(".")[2] for path, name in changes if name == key}
    how_it_works = (isinstance(key, str) and key in ("__class__", "training")) or isinstance(changes[places[0]], CODE)
    if how_it_works or key is ORDER or registry.endswith("_hooks"):
        return "make the change before `export`, or undo it within the call"
    if key == "requires_grad":
        return "assign a detached tensor"
    if key == "layout":
        return "assign it contiguous(), or laid out as before"
    if registry == "_buffers":
        return "register the buffer in `__init__` as a tensor of the shape that it has in later calls"
    if registries & {"_parameters", "_modules"}:
        return "register it in `__init__` and leave it there, or call the module once before `export`"
    return "make it a buffer, or pass it in and return it"


def _program(trace: Trace, start: Mapping[Place, Any]) -> tuple[Any, set[Place]]:
    """The program from that state, comparable with `==`, and what it leaves changed."""
    left: set[Place] = set()

    rest: list[str] = []

    def call() -> list:
        results, other = trace(start)
        left.update(other.changes)  # not the values, which belong to the trace
        leaves = jax.tree.leaves(results)
        rest.extend(repr(leaf) for leaf in leaves if not is_number(leaf))
        return [*filter(is_number, leaves)]

    try:
        closed = jax.make_jaxpr(call)()
    except Exception as error:
        if not start:
            raise
        # A state that the code did not expect: another program.
        return f"{type(error).__name__}: {error}", left
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))
    return (text, [comparable(c) for c in closed.consts], rest), left


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
    return next(_traced_in(value), None) is not None


def _traced_in(value: Any) -> Iterator[BridgeTensor]:
    return (leaf for leaf in jax.tree.leaves(convert(value, lambda v: v)) if isinstance(leaf, BridgeTensor))


def _name(place: Place) -> str:
    path, key = place[0].rstrip("\0"), place[1]
    key = key.name if isinstance(key, contextvars.ContextVar) else key
    path = ".".join(part for part in path.split(".") if part and part not in (*REGISTRIES, "__dict__"))
    if key is ORDER:
        return path
    return ".".join(p for p in (path, str(key)) if p) if isinstance(key, str) else f"{path}[{shown(key)}]"


def _listed(places: list[Place]) -> str:
    names = list(dict.fromkeys(f"{'the order of ' * (p[1] is ORDER)}`{_name(p)}`" for p in places))
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
