"""State that a module keeps outside its parameters and buffers: what a call finds there, and what it changes.

A call is a pure function of parameters, buffers and inputs, so what it puts into attributes, lists, objects, classes or
globals is taken back after it; `lost_state.py` says when that is an error.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.held_objects import (
    CONTAINERS,
    GONE,
    ORDER,
    PLAIN,
    RECORDS,
    equal,
    inside,
    is_plain_object,
    referent,
    same_order,
    unchanged,
)
from bridge.holders import (
    Holder,
    holder_of,
    of_cache,
    of_cells,
    of_class,
    of_context,
    of_defaults,
    of_dict,
    of_dict_without,
    of_flags,
    of_module,
    of_names,
    of_object,
    of_tensor,
)
from bridge.pytrees import convert
from bridge.reachable import LARGE, Reached, is_own_class
from bridge.shadow import LinkCopier
from bridge.tensors import BridgeTensor

Place = tuple[str, Any]
"""(what holds the value, by its path from the module; the key in it)."""

REGISTRIES = ("_parameters", "_buffers", "_modules")
_REGISTERED = frozenset(REGISTRIES)
_FLAT_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Where recurrent modules list their parameters, again at each call that has other ones."""
_SKIPPED = (*PLAIN, torch.Tensor)


class Attributes:
    """What a copied module tree and the code that it runs hold besides parameters and buffers."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        state: Mapping[str, BridgeTensor],
        slots: set[tuple[int, str]],
        copies: dict[int, Any],
        reached: Reached,
    ):
        """`modules`: the copies by qualified name. `state`: the call's parameters and buffers, likewise.

        `slots`: (id of a copy, name) of its parameters and buffers. `copies`: id of an object -> what this call has
        instead of it.
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
        for name, tensor in state.items():
            self._visit_items(name, self._add(f"{name}.__dict__", of_tensor(tensor), False), False)
        self._visit_reached(reached)

    def _visit_module(self, name: str, module: nn.Module, slots: set | None = None) -> None:
        """`slots`: of a registered module, those of the call's own parameters and buffers."""
        shared = id(module) not in self._copies
        for registry in REGISTRIES:
            contents = getattr(module, registry)
            ordered = registry == "_modules"
            holder = of_dict_without(contents, slots) if slots and not ordered else of_dict(contents, ordered)
            items = self._add(f"{name}.{registry}", holder, shared)
            if slots is None:
                self._visit_items(name, items, False)
        known = _REGISTERED | _FLAT_WEIGHTS if isinstance(module, nn.RNNBase) else _REGISTERED
        self._visit_items(name, self._add(name, of_module(module, known), shared), False)

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
        value = referent(value)
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
            if isinstance(value, CONTAINERS) and type(value).__module__ != "collections" and type(value).__dictoffset__:
                items = items | self._add(path, of_object(value), id(value) not in self._copies)
            if items and holder.nested and not (outside and len(items) > LARGE):
                self._visit_items(path, items, outside)
        elif isinstance(value, nn.Module):  # one that is not registered
            self._seen.add(id(value))
            self._visit_module(path, value)

    def _visit_items(self, path: str, items: Mapping, outside: bool) -> None:
        for key, item in items.items():
            self._visit(f"{path}.{key}" if isinstance(key, str) else f"{path}[{shown(key)}]", item, outside)

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
        return LinkCopier(self._replaced, lambda _, other: other).visit(value)

    def changes(self) -> dict[Place, Any]:
        """What is not as it was before the call; `GONE` for what is not there any more."""
        changed = {}
        for path, holder in self._holders.items():
            before, now = holder.before, holder.read()
            if holder.ordered and now.keys() == before.keys() and not same_order(now, before):
                changed[path, ORDER] = tuple(now)
            for key in now if now.keys() == before.keys() else {**now, **before}:
                then, value = before.get(key, GONE), now.get(key, GONE)
                if then is not value and not equal(then, value):
                    changed[path, key] = value
        return changed

    def kept(self, wanted: Callable[[torch.Tensor], bool], instead: Callable[[torch.Tensor], Any]) -> dict[Place, Any]:
        """The places of tensors that are `wanted` and were there before the call, each with another tensor there."""
        places = {}
        for path, holder in self._holders.items():
            for key, value in holder.read().items():
                if value is holder.before.get(key, GONE) and any(wanted(t) for t in _tensors_of(value)):
                    places[path, key] = convert(value, lambda v: instead(v) if isinstance(v, torch.Tensor) else v)
        return places

    def set(self, values: Mapping[Place, Any], twins: Mapping[int, Any]) -> None:
        """Start the call from other values. `twins`: id of what an earlier call had for itself -> what this one has."""
        for (path, key), value in values.items():
            if path in self._holders:
                holder = self._holders[path]
                items = holder.read()
                if key is ORDER:
                    keys = [_twin(k, twins) for k in value]
                    items = {k: items[k] for k in keys if k in items} | items
                else:
                    items |= {_twin(key, twins): value}
                holder.write({k: v for k, v in items.items() if v is not GONE})
        for holder in self._holders.values():
            holder.before = holder.read()

    def restore(self) -> None:
        """Give objects that the user holds as well their contents back."""
        for holder in self._holders.values():
            if holder.shared and not unchanged(holder.read(), holder.original, holder.ordered):
                holder.write(holder.original)
        for holder in self._caches:  # a copy of the module may be among the arguments
            holder.write({})


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """A tensor, or those in a tuple: what is in other containers has a place of its own."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_of(item)


def _twin(key: Any, twins: Mapping[int, Any]) -> Any:
    """The key under which this call would look for what an earlier one has put there."""
    if type(key) is tuple:
        return tuple(_twin(k, twins) for k in key)
    if isinstance(key, weakref.ref):
        return weakref.ref(twins[id(key())]) if id(key()) in twins else key
    if type(key) is int and key in twins:  # `cache[id(self.weight)]`
        return id(twins[key])
    return twins.get(id(key), key)


def shown(key: Any) -> str:
    """A key without the numbers of a tensor or the layers of a module."""
    if type(key) is tuple:
        return f"({', '.join(map(shown, key))})"
    return repr(key) if isinstance(key, PLAIN) else type(key).__name__
