"""State that a module keeps outside its parameters and buffers, and what becomes of it after a call.

A call is a pure function of parameters, buffers and inputs, so what it puts into attributes, lists, objects, classes or
globals is gone with it. That is harmless where no later call would read it, and another model where one would.
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
import torch
from torch import nn

from bridge.errors import BridgeError, BridgeWarning
from bridge.holders import (
    CONTAINERS,
    GONE,
    PLAIN,
    RECORDS,
    Drawn,
    Holder,
    Kept,
    equal,
    holder_of,
    inside,
    is_iterator,
    is_plain_object,
    of_cache,
    of_cells,
    of_class,
    of_context,
    of_defaults,
    of_dict,
    of_dict_without,
    of_flags,
    of_names,
    of_object,
    unchanged,
)
from bridge.internals import Tracer
from bridge.pytrees import convert
from bridge.reachable import LARGE, Reached, is_own_class
from bridge.shadow import COPIED_KINDS, HeldIterator, with_copies
from bridge.tensors import BridgeTensor, blank, fresh

Place = tuple[str, Any]
"""(what holds the value, by its path from the module; the key in it)."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_REGISTERED = frozenset(_REGISTRIES)
_FLAT_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Where recurrent modules list their parameters, again at each call that has other ones."""
_SKIPPED = (*PLAIN, torch.Tensor)


class Attributes:
    """What a copied module tree and the code that it runs hold besides parameters and buffers."""

    def __init__(
        self, modules: Mapping[str, nn.Module], slots: set[tuple[int, str]], copies: dict[int, Any], reached: Reached
    ):
        """`modules`: the copies by qualified name. `slots`: (id of a copy, name) of its parameters and buffers.

        `copies`: id of an object -> what this call has instead of it.
        """
        self.context = contextvars.copy_context()
        """What the call has to run in."""
        self.arrays: dict[str, np.ndarray] = {}
        """Those of NumPy, by their paths."""
        self._holders: dict[str, Holder] = {}
        self._seen: set[int] = set(map(id, modules.values()))
        self._replaced = copies
        self._copies = set(map(id, copies.values()))
        known: dict[int, set] = {}
        for owner, slot in slots:
            known.setdefault(owner, set()).add(slot)
        for name, module in modules.items():
            self._visit_module(name, module, known.get(id(module), set()))
        for name, module in modules.items():
            if module._parameters:
                self._add(f"{name}.requires_grad", of_flags(module._parameters), False)
        self._visit_reached(reached)

    def _visit_module(self, name: str, module: nn.Module, slots: set | None = None) -> None:
        """`slots`: of a registered module, those of the call's own parameters and buffers."""
        shared = id(module) not in self._copies
        for registry in _REGISTRIES:
            contents = getattr(module, registry)
            holder = of_dict_without(contents, slots) if slots else of_dict(contents)
            items = self._add(f"{name}.{registry}", holder, shared)
            if slots is None:
                self._visit_items(name, items, False)
        known = _REGISTERED | _FLAT_WEIGHTS if isinstance(module, nn.RNNBase) else _REGISTERED
        self._visit_items(name, self._add(name, of_dict_without(module.__dict__, known), shared), False)

    def _visit_reached(self, reached: Reached) -> None:
        """The user's classes, functions and globals."""
        outside = [(cls.__name__, of_class(cls)) for cls in reached.classes]
        outside += [(name, of_names(*names)) for name, names in reached.globals.items()]
        for function in reached.functions:
            name = function.__qualname__.rpartition("<locals>.")[2]
            outside.append((name, of_dict(function.__dict__)))
            if function.__closure__:
                outside.append((name, of_cells(function)))
            if function.__defaults__ or function.__kwdefaults__:
                outside.append((name, of_defaults(function)))
        for cls in reached.classes:
            for name, value in vars(cls).items():
                if hasattr(type(value), "__get__") and is_plain_object(value):  # what it keeps of each instance
                    self._visit(f"{cls.__name__}.{name}", value, True)
        self._add("contextvars", of_context(self.context), True)
        for path, holder in outside:
            self._visit_items(path, self._add(path, holder, True), True)
        self._caches = [of_cache(cached, self._copies) for cached in reached.caches]
        for cached, holder in zip(reached.caches, self._caches, strict=True):
            self._add(cached.__qualname__, holder, True)

    def _add(self, path: str, holder: Holder, shared: bool) -> dict:
        while path in self._holders:
            path += "\0"  # two closures of one function
        holder.shared = shared
        self._holders[path] = holder
        return holder.original

    def _visit(self, path: str, value: Any, outside: bool = False) -> None:
        if isinstance(value, _SKIPPED) or id(value) in self._seen:
            return
        items = inside(value)
        if items is not None:
            self._visit_items(path, items, outside)
        elif not outside or isinstance(value, (*CONTAINERS, *RECORDS)) or is_own_class(type(value)):
            self._visit_object(path, value, outside)

    def _visit_object(self, path: str, value: Any, outside: bool) -> None:
        holder = None if isinstance(value, nn.Module) else holder_of(value)
        if holder is not None:
            self._seen.add(id(value))
            if isinstance(value, np.ndarray):
                self.arrays[path.strip(".")] = value
            items = self._add(path, holder, id(value) not in self._copies)
            if isinstance(value, CONTAINERS) and type(value) not in COPIED_KINDS and type(value).__dictoffset__:
                items = items | self._add(path, of_object(value), True)
            if items and holder.nested and not (outside and len(items) > LARGE):
                self._visit_items(path, items, outside)
        elif isinstance(value, nn.Module):  # one that is not registered
            self._seen.add(id(value))
            self._visit_module(path, value)

    def _visit_items(self, path: str, items: Mapping, outside: bool) -> None:
        for key, item in items.items():
            self._visit(f"{path}.{key}" if isinstance(key, str) else f"{path}[{_shown(key)}]", item, outside)

    def start(self) -> None:
        """Objects that the user holds as well get the call's own parameters and modules, and no iterator to advance."""
        for holder in self._holders.values():
            if holder.shared:
                before = holder.before
                values = {self._instead(k): self._instead(v) for k, v in before.items()}
                if any(k not in before or before[k] is not v for k, v in values.items()):
                    holder.before = values
                    holder.write(values)

    def _instead(self, value: Any) -> Any:
        return HeldIterator() if is_iterator(value) else with_copies(self._replaced, value)

    def changes(self) -> dict[Place, Any]:
        """What is not as it was before the call; `GONE` for what is not there any more."""
        changed = {}
        for path, holder in self._holders.items():
            before, now = holder.before, holder.read()
            for key in now if now.keys() == before.keys() else {**now, **before}:
                then, value = before.get(key, GONE), now.get(key, GONE)
                if then is not value and not equal(then, value):
                    changed[path, key] = value
        return changed

    def set(self, values: Mapping[Place, Any], twins: Mapping[int, Any]) -> None:
        """Start the call from other values. `twins`: id of what an earlier call had for itself -> what this one has."""
        for (path, key), value in values.items():
            if path in self._holders:
                holder = self._holders[path]
                items = holder.read() | {_twin(key, twins): value}
                holder.write({k: v for k, v in items.items() if v is not GONE})
        for holder in self._holders.values():
            holder.before = holder.read()

    def restore(self) -> None:
        """Give objects that the user holds as well their contents back."""
        for holder in self._holders.values():
            if holder.shared and not unchanged(holder.read(), holder.original):
                holder.write(holder.original)
        for holder in self._caches:  # a copy of the module may be among the arguments
            holder.write({})


def arrays_in(module: nn.Module) -> list[np.ndarray]:
    """The NumPy arrays that the module holds."""
    return list(Attributes(dict(module.named_modules()), set(), {}, Reached()).arrays.values())


def _twin(key: Any, twins: Mapping[int, Any]) -> Any:
    """The key under which this call would look for what an earlier one has put there."""
    if type(key) is tuple:
        return tuple(_twin(k, twins) for k in key)
    if isinstance(key, weakref.ref):
        return weakref.ref(twins[id(key())]) if id(key()) in twins else key
    if type(key) is int and key in twins:  # `cache[id(self.weight)]`
        return id(twins[key])
    return twins.get(id(key), key)


# What becomes of it.

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
    if registry in _REGISTRIES:
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
    path = ".".join(part for part in path.split(".") if part and part not in _REGISTRIES)
    return ".".join(p for p in (path, str(key)) if p) if isinstance(key, str) else f"{path}[{_shown(key)}]"


def _shown(key: Any) -> str:
    """A key without the numbers of a tensor or the layers of a module."""
    if type(key) is tuple:
        return f"({', '.join(map(_shown, key))})"
    return repr(key) if isinstance(key, PLAIN) else type(key).__name__


def _listed(places: list[Place]) -> str:
    names = list(dict.fromkeys(map(_name, places)))
    return ", ".join(f"`{n}`" for n in names[:5]) + (" …" if len(names) > 5 else "")
