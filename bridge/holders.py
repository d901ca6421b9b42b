"""Kinds of objects with contents that a call may change: how each is read, compared and written back."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import dataclasses
import functools
import gc
import random
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.internals import below_modes
from bridge.tensors import BridgeTensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
GONE = object()

COPIED = 10**7
"""Elements up to which the memory of an array is copied before a call. Of a larger one only a checksum is kept, so a
change is refused and cannot be taken back."""

_OURS = ("torch", "torchax", "jax", "jaxlib", "numpy", "builtins", "threading", "logging", "weakref", "functools")
"""Packages whose objects are no state of the module."""
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_MEMORY = (np.ndarray, bytearray, array.array)
_WRITEABLE = np.empty(0).flags
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
CONTAINERS = (dict, list, collections.deque, set, threading.local, *_MEMORY, *_RANDOM, *_WEAK)
RECORDS = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap)
"""Objects of Python's own that hold what the user puts there."""
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType, functools.partial)
"""What is run or looked into by name, and holds no state that is its own."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The state of a generator of random numbers."""

    state: Any


@dataclasses.dataclass(frozen=True)
class Kept:
    """A traced value that a `functools.lru_cache` keeps: a later call would find it."""

    value: Any


class Holder:
    """Named or numbered contents: `read` gives them, `write` puts others there; `nested` ones have contents in turn.

    One that is `shared` belongs to the user and gets its `original` contents back. `before`: at the start of the run.
    """

    __slots__ = ("before", "nested", "original", "read", "shared", "write")

    def __init__(self, read: Callable[[], dict], write: Callable[[dict], None], nested: bool = True):
        self.read, self.write, self.nested, self.shared = read, write, nested, True
        self.original = self.before = read()


def holder_of(value: Any) -> Holder | None:
    """What holds the contents of an object, by its kind; None for one without any."""
    if isinstance(value, dict):
        return of_dict(value)
    if isinstance(value, (list, collections.deque, set)):
        return _of_sequence(value)
    if isinstance(value, _MEMORY):
        return _of_memory(value) if getattr(value, "flags", _WRITEABLE).writeable else None
    if isinstance(value, _RANDOM) and not isinstance(value, random.SystemRandom):
        return _of_random(value)
    if isinstance(value, _WEAK):
        return of_dict(vars(value)["data"])
    if isinstance(value, threading.local):
        return of_dict(value.__dict__)
    return of_object(value) if is_plain_object(value) else None


def of_dict(contents: Any) -> Holder:
    return Holder(functools.partial(dict, contents), functools.partial(_write_dict, contents))


def _write_dict(contents: Any, values: dict) -> None:
    gone = contents.keys() - values.keys()
    if gone and not values.keys() <= contents.keys():  # a key for another one, in its place
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


def _of_sequence(contents: Any) -> Holder:
    def write(values: dict) -> None:
        contents.clear()
        contents.extend(values.values()) if hasattr(contents, "extend") else contents.update(values.values())

    return Holder(lambda: dict(enumerate(contents)), write)


def of_object(value: Any) -> Holder:
    """The attributes of an object, `__slots__` included."""
    slots = slots_of(type(value))
    if not slots:
        return of_dict(value.__dict__)
    own = value.__dict__ if type(value).__dictoffset__ else {}

    def read() -> dict:
        return {name: item for name in slots if (item := _slot(value, name)) is not GONE} | own

    def write(values: dict) -> None:
        for name in read().keys() - values.keys():
            object.__delattr__(value, name)
        for name, item in values.items():
            object.__setattr__(value, name, item)

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
    """The attributes of a class that are no code."""

    def read() -> dict:
        return {k: v for k, v in vars(cls).items() if is_class_state(k, v)}

    def write(values: dict) -> None:
        now = read()
        for name in now.keys() - values.keys():
            delattr(cls, name)
        for name, value in values.items():
            if name not in now or now[name] is not value:
                setattr(cls, name, value)

    return Holder(read, write)


def is_class_state(name: str, value: Any) -> bool:
    """Whether a call may count on it or change it: no method, property or slot, and not Python's own."""
    return not name.startswith(("__", "_abc_")) and not hasattr(type(value), "__get__") and not isinstance(value, CODE)


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


@functools.cache
def slots_of(cls: type) -> tuple[str, ...]:
    """The names in `__slots__` of the class and its bases."""
    names: list[str] = []
    for base in cls.__mro__:
        own = vars(base).get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


def is_plain_object(value: Any) -> bool:
    """Whether it is an object with attributes that Python code wrote, and no part of a framework."""
    if isinstance(value, (*CODE, nn.Module, torch.Tensor)) or not (type(value).__dictoffset__ or slots_of(type(value))):
        return False
    return type(value).__module__.partition(".")[0] not in _OURS


def inside(value: Any) -> dict | None:
    """What hangs on something that has no contents of its own to change; None for other kinds of objects."""
    if type(value) is tuple:
        return dict(enumerate(value))
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {"": value.__self__}
    return {"": value()} if isinstance(value, weakref.ref) else None


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python's own, whose place nobody can read: a generator, `count`, `iter(list)`."""
    return type(value).__module__ in ("builtins", "itertools", "collections") and hasattr(type(value), "__next__")


def equal(a: Any, b: Any) -> bool:
    """Whether the two are the same to whoever reads them. Objects are if they are identical."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return not isinstance(a, BridgeTensor) and _equal_tensors(a, b)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return len(a) == len(b) and all(k in b and equal(v, b[k]) for k, v in a.items())
    if isinstance(a, np.ndarray):
        if a.dtype.hasobject:
            return a.shape == b.shape and equal(a.tolist(), b.tolist())
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()
    if isinstance(a, Drawn):
        return equal(a.state, b.state)
    return isinstance(a, (*PLAIN, set, frozenset, bytearray, array.array, np.generic)) and bool(a == b)


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    with below_modes():
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def unchanged(now: Mapping, then: Mapping) -> bool:
    """Whether both hold the same objects, or states that are equal."""
    return now.keys() == then.keys() and all(
        now[k] is v or (isinstance(v, (np.ndarray, bytearray, array.array, Drawn)) and equal(now[k], v))
        for k, v in then.items()
    )
