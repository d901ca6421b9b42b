"""Kinds of objects that hold state of the user's code: which ones do, and when two states are equal."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import functools
import random
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge._compat.torch import below_modes
from bridge.tensors import BridgeTensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
GONE = object()


class Order:
    """The place of the order of a dict's keys."""

    def __repr__(self) -> str:
        return "order"


ORDER = Order()

_OURS = ("torch", "torchax", "jax", "jaxlib", "numpy", "builtins", "threading", "logging", "weakref", "functools")
"""Packages whose objects are no state of the module."""
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
PROXIES = weakref.ProxyTypes
MEMORY = (np.ndarray, bytearray, array.array)
RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
CONTAINERS = (dict, list, collections.deque, set, threading.local, *MEMORY, *RANDOM, *WEAK)
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


def is_class_state(name: str, value: Any) -> bool:
    """Whether a call may count on it or change it: no method, property or slot, and not Python's own."""
    return not name.startswith(("__", "_abc_")) and not hasattr(type(value), "__get__") and not isinstance(value, CODE)


def is_class_attribute(name: str, value: Any) -> bool:
    """Whether it is state or code of the class, which a call may replace, and not Python's own."""
    return isinstance(value, types.FunctionType) or not name.startswith(("__", "_abc_"))


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


def referent(value: Any) -> Any:
    """What a `weakref.proxy` stands for, None where that is gone; any other object itself.

    Of a proxy, `isinstance` asks the object, and raises where that is gone.
    """
    if type(value) not in PROXIES:
        return value
    try:
        return value.__init__.__self__  # a bound method of the object
    except ReferenceError:
        return None


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python's own, whose place nobody can read: a generator, `count`, `iter(list)`."""
    return type(value).__module__ in ("builtins", "itertools", "collections") and hasattr(type(value), "__next__")


def equal(a: Any, b: Any) -> bool:
    """Whether the two are the same to whoever reads them. Objects are if they are identical."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in PROXIES:
        return referent(a) is referent(b)
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


def same_order(now: Mapping, then: Mapping) -> bool:
    """Whether two mappings with the same keys have them in the same order."""
    return all(a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(now, then, strict=True))


def unchanged(now: Mapping, then: Mapping, ordered: bool = False) -> bool:
    """Whether both hold the same objects, or states that are equal."""
    return (
        now.keys() == then.keys()
        and (not ordered or same_order(now, then))
        and all(
            now[k] is v or (isinstance(v, (np.ndarray, bytearray, array.array, Drawn)) and equal(now[k], v))
            for k, v in then.items()
        )
    )
