"""Effects of a call on its module besides the values of parameters and buffers, and the policy on them.

A call runs on a copy of the module, so what it assigns to attributes, or puts into lists, dicts and objects that they
hold, is lost with the call. That is harmless if no later call would read it, as for a lazily built table, and changes
the model if one would. `judge` decides this once for each kind of call: it traces a second call on the copy that
the first one left, and the same call on a fresh copy, and compares the two programs.

State elsewhere (globals, closures, class attributes, files) is not followed here; `bridge.verify` compares two calls.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import Literal
from torch import nn

from bridge._compat.jax import Tracer
from bridge.autograd.engine import Restart
from bridge.errors import BridgeError, BridgeWarning
from bridge.module.changes import KEPT, ORDER, REGISTRIES, Place, joined
from bridge.symbolic.numbers import as_operand
from bridge.tensor.pytrees import convert, is_number
from bridge.tensor.tensor import BridgeTensor


class Verdicts:
    """Decisions on the effects of a module's calls; each decision is made once."""

    def __init__(self):
        self._known: dict[tuple, tuple[str, list[str]]] = {}
        self.caught: dict[Hashable, bool] = {}
        """Checks of traced values -> whether the code catches what they raise."""
        self._said: set[str] = set()

    def check(
        self, changes: Mapping[Place, Any], kind: tuple, next_call: NextCall, later_call: Callable, shapes: Shapes
    ) -> None:
        """Raises `BridgeError` if a later call would read a changed value; warns if the change is merely lost.

        A value that the next call would write again, such as a cached table, does neither. `kind`: the method, the mode
        and the shapes of a call. `later_call(values, numbers)` traces a call on a copy with values at their places and
        returns its results; a method's calls after the second one are traced at the first shapes only.
        """
        key = kind, frozenset(map(_name, changes))
        if key not in self._known:
            first = all(error or known[:2] != kind[:2] for (known, _), (error, _) in self._known.items())
            self._known[key] = judge(changes, next_call, later_call if first else None, shapes)
        error, lost = self._known[key]
        if error:
            raise BridgeError(error)
        self.warn(lost, "the call writes {}, which is lost with it: the module keeps what it had")

    def warn(self, names: list[str], text: str) -> None:
        """Warns once for each name; `text` has a placeholder for the names."""
        new = [name for name in dict.fromkeys(names) if text + name not in self._said]
        self._said |= {text + name for name in new}
        if new:
            listed = ", ".join(f"`{name}`" for name in new[:5]) + (" …" if len(new) > 5 else "")
            warnings.warn(BridgeWarning(text.format(listed)), stacklevel=2)


NextCall = Callable[..., "tuple[tuple[Any, Mapping[Place, Any]], tuple[Any, Mapping[Place, Any]]]"]
"""`(first, last, calls=2, hidden=None)`: traces calls one after the other, the last on numbers of its own. Returns the
results and the changes of the last call on the copy that the others left, and those of the same call on a fresh copy. A
value that the others left at the `hidden` place cannot be read."""


class Shapes(NamedTuple):
    """The arrays that a call takes, as abstract values."""

    leaves: list[Any]
    of_state: int
    """The number of them, at the beginning, that are parameters and buffers."""


def judge(
    changes: Mapping[Place, Any], next_call: NextCall, later_call: Callable | None, shapes: Shapes
) -> tuple[str, list[str]]:
    """Returns the text of an error, or "", and the names of values that are lost."""
    try:
        same, again = _compare(changes, next_call, shapes)
        if same and again.keys() - changes.keys():  # something grows, so two calls do not show where it ends
            same, _ = _compare(changes, functools.partial(next_call, calls=3), shapes)
    except Exception:  # the code does not expect the state that a call leaves, or it asks for values
        same = False
        again = {}
    # A parameter is trained, so its place matters even if every call that makes it would make the same.
    made = [place for place, value in changes.items() if isinstance(value, nn.Parameter) and place not in again]
    if made or not same:
        return (
            f"the call changes {_listed(made or changes)} and a later call would read it, but a call keeps parameters "
            f"and buffers only; {_remedy(made or [*changes], changes)}"
        ), []
    counts = {p: (changes[p], v) for p, (v, _) in again.items() if _counts(v) and type(v) is type(changes.get(p))}
    if counts and later_call:
        number = _other_call(counts, later_call, shapes)
    else:
        number = 0
    if number:
        return (
            f"the call changes {_listed(counts)}, and call {number:,} would do something else, but a call keeps "
            "parameters and buffers only; make it a buffer and choose with torch.where, or set it before `export` to a "
            "value from which on nothing changes"
        ), []
    others = [place for place, value in changes.items() if place not in again and value is not KEPT]
    lost = [place for place, (_, of_state) in again.items() if not of_state]
    lost += [place for place in others if _unread(place, next_call, shapes)]
    return "", [_name(place) for place in lost]


def _counts(value: Any) -> bool:
    """True for a number or text, also a number in a tensor that is known while tracing: it may count the calls."""
    return type(value) in (bool, int, float, str) or (type(value) is torch.Tensor and value.numel() == 1)


_LATER = (10, 1_000, 1_000_003, 18_018_000)
"""Numbers of calls: past usual thresholds, and the last a multiple of every number up to 16, of 100 and of 1 000."""


def _other_call(counts: dict[Place, tuple[Any, Any]], later_call: Callable, shapes: Shapes) -> int:
    """Returns the number of the first of some later calls that does something else; 0 if there is none.

    `counts`: what the first and the second call leave. Numbers go on in steps of the same size.
    """
    first = _program(functools.partial(later_call, {}), shapes)
    for number in _LATER:
        values = {place: _continued(*left, number) for place, left in counts.items()}
        try:
            if _program(functools.partial(later_call, values), shapes) != first:
                return number
        except (BridgeError, Restart):
            return number
        except Exception:  # of the code: PyTorch raises it, too, if the number gets there
            continue
    return 0


def _continued(first: Any, second: Any, number: int) -> Any:
    """Returns what call `number` finds where the first two calls left these values."""
    has_no_step = type(second) in (bool, str) or (type(second) is torch.Tensor and second.dtype is torch.bool)
    return second if has_no_step else second + (number - 3) * (second - first)


def _program(call: Callable[[list], Any], shapes: Shapes) -> Hashable:
    """Returns the program of a call, with that of its gradient if there is one, in a form that can be compared."""

    def results(given: list) -> list[Any]:
        return [jnp.real(v).astype(float) for v in jax.tree.leaves(call(given)) if is_number(v)]

    def gradients(given: list) -> list[Any]:
        found, backward = jax.vjp(results, given)
        return [g for g in backward(found)[0] if g.dtype != jax.dtypes.float0]

    try:
        return _parameter(jax.make_jaxpr(gradients)(shapes.leaves))
    except Exception:
        return _parameter(jax.make_jaxpr(results)(shapes.leaves))


def _compare(
    changes: Mapping[Place, Any], next_call: NextCall, shapes: Shapes
) -> tuple[bool, dict[Place, tuple[Any, bool]]]:
    """Returns whether a second call does the same on the copy that the first one left as on a fresh one.

    Also returns the values that it changes again, and whether they depend on parameters and buffers alone, as a weight
    computed by a hook does.
    """
    left: dict[Place, Any] = {}
    others: list[list[str]] = []

    def results(first: Any, second: Any) -> tuple[list, list]:
        (after, changed), (alone, changed_alone) = next_call(first, second)
        arrays = []
        for place, value in changed.items():
            mine = _arrays_in(value)
            left[place] = None if mine else value  # a traced value must not outlive its trace
            arrays.append((mine, _arrays_in(changed_alone.get(place))))
        halves = [jax.tree.leaves(after), jax.tree.leaves(alone)]
        for half in halves:
            others.append([_without_addresses(v) for v in half if not is_number(v)])
        numbers = [[v for v in half if is_number(v)] for half in halves]
        return numbers, arrays

    closed, tree = jax.make_jaxpr(results, return_shape=True)(shapes.leaves, shapes.leaves)
    (after, alone), arrays = jax.tree.unflatten(jax.tree.structure(tree), value_numbers(closed))
    same = _numbers(after) == _numbers(alone) and others[0] == others[1]
    n = len(shapes.leaves)
    if any(key == "requires_grad" for _, key in changes):  # no value changes, only which tensors a gradient reaches
        reached = [
            [{i % n for i in value.paths if i % n < shapes.of_state} for value in half] for half in (after, alone)
        ]
        same = same and reached[0] == reached[1]
    again: dict[Place, tuple[Any, bool]] = {}
    for (place, changed), (mine, fresh) in zip(left.items(), arrays, strict=True):
        of_state = all(i % n < shapes.of_state for value in mine for i in value.inputs)
        again[place] = changed, bool(mine) and _numbers(mine) == _numbers(fresh) and of_state
    return same, again


def _arrays_in(value: Any) -> list[jax.Array]:
    leaves = map(as_operand, jax.tree.leaves(convert(value, lambda v: v)))
    return [v.value for v in leaves if isinstance(v, BridgeTensor)]


def _numbers(values: list[Value]) -> list[int]:
    return [value.number for value in values]


def _unread(place: Place, next_call: NextCall, shapes: Shapes) -> bool:
    """True if a call of this kind does not read the value at the place, so that a call of another kind may."""
    try:
        jax.eval_shape(lambda *given: next_call(*given, hidden=place) and None, shapes.leaves, shapes.leaves)
    except Exception:
        return False
    return True


class Value(NamedTuple):
    """A result of a traced program."""

    number: int
    """A number that two results share if they have the same value."""
    inputs: frozenset[int]
    """The inputs that it depends on."""
    paths: frozenset[int]
    """The inputs that a gradient reaches."""


def value_numbers(closed: Any) -> list[Value]:
    """Returns the results of a traced program as values that can be compared.

    Two results are the same if the same operations on the same inputs and constants make them, in any order. Operations
    that only decide gradients are ignored.
    """
    numbers: dict[Hashable, int] = {}
    constants: dict[int, Any] = {}
    none = frozenset[int]()

    def value(key: Hashable, operands: Iterable[Value] = ()) -> Value:
        number = numbers.setdefault(key, len(numbers))
        return Value(number, none.union(*(v.inputs for v in operands)), none.union(*(v.paths for v in operands)))

    def constant(array: Any) -> Value:
        new = value(("constant", _comparable(array)))
        constants.update({} if isinstance(array, Tracer) else {new.number: array})
        return new

    known: dict[Any, Value] = dict(zip(closed.jaxpr.constvars, map(constant, closed.consts), strict=True))
    for i, variable in enumerate(closed.jaxpr.invars):
        known[variable] = value(("input", i))._replace(inputs=frozenset({i}), paths=frozenset({i}))

    def of(atom: Any) -> Value:
        if isinstance(atom, Literal):
            return value((str(atom.aval), _comparable(atom.val)))
        return known[atom]

    for equation in closed.jaxpr.eqns:
        operands = [*map(of, equation.invars)]
        name = equation.primitive.name
        unchanged = _unchanged(equation, operands)
        if unchanged is not None:
            known[equation.outvars[0]] = unchanged
        elif name in _MOVES and all(v.number in constants for v in operands):
            # This is a part of a constant, whether PyTorch or the program took it.
            known[equation.outvars[0]] = constant(_moved(equation, [constants[v.number] for v in operands]))
        else:
            params = tuple((key, _parameter(setting)) for key, setting in sorted(equation.params.items()))
            for i, out in enumerate(equation.outvars):
                known[out] = value((name, params, tuple(v.number for v in operands), i), operands)
    return [*map(of, closed.jaxpr.outvars)]


def _unchanged(equation: Any, operands: list[Value]) -> Value | None:
    """Returns the operand that an operation passes on unchanged; None if it computes something."""
    name = equation.primitive.name
    inner = getattr(equation.params.get("call_jaxpr"), "jaxpr", None)
    if name == "stop_gradient":
        return operands[0]._replace(paths=frozenset())
    if inner is not None and not inner.eqns and inner.outvars == inner.invars[:1]:  # `regraft`
        return operands[0]._replace(paths=operands[1].paths)
    whole = name == "slice" and equation.outvars[0].aval.shape == equation.invars[0].aval.shape
    if whole:
        return operands[0]
    return None


def _moved(equation: Any, constants: list[Any]) -> Any:
    with jax.ensure_compile_time_eval():
        return equation.primitive.bind(*constants, **equation.params)


_MOVES = frozenset({"broadcast_in_dim", "concatenate", "reshape", "rev", "slice", "squeeze", "transpose"})
"""Primitives that only move elements."""


def _without_addresses(value: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(value))


def _parameter(value: Any) -> Hashable:
    """Returns a hashable form of an operation's parameter, with the constants of a program in it."""
    return _without_addresses(value), tuple(map(_comparable, getattr(value, "consts", ())))


def _comparable(constant: Any) -> Hashable:
    if isinstance(constant, Tracer):
        return id(constant)
    if jnp.issubdtype(getattr(constant, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # also under `jit`
            constant = jax.random.key_data(constant)
    array = np.asarray(constant)
    return array.shape, str(array.dtype), array.tobytes()


def _remedy(places: list[Place], changes: Mapping[Place, Any]) -> str:
    registries = {path.rpartition(".")[2] for path, name in changes if name == places[0][1]}
    value = changes[places[0]]
    if (callable(value) and not isinstance(value, nn.Module)) or places[0][1] in (ORDER, "training"):
        return "make the change before `export`, or undo it within the call"
    if any(registry.endswith("_hooks") for registry in registries):
        return "make the change before `export`, or undo it within the call"
    if registries & {"_parameters", "_modules"}:
        return "register it in `__init__` and leave it there, or call the module once before `export`"
    if "_buffers" in registries:
        return (
            "call the module once before `export` if only the first call sets it; else register the buffer in "
            "`__init__` as a tensor of the shape that it has in later calls"
        )
    remedy = "make it a buffer, pass it in and return it, call the module before `export` if later calls only read it"
    return f"{remedy}, or replace the function that sets it, `functions={{…}}`"


def _name(place: Place) -> str:
    path = ".".join(part for part in place[0].split(".") if part and part not in REGISTRIES)
    if place[1] is ORDER:
        return path
    return joined(path, place[1]).lstrip(".")


def _listed(places: Iterable[Place]) -> str:
    names = list(dict.fromkeys(f"{'the order of ' * (place[1] is ORDER)}`{_name(place)}`" for place in places))
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
