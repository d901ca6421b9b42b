"""How the contents of each kind of object that a call may change are read and written back."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import random
import threading
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bridge.held_objects import (
    GONE,
    MEMORY,
    RANDOM,
    WEAK,
    Drawn,
    Kept,
    equal,
    is_class_attribute,
    is_plain_object,
    same_order,
    slots_of,
)
from bridge.pytrees import items_of
from bridge.tensors import INTERNAL, BridgeTensor

_WRITEABLE = np.empty(0).flags
COPIED = 10**7
"""Elements up to which the memory of an array is copied before a call. Of a larger one only a checksum is kept, so a
change is refused and cannot be taken back."""


class Holder:
    """Named or numbered contents: `read` gives them, `write` puts others there; `nested` ones have contents in turn.

    One that is `shared` belongs to the user and gets its `original` contents back. `before`: at the start of the run.
    Of an `ordered` one, the code may also read the order.
    """

    __slots__ = ("before", "nested", "ordered", "original", "read", "shared", "write")

    def __init__(
        self, read: Callable[[], dict], write: Callable[[dict], None], nested: bool = True, ordered: bool = False
    ):
        self.read, self.write, self.nested, self.ordered, self.shared = read, write, nested, ordered, True
        self.original = self.before = read()


def holder_of(value: Any) -> Holder | None:
    """What holds the contents of an object, by its kind; None for one without any."""
    if isinstance(value, dict):
        return of_dict(value, ordered=True)
    if isinstance(value, (list, collections.deque, set)):
        return _of_sequence(value)
    if isinstance(value, MEMORY):
        return _of_memory(value) if getattr(value, "flags", _WRITEABLE).writeable else None
    if isinstance(value, RANDOM) and not isinstance(value, random.SystemRandom):
        return _of_random(value)
    if isinstance(value, WEAK):
        return of_dict(vars(value)["data"])
    if isinstance(value, threading.local):
        return of_dict(value.__dict__)
    return of_object(value) if is_plain_object(value) else None


def of_dict(contents: Any, ordered: bool = False) -> Holder:
    write = functools.partial(_write_dict, contents, ordered=ordered)
    return Holder(lambda: dict(items_of(contents)), write, ordered=ordered)


def _write_dict(contents: Any, values: dict, ordered: bool = False) -> None:
    gone = contents.keys() - values.keys()
    moved = ordered and not gone and len(contents) == len(values) and not same_order(contents, values)
    if moved or (gone and not values.keys() <= contents.keys()):  # a key for another one, in its place
        contents.clear()
    else:
        for key in gone:
            del contents[key]
    for key, value in values.items():  # `Counter.update` adds
        contents[key] = value


def of_flags(parameters: Mapping[str, Any]) -> Holder:
    """Whether each parameter is frozen."""

    def read() -> dict:
        return {name: p.requires_grad for name, p in parameters.items() if p is not None}

    def write(values: dict) -> None:
        for name, wanted in values.items():
            parameters[name].requires_grad_(wanted)

    return Holder(read, write, nested=False)


def of_dict_without(contents: dict, without: set | frozenset) -> Holder:
    """All but the keys in `without`."""

    def read() -> dict:
        return {k: v for k, v in contents.items() if k not in without}

    return Holder(
        read, lambda values: _write_dict(contents, values | {k: contents[k] for k in without & contents.keys()})
    )


def of_module(module: Any, without: frozenset) -> Holder:
    """The attributes of a module but for the names in `without`, and its class."""
    attributes = of_dict_without(module.__dict__, without)

    def write(values: dict) -> None:
        _set_class(module, values)
        attributes.write({k: v for k, v in values.items() if k != _CLASS})

    return Holder(lambda: attributes.read() | {_CLASS: type(module)}, write)


def of_tensor(tensor: BridgeTensor) -> Holder:
    """The attributes that code has given to a parameter or buffer."""
    return of_dict_without(vars(tensor), INTERNAL)


_CLASS = "__class__"


def _set_class(value: Any, values: dict) -> None:
    if values.get(_CLASS, type(value)) is not type(value):
        object.__setattr__(value, _CLASS, values[_CLASS])


def _of_sequence(contents: Any) -> Holder:
    def write(values: dict) -> None:
        contents.clear()
        contents.extend(values.values()) if hasattr(contents, "extend") else contents.update(values.values())

    return Holder(lambda: dict(enumerate(contents)), write)


def of_object(value: Any) -> Holder:
    """The attributes of an object, `__slots__` included, and its class."""
    slots = slots_of(type(value))
    own = value.__dict__ if type(value).__dictoffset__ else {}

    def read_slots() -> dict:
        return {name: item for name in slots if (item := _slot(value, name)) is not GONE}

    def write(values: dict) -> None:
        _set_class(value, values)
        for name in read_slots().keys() - values.keys():
            object.__delattr__(value, name)
        for name in values.keys() & set(slots):
            object.__setattr__(value, name, values[name])
        _write_dict(own, {k: v for k, v in values.items() if k not in slots and k != _CLASS})

    def read() -> dict:
        return read_slots() | own | {_CLASS: type(value)}

    return Holder(read, write)


def _slot(value: Any, name: str) -> Any:
    """Without the object's own `__getattr__`."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return GONE


def _of_memory(memory: Any) -> Holder:
    if isinstance(memory, np.ndarray) and memory.size > COPIED and not memory.dtype.hasobject:
        return Holder(lambda: {"": _checksum(memory)}, lambda _: None, False)

    def write(values: dict) -> None:
        if not equal(memory, values[""]):
            memory[... if isinstance(memory, np.ndarray) else slice(None)] = values[""]

    return Holder(lambda: {"": memory[:] if not isinstance(memory, np.ndarray) else memory.copy()}, write, False)


def _checksum(memory: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(memory).reshape(-1).view(np.uint8).data)


def _of_random(generator: Any) -> Holder:
    if isinstance(generator, random.Random):
        get, put = generator.getstate, generator.setstate
    elif isinstance(generator, np.random.RandomState):
        get, put = generator.get_state, generator.set_state
    else:
        bits = generator.bit_generator
        get, put = lambda: bits.state, functools.partial(setattr, bits, "state")
    return Holder(lambda: {"": Drawn(get())}, lambda values: put(values[""].state), False)


def of_cells(function: types.FunctionType) -> Holder:
    """The variables of enclosing functions."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def write(values: dict) -> None:
        for name, cell in cells.items():
            if name in values:
                cell.cell_contents = values[name]
            else:
                del cell.cell_contents

    return Holder(lambda: {k: c.cell_contents for k, c in cells.items() if _filled(c)}, write)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def of_defaults(function: types.FunctionType) -> Holder:
    """The default values of arguments."""
    code, count = function.__code__, len(function.__defaults__ or ())
    names = code.co_varnames[code.co_argcount - count : code.co_argcount]

    def read() -> dict:
        return dict(zip(names, function.__defaults__ or (), strict=True)) | (function.__kwdefaults__ or {})

    def write(values: dict) -> None:
        function.__defaults__ = tuple(values[n] for n in names) or None
        function.__kwdefaults__ = {k: v for k, v in values.items() if k not in names} or None

    return Holder(read, write)


def of_class(cls: type) -> Holder:
    """The attributes of a class, its methods included."""

    def read() -> dict:
        return {k: v for k, v in vars(cls).items() if is_class_attribute(k, v)}

    def write(values: dict) -> None:
        now = read()
        for name in now.keys() - values.keys():
            delattr(cls, name)
        for name, value in values.items():
            if name not in now or now[name] is not value:
                setattr(cls, name, value)

    return Holder(read, write)


def of_names(namespace: dict, names: set[str]) -> Holder:
    """Some of the globals of a Python module."""

    def write(values: dict) -> None:
        for name in names & namespace.keys() - values.keys():
            del namespace[name]
        namespace.update(values)

    return Holder(lambda: {n: namespace[n] for n in names if n in namespace}, write)


def of_context(context: contextvars.Context) -> Holder:
    """The `contextvars` that the call runs with."""

    def write(values: dict) -> None:
        for variable, value in values.items():
            if variable not in context or context[variable] is not value:
                try:
                    context.run(variable.set, value)
                except RuntimeError:  # this runs in the context
                    variable.set(value)

    return Holder(lambda: dict(context.items()), write)


def of_cache(cached: Any, copies: set[int]) -> Holder:
    """What of a `functools.lru_cache` belongs to the trace. Single entries cannot be taken out: all are, then."""

    def of_the_trace() -> list:
        return [v for v in _entries(cached) if isinstance(v, BridgeTensor) or id(v) in copies]

    def read() -> dict:
        return {i: Kept(v) for i, v in enumerate(of_the_trace()) if isinstance(v, BridgeTensor)}

    def write(_: dict) -> None:
        if of_the_trace():
            cached.cache_clear()

    return Holder(read, write)


def _entries(cached: Any) -> list:
    """The arguments and results that it holds."""
    entries = []
    for held in gc.get_referents(cached):
        items = [*held.keys(), *held.values()] if type(held) is dict else [held]
        for item in items:
            entries += item if isinstance(item, (tuple, list)) else [item]
    return entries
