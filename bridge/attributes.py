"""State that a module keeps outside its parameters and buffers, and what becomes of it after a call.

A call is a pure function of parameters, buffers and inputs, so what it puts into attributes, lists or objects is gone
with it. That is harmless where no later call would read it, and another model where one would. `check_left` tells the
two apart: it traces the module again, from the state that the call left. The same program means that nothing reads it.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import types
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
from bridge.internals import Tracer, below_modes
from bridge.pytrees import convert
from bridge.tensors import BridgeTensor, blank, fresh

Place = tuple[str, Any]
"""(what holds the value, by its path from the module; the key in it)."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_OURS = ("torch", "torchax", "jax", "jaxlib", "numpy", "builtins", "threading", "logging", "weakref", "functools")
"""Packages whose objects are no state of the module."""
_GONE = object()


@dataclasses.dataclass
class _Holder:
    """Something with named or numbered contents: `read` gives them now, `write` puts others there."""

    read: Callable[[], dict]
    write: Callable[[dict], None]
    shared: bool
    """Whether the original holds it too."""
    before: dict


class Attributes:
    """What a copied module tree holds besides parameters and buffers, as it was before the call."""

    def __init__(self, modules: Mapping[str, nn.Module], slots: set[tuple[int, str]]):
        """`modules`: the copies by qualified name. `slots`: (id of a copy, name) of its parameters and buffers."""
        self._holders: dict[str, _Holder] = {}
        self._seen: set[int] = set()
        known: dict[int, set] = collections.defaultdict(set)
        for owner, slot in slots:
            known[owner].add(slot)
        for name, module in modules.items():
            self._seen.add(id(module))
            for registry in _REGISTRIES:
                self._add_dict(f"{name}.{registry}", getattr(module, registry), False, known[id(module)])
            self._add_dict(name, module.__dict__, False, set(_REGISTRIES))
            if module._parameters:
                self._add_flags(f"{name}.requires_grad", module._parameters)
        for name, module in modules.items():
            for key, value in list(module.__dict__.items()):
                if key not in _REGISTRIES:
                    self._visit(f"{name}.{key}", value, shared=False)

    def _add_dict(self, path: str, contents: Any, shared: bool, without: set) -> None:
        def read() -> dict:
            return {k: v for k, v in contents.items() if k not in without}

        def write(values: dict) -> None:
            for key in read().keys() - values.keys():
                del contents[key]
            contents.update(values)

        self._holders[path] = _Holder(read, write, shared, read())

    def _add_flags(self, path: str, parameters: Mapping[str, Any]) -> None:
        """Whether each parameter is frozen, which a call may change as well."""

        def read() -> dict:
            return {name: p.requires_grad for name, p in parameters.items() if p is not None}

        def write(values: dict) -> None:
            for name, wanted in values.items():
                parameters[name].requires_grad_(wanted)

        self._holders[path] = _Holder(read, write, False, read())

    def _add_sequence(self, path: str, contents: Any, shared: bool) -> None:
        def write(values: dict) -> None:
            contents.clear()
            contents.extend(values.values()) if hasattr(contents, "extend") else contents.update(values.values())

        def read() -> dict:
            return dict(enumerate(contents))

        self._holders[path] = _Holder(read, write, shared, read())

    def _visit(self, path: str, value: Any, shared: bool) -> None:
        if type(value) is tuple:
            for i, item in enumerate(value):
                self._visit(f"{path}[{i}]", item, shared)
            return
        if isinstance(value, (*_PLAIN, torch.Tensor, nn.Module)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            self._add_dict(path, value, shared, set())
        elif isinstance(value, (list, collections.deque, set)):
            self._add_sequence(path, value, shared)
        elif _is_plain_object(value):
            shared = shared or type(value) is not types.SimpleNamespace  # which is copied
            self._add_dict(path, value.__dict__, shared, set())
        else:
            return
        for key, item in self._holders[path].before.items():
            self._visit(f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]", item, shared)

    def changes(self) -> dict[Place, Any]:
        """What is not as it was before the call; `_GONE` for what is not there any more."""
        changed = {}
        for path, holder in self._holders.items():
            now = holder.read()
            for key in [*now, *(k for k in holder.before if k not in now)]:
                value = now.get(key, _GONE)
                if not _equal(holder.before.get(key, _GONE), value):
                    changed[path, key] = value
        return changed

    def set(self, values: Mapping[Place, Any]) -> None:
        """Start the call from other values."""
        for (path, key), value in values.items():
            if path in self._holders:
                holder = self._holders[path]
                contents = holder.read() | {key: value}
                holder.write({k: v for k, v in contents.items() if v is not _GONE})
                holder.before = holder.read() if not holder.shared else holder.before

    def restore(self) -> None:
        """Give objects that the original holds as well their contents back."""
        for holder in self._holders.values():
            if holder.shared:
                now = holder.read()
                if now.keys() != holder.before.keys() or any(now[k] is not v for k, v in holder.before.items()):
                    holder.write(holder.before)


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType)) or callable(value):
        return False
    return hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _OURS


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor) and not isinstance(a, BridgeTensor):
        with below_modes():
            return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return isinstance(a, _PLAIN) and a == b


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
    if before != after:
        readers = [p for p in changes if _program(trace, _started({p: changes[p]}))[0] != before] or list(changes)
        raise BridgeError(
            f"the call changes {_listed(readers)} and a later call would read it, but a call keeps parameters and "
            "buffers only; make it a buffer, or pass it in and return it"
        )
    lost = [p for p, value in changes.items() if _holds_traced(value) or p in left]
    fresh_ones = set(map(_name, lost)) - _WARNED.setdefault(module, set())
    if fresh_ones:
        _WARNED[module] |= fresh_ones
        said = f"the call writes {_listed(lost)}, which is lost with it: the module keeps what it had"
        warnings.warn(BridgeWarning(said), stacklevel=2)


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

    return {place: value if value is _GONE else convert(value, leaf) for place, value in changes.items()}


def _holds_traced(value: Any) -> bool:
    return any(isinstance(leaf, BridgeTensor) for leaf in jax.tree.leaves(convert(value, lambda v: v)))


def _name(place: Place) -> str:
    path, key = place
    path = ".".join(part for part in path.split(".") if part and part not in _REGISTRIES)
    return ".".join(p for p in (path, str(key)) if p) if isinstance(key, str) else f"{path}[{key!r}]"


def _listed(places: list[Place]) -> str:
    names = list(dict.fromkeys(map(_name, places)))
    return ", ".join(f"`{n}`" for n in names[:5]) + (" …" if len(names) > 5 else "")
