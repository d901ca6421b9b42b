"""Effects of a call on its module besides the values of parameters and buffers, and the policy on them.

A call runs on a copy of the module, so what it assigns to attributes, or puts into lists, dicts and objects that hang
on them, is gone with the call. That is harmless where no later call would read it, as for a lazily built table, and
another model where one would. `judge` finds out, once for each kind of call: it traces a second call on the copy that
the first one left, and the same call on a fresh copy, and compares the two programs.

State elsewhere (globals, closures, class attributes, files) is not followed here; `bridge.verify` compares two calls.
"""

from __future__ import annotations

import collections
import itertools
import operator
import re
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import Literal
from torch import nn

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes
from bridge.errors import BridgeError, BridgeWarning
from bridge.tensor.pytrees import ATOMS, convert, is_number
from bridge.tensor.tensor import BridgeTensor

Place = tuple[str, Any]
"""(path of a container from the module, key or position in it)"""

GONE = object()
"""In place of a value: there is none any more."""

KEPT = object()
"""In place of a value: the same tensor as before, which would be another one in a later call."""

ORDER = "the order of the keys"

_PLAIN = (dict, collections.OrderedDict)
_TENSORS = frozenset({torch.Tensor, nn.Parameter, BridgeTensor})
_CODE = frozenset({type, types.FunctionType, types.MethodType, types.ModuleType, *weakref.ProxyTypes})
_ATOMS = ATOMS | _TENSORS | _CODE | {np.ndarray}
"""Types of values that hold no further state."""
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_LISTS_OF_STATE = frozenset({"_flat_weights", "_flat_weight_refs", "_non_persistent_buffers_set"})
"""Attributes that list parameters and buffers; recurrent modules make theirs again at each call."""


class Snapshot:
    """Attributes of a copied module tree, and the contents of the containers and objects in it, at one time."""

    def __init__(self, modules: Mapping[str, nn.Module], slots: frozenset[tuple[int, str]], copies: Iterable[Any]):
        """`modules`: the copies of a call, by qualified name. `slots`: (id of a registry, name) of the call's state.

        `copies`: all that was copied for the call.
        """
        self._modules, self._slots = modules, slots
        self._held: list[tuple[Any, dict]] = []
        """(container, its items)"""
        lists = {id(vars(m).get(name)) for m in modules.values() for name in _LISTS_OF_STATE}
        for value in copies:
            if id(value) in lists:
                continue
            if isinstance(value, (dict, list, set, collections.deque)):
                self._held.append((value, dict.copy(value) if isinstance(value, dict) else _items(value)))
            if type(value).__dictoffset__ and type(value) not in _ATOMS:
                self._held.append((value.__dict__, value.__dict__.copy()))

    def changes(self) -> dict[Place, Any]:
        """Returns what is now at every place that has changed since; `GONE` where nothing is."""
        changed: dict[Place, Any] = {}
        for value, before in self._held:
            now = value if type(value) in _PLAIN else _items(value)
            same_keys = len(now) == len(before) and all(map(operator.is_, now, before))
            if same_keys and all(map(operator.is_, now.values(), before.values())):
                continue
            places = {key: now.get(key, GONE) for key in {**before, **now} if key not in _LISTS_OF_STATE}
            changed |= {
                (self._path(value), key): item
                for key, item in places.items()
                if (id(value), key) not in self._slots and not _equal(before.get(key, GONE), item)
            }
            if not same_keys and now.keys() == before.keys():
                changed[self._path(value), ORDER] = tuple(now)
        return changed

    def _path(self, wanted: Any) -> str:
        """The way to a container from the module."""
        seen = set[int]()
        todo: list[tuple[str, Any]] = [(name, module.__dict__) for name, module in self._modules.items()]
        for path, value in todo:  # which grows
            if value is wanted:
                return path
            container = isinstance(value, (dict, list, tuple, set, collections.deque))
            held = value if container else getattr(value, "__dict__", None)
            if held is wanted:
                return path
            if held is not None and id(held) not in seen:
                seen.add(id(held))
                todo += [(_joined(path, key), item) for key, item in _items(held).items() if type(item) not in _ATOMS]
        return "an object that a function encloses"

    def hide(self, place: Place) -> None:
        """Let code that reads what is at the place fail."""
        for value, items in self._held:
            if place[1] in items and not isinstance(value, set) and self._path(value) == place[0]:
                value[place[1]] = UNREADABLE

    def holders(self, memory: Callable[[torch.Tensor], bool]) -> dict[Place, Any]:
        """The places where attributes and containers held tensors over some memory then and hold them now."""
        return {
            (self._path(value), key): KEPT
            for value, before in self._held
            for key, item in _items(value).items()
            if item is before.get(key) and (id(value), key) not in self._slots
            if any(type(t) in _TENSORS and memory(t) for t in (item if type(item) is tuple else (item,)))
        }


def _items(value: Any) -> dict:
    """The items of a container by key or position, read without methods of its own class."""
    if isinstance(value, dict):
        return dict.copy(value)
    if isinstance(value, set):
        return dict(zip(value, value, strict=True))
    kind: Any = next(kind for kind in (list, tuple, collections.deque) if isinstance(value, kind))
    return dict(enumerate(kind.__iter__(value)))


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{_shown(key)}]"


def _shown(key: Any) -> str:
    return repr(key) if type(key) in _ATOMS and not isinstance(key, torch.Tensor) else type(key).__name__


def _equal(a: Any, b: Any) -> bool:
    """True if the two are the same to whoever reads them. Objects are if they are identical."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, BridgeTensor):
        return False
    if isinstance(a, torch.Tensor):
        with below_modes():
            return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return [*a] == [*b] and all(_equal(v, b[k]) for k, v in a.items())
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return type(a) in _ATOMS and bool(a == b)


# ---- the policy


class Verdicts:
    """Decisions on the effects of a module's calls, each made once."""

    def __init__(self):
        self._known: dict[Hashable, tuple[str, list[str]]] = {}
        self._said: set[str] = set()

    def check(self, changes: Mapping[Place, Any], kind: Hashable, second_call: SecondCall, shapes: Shapes) -> None:
        """Raise `BridgeError` where a later call would read what one has changed; warn where the change is only lost.

        A value that the next call would write again, such as a cached table, is neither. `kind`: the method, the mode
        and the shapes of a call.
        """
        key = kind, frozenset(map(_name, changes))
        if key not in self._known:
            self._known[key] = judge(changes, second_call, shapes)
        error, lost = self._known[key]
        if error:
            raise BridgeError(error)
        self.warn(lost, "the call writes {}, which is lost with it: the module keeps what it had")

    def warn(self, names: list[str], text: str) -> None:
        """Warn once of each name; `text` has a place for them."""
        new = [name for name in dict.fromkeys(names) if text + name not in self._said]
        self._said |= {text + name for name in new}
        if new:
            listed = ", ".join(f"`{name}`" for name in new[:5]) + (" …" if len(new) > 5 else "")
            warnings.warn(BridgeWarning(text.format(listed)), stacklevel=2)


SecondCall = Callable[..., "tuple[tuple[Any, Mapping[Place, Any]], tuple[Any, Mapping[Place, Any]]]"]
"""`(first, second, hidden=None)`: traces two calls, each on numbers of its own. Returns the results and the changes of
the second call on the copy that the first one left, and those of the same call on a fresh copy. A value that the first
call left at the `hidden` place cannot be read."""


class Shapes(NamedTuple):
    """The arrays that a call gets, as abstract values."""

    leaves: list[Any]
    of_state: int
    """How many of them, at the beginning, are parameters and buffers."""


def judge(changes: Mapping[Place, Any], second_call: SecondCall, shapes: Shapes) -> tuple[str, list[str]]:
    """Returns the text of an error, or "" and the names of values that are lost."""
    try:
        same, again = _compare(changes, second_call, shapes)
    except Exception:  # the code does not expect the state that a call leaves, or it asks for values
        same, again = False, {}
    # A parameter is trained, so it matters where it stays even if every call that makes it would make the same.
    made = [place for place, value in changes.items() if isinstance(value, nn.Parameter) and place not in again]
    if made or not same:
        return (
            f"the call changes {_listed(made or changes)} and a later call would read it, but a call keeps parameters "
            f"and buffers only; {_remedy(made or [*changes], changes)}"
        ), []
    others = [place for place, value in changes.items() if place not in again and value is not KEPT]
    lost = [place for place, of_state in again.items() if not of_state]
    lost += [place for place in others if _unread(place, second_call, shapes)]
    return "", [_name(place) for place in lost]


def _compare(changes: Mapping[Place, Any], second_call: SecondCall, shapes: Shapes) -> tuple[bool, dict[Place, bool]]:
    """Returns whether a second call does the same on the copy that the first one left as on a fresh one.

    And the places that it changes again, with whether what it puts there follows from parameters and buffers alone, as
    a weight that a hook computes.
    """
    kept: list[tuple[Place, int, int]] = []
    others: list[list[str]] = []

    def results(first: Any, second: Any) -> list[Any]:
        (after, left), (alone, left_alone) = second_call(first, second)
        traced = [[[t.value for t in _traced_in(v)] for v in (left[p], left_alone.get(p))] for p in left]
        kept.extend((place, *map(len, values)) for place, values in zip(left, traced, strict=True))  # pyright: ignore
        leaves = [jax.tree.leaves(after), jax.tree.leaves(alone)]
        others.extend([_without_addresses(v) for v in half if not is_number(v)] for half in leaves)
        return [*([v for v in half if is_number(v)] for half in leaves), traced]

    closed, (after, alone, _) = jax.make_jaxpr(results, return_shape=True)(shapes.leaves, shapes.leaves)
    values = iter(value_numbers(closed))

    def next_values(count: int) -> tuple[list[int], list[Value]]:
        taken = [*itertools.islice(values, count)]
        return [value.number for value in taken], taken

    (numbers, after), (numbers_alone, alone) = next_values(len(after)), next_values(len(alone))
    same, n = numbers == numbers_alone and others[0] == others[1], len(shapes.leaves)
    if any(key == "requires_grad" for _, key in changes):  # which changes no value, but what a gradient reaches
        reached = [
            [{i % n for i in value.paths if i % n < shapes.of_state} for value in half] for half in (after, alone)
        ]
        same = same and reached[0] == reached[1]
    again: dict[Place, bool] = {}
    for place, count, count_alone in kept:
        (mine, left), (fresh, _) = next_values(count), next_values(count_alone)
        of_state = all(i % n < shapes.of_state for value in left for i in value.inputs)
        again[place] = bool(mine) and mine == fresh and of_state
    return same, again


def _unread(place: Place, second_call: SecondCall, shapes: Shapes) -> bool:
    """True if a call of this kind does not read what it finds there, so that one of another mode or method may."""
    try:
        jax.eval_shape(lambda *given: second_call(*given, hidden=place) and None, shapes.leaves, shapes.leaves)
    except Exception:
        return False
    return True


class _Unreadable:
    """In the place of a value: code that asks anything of it fails."""

    def _fail(self, *_: Any) -> Any:
        raise LookupError("a value of an earlier call was read")

    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __index__ = __len__ = __iter__ = __call__ = _fail
    __getattr__ = __getitem__ = __setitem__ = __contains__ = __hash__ = _fail


UNREADABLE = _Unreadable()


class Value(NamedTuple):
    """A result of a traced program."""

    number: int
    """The same for two results that have the same value."""
    inputs: frozenset[int]
    """The inputs that it depends on."""
    paths: frozenset[int]
    """Those that a gradient reaches."""


def value_numbers(closed: Any) -> list[Value]:
    """Returns the results of a traced program as values that can be compared.

    Two are the same where the same operations on the same inputs and constants make them, in whatever order. What only
    decides gradients does not count for that.
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
        return value((str(atom.aval), _comparable(atom.val))) if isinstance(atom, Literal) else known[atom]

    for equation in closed.jaxpr.eqns:
        operands = [*map(of, equation.invars)]
        name = equation.primitive.name
        if name == "stop_gradient":
            known[equation.outvars[0]] = operands[0]._replace(paths=none)
        elif _is_regraft(equation):
            known[equation.outvars[0]] = operands[0]._replace(paths=operands[1].paths)
        elif name in _MOVES and all(v.number in constants for v in operands):
            # A part of a constant, whether PyTorch or the program took it.
            known[equation.outvars[0]] = constant(_moved(equation, [constants[v.number] for v in operands]))
        else:
            params = tuple((key, _parameter(setting)) for key, setting in sorted(equation.params.items()))
            for i, out in enumerate(equation.outvars):
                known[out] = value((name, params, tuple(v.number for v in operands), i), operands)
    return [*map(of, closed.jaxpr.outvars)]


def _is_regraft(equation: Any) -> bool:
    inner = getattr(equation.params.get("call_jaxpr"), "jaxpr", None)
    return inner is not None and not inner.eqns and inner.outvars == inner.invars[:1]


def _moved(equation: Any, constants: list[Any]) -> Any:
    with jax.ensure_compile_time_eval():
        return equation.primitive.bind(*constants, **equation.params)


_MOVES = frozenset({"broadcast_in_dim", "concatenate", "reshape", "rev", "slice", "squeeze", "transpose"})
"""Primitives that only move elements."""


def _without_addresses(value: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(value))


def _parameter(value: Any) -> Hashable:
    """A parameter of an operation, with the constants of a program in it."""
    return _without_addresses(value), tuple(map(_comparable, getattr(value, "consts", ())))


def _comparable(constant: Any) -> Hashable:
    if isinstance(constant, Tracer):
        return id(constant)
    if jnp.issubdtype(getattr(constant, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # under `jit`, too
            constant = jax.random.key_data(constant)
    array = np.asarray(constant)
    return array.shape, str(array.dtype), array.tobytes()


def _traced_in(value: Any) -> list[BridgeTensor]:
    return [v for v in jax.tree.leaves(convert(value, lambda v: v)) if isinstance(v, BridgeTensor)]


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
        return "register the buffer in `__init__` as a tensor of the shape that it has in later calls"
    return "make it a buffer, pass it in and return it, or call the module before `export` if later calls only read it"


def _name(place: Place) -> str:
    path = ".".join(part for part in place[0].split(".") if part and part not in _REGISTRIES)
    return path if place[1] is ORDER else _joined(path, place[1]).lstrip(".")


def _listed(places: Iterable[Place]) -> str:
    names = list(dict.fromkeys(f"{'the order of ' * (place[1] is ORDER)}`{_name(place)}`" for place in places))
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
