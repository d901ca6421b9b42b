"""What the code of a module may reach besides the module: classes, functions, closures, globals, all by their names.

Only the user's own code is read, not that of installed packages. Which function calls which is decided by names alone:
a function is reached if a reached one uses its name. That is more than what runs and costs one pass for each export.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import os
import sys
import sysconfig
import types
from typing import Any

import torch
from torch import nn

from bridge.errors import FRAMEWORK
from bridge.held_objects import CONTAINERS, PLAIN, RECORDS, is_class_state, is_iterator, is_plain_object, referent
from bridge.holders import of_cells, of_object
from bridge.pytrees import items_of

LARGE = 1000
"""Items from which a container outside the module is compared item by item, but not what is in them."""

_STORES = dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_BY_TEXT = {"getattr", "__getattribute__", "attrgetter", "methodcaller"}
"""Names of functions that reach any method."""
_CACHES = type(functools.lru_cache(lambda: None))
_WRAPPED = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    _CACHES: ("__wrapped__",),
}
"""What holds code -> the attributes that it is in."""


@dataclasses.dataclass
class Reached:
    """All that is there by the time of the first call."""

    classes: list[type] = dataclasses.field(default_factory=list)
    functions: list[types.FunctionType] = dataclasses.field(default_factory=list)
    globals: dict[str, tuple[dict, set[str]]] = dataclasses.field(default_factory=dict)
    """Python module -> (its names, those of them that hold state)."""
    caches: list[Any] = dataclasses.field(default_factory=list)
    """`functools.lru_cache`"""


def reached_by(module: nn.Module, method: str) -> Reached:
    """What a call of the method may reach."""
    walk = _Walk(module)
    walk.names({method, "forward"})
    walk.run()
    return walk.reached


class _Walk:
    def __init__(self, module: nn.Module):
        self.reached = Reached()
        self._seen: dict[int, Any] = {}
        self._todo: list[Any] = list(module.modules())
        self._names: set[str] = set()
        self._waiting: dict[str, list] = collections.defaultdict(list)
        """Code that nobody has named so far."""

    def run(self) -> None:
        while self._todo:
            value = referent(self._todo.pop())
            if isinstance(value, (*PLAIN, torch.Tensor)) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._visit(value)

    def names(self, names: set[str]) -> None:
        self._names |= names
        for name in self._waiting.keys() if self._names & _BY_TEXT else self._waiting.keys() & names:
            self._todo += self._waiting[name]
            self._waiting[name] = []

    def _visit(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif type(value) in _WRAPPED:
            if type(value) is _CACHES and is_own_code(value.__wrapped__):
                self.reached.caches.append(value)
            self._todo += [getattr(value, name) for name in _WRAPPED[type(value)]]
        elif isinstance(value, dict):
            items = [item for _, item in items_of(value)]
            self._todo += items if len(items) < LARGE else ()
        elif isinstance(value, (list, tuple, set, collections.deque)):
            items = list(value) if isinstance(value, set) else [item for _, item in items_of(value)]
            self._todo += items if len(items) < LARGE else ()
        elif isinstance(value, nn.Module) or is_plain_object(value):
            self._todo.append(type(value))
            if isinstance(value, nn.Module) or is_own_class(type(value)):
                self._todo += of_object(value).original.values()

    def _visit_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if not is_own_class(base) or (base is not cls and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            self.reached.classes.append(base)
            for name, value in vars(base).items():
                special = name.startswith("__") and name.endswith("__")
                if special or is_class_state(name, value) or name in self._names or self._names & _BY_TEXT:
                    self._todo.append(value)
                else:
                    self._waiting[name].append(value)

    def _visit_function(self, function: types.FunctionType) -> None:
        contents = list(of_cells(function).original.values()) if function.__closure__ else []
        if not is_own_code(function):  # a decorator's, around the user's own
            holds_code = (types.FunctionType, *_WRAPPED)
            self._todo += [v for v in (getattr(function, "__wrapped__", None), *contents) if isinstance(v, holds_code)]
            return
        self.reached.functions.append(function)
        self._todo += [*contents, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._todo += function.__dict__.values()
        used, stored = _names_of(function.__code__)
        self._visit_globals(function.__globals__, used, stored)
        self.names(used)

    def _visit_globals(self, namespace: dict, used: set[str], stored: set[str]) -> None:
        for name in used & namespace.keys() | stored:
            value = namespace.get(name)
            if isinstance(value, types.ModuleType):
                if value.__name__ != namespace.get("__name__") and _is_own_module(value.__name__):
                    inner = vars(value)
                    self._visit_globals(inner, used - {name}, {n for n in used & inner.keys() if _is_number(inner[n])})
                continue
            if name in stored or _is_state(value):
                home = self.reached.globals.setdefault(namespace.get("__name__", "globals"), (namespace, set()))
                home[1].add(name)
            self._todo.append(value)


def _names_of(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The names that the code and what is defined in it use, and the globals that they store."""
    used, stored = set(code.co_names), set()
    if any(op in code.co_code[::2] for op in _STORES):
        stored = {i.argval for i in dis.get_instructions(code) if i.opcode in _STORES}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_used, inner_stored = _names_of(constant)
            used, stored = used | inner_used, stored | inner_stored
    return used, stored


def _is_state(value: Any) -> bool:
    """Whether it is an object that may be another after a call, whatever name it has."""
    value = referent(value)
    if isinstance(value, (*CONTAINERS, *RECORDS)) or is_iterator(value):
        return True
    return (isinstance(value, nn.Module) or is_plain_object(value)) and is_own_class(type(value))


def _is_number(value: Any) -> bool:
    return isinstance(referent(value), (bool, int, float, complex))


def is_own_code(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and _is_own_file(code.co_filename)


@functools.cache
def _is_own_file(path: str) -> bool:
    installed = "site-packages" in path or "dist-packages" in path or path.startswith(_LIBRARIES)
    return not installed and not path.startswith((*FRAMEWORK, "<frozen"))


def is_own_class(cls: type) -> bool:
    """Whether the user wrote it: no class of Python, of a framework, or of an installed package."""
    return _is_own_module(cls.__module__)


@functools.cache
def _is_own_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return _is_own_file(file) if file else name.partition(".")[0] not in sys.stdlib_module_names
