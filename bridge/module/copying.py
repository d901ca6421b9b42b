"""Copies of a module: one with traced tensors for each traced call, and those that `verify` works on.

Modules, containers and objects whose state is their attributes are copied at any depth, so the call's assignments are
lost with the copy. Whatever a module holds twice, its copy holds twice.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bridge._compat.torch import base_of
from bridge.dispatch.random import CallGenerator
from bridge.errors import BridgeError
from bridge.tensor.pytrees import (
    ATOMS,
    attributes_of,
    built_in,
    empty_like,
    is_plain_class,
    items_of,
    put_items,
    tuple_of,
)
from bridge.tensor.tensor import INTERNAL, BridgeTensor


def shadow(
    module: nn.Module, known: Mapping[int, torch.Tensor], reals: Iterable[torch.Tensor]
) -> tuple[nn.Module, dict[int, Any]]:
    """Returns the copy for one call, and a dict from the ids of originals to everything copied with it.

    `known`: what replaces a parameter or buffer, by the id of the real one, wherever modules and containers hold it.
    What replaces one of `reals` gets copies of its attributes. Other tensors, and objects that hold state elsewhere
    than in attributes, are shared.
    """
    copier = _Copier(known, _shared)
    copied = copier.copied_tree(module)
    for real in reals:
        attributes = vars(known[id(real)])
        for name, item in vars(real).items():
            if name not in INTERNAL:
                attributes[name] = copier.visit(item)
    return copied, copier.copies


def independent(module: nn.Module) -> nn.Module:
    """Returns a copy that shares no tensor with the module; tensors that share memory do so in the copy.

    A tensor that a hook computed from parameters (pruning, weight norm) is copied by value: PyTorch copies no results.
    Objects that Python cannot copy, such as a lock or an open file, are shared.
    """
    return _Copier({}, _duplicate).copied_tree(module)


def _shared(copier: _Copier, value: Any) -> Any:
    if isinstance(value, torch.Generator):  # each call treats it as a generator that it has not seeded
        return copier.copies.setdefault(id(value), CallGenerator())
    return value


def _duplicate(copier: _Copier, value: Any) -> Any:
    base = base_of(value) if isinstance(value, torch.Tensor) else None
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        new = value.detach().clone()
    elif base is not None:  # autograd follows a write into the base to the view
        new = copier.visit(base).as_strided(value.size(), value.stride(), value.storage_offset())
    elif type(value) is nn.Parameter:  # `deepcopy` would drop its attributes and separate shared memory
        new = nn.Parameter(copy.deepcopy(value.detach(), copier.copies), value.requires_grad)
        vars(new).update({name: copier.visit(item) for name, item in vars(value).items()})
    else:
        attempt = dict(copier.copies)
        try:
            new = copy.deepcopy(value, attempt)
        except Exception:
            return value
        copier.alive += attempt.pop(id(attempt), [])
        copier.copies |= attempt
    copier.copies[id(value)] = new
    return new


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


class _Copier:
    """Copies a module. `copies` maps ids of originals to copies, like the memo of `copy.deepcopy`.

    `other` converts tensors that are not in `copies`, and everything that is not copied here.
    """

    def __init__(self, known: Mapping[int, Any], other: Callable[[_Copier, Any], Any]):
        self.copies = dict(known)
        self.alive: list[Any] = []
        """Originals that are kept alive so that their ids stay unique."""
        self._other = other

    def copied_tree(self, module: nn.Module) -> Any:
        submodules = list(module.modules())
        for original in submodules:
            self.copies[id(original)] = object.__new__(type(original))
        for original in submodules:
            self._fill(self.copies[id(original)], original)
        return self.copies[id(module)]

    def visit(self, value: Any) -> Any:
        """Returns the copy of the value; the value itself if nothing in it is copied."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if id(value) in self.copies:
            return self.copies[id(value)]
        if kind in _BY_KIND:
            return _BY_KIND[kind](self, value)
        if kind is set:
            return self.copies.setdefault(id(value), set(map(self.visit, value)))
        if kind is dict or kind is collections.OrderedDict:
            self.copies[id(value)] = new = kind()
            for key, item in value.items():
                new[key if type(key) is str else self.visit(key)] = item if type(item) in ATOMS else self.visit(item)
            return new
        if issubclass(kind, (tuple, frozenset)):
            return self._fixed(value)
        if built_in(kind):
            self.copies[id(value)] = new = empty_like(value)
            put_items(new, [(self.visit(key), self.visit(item)) for key, item in items_of(value)])
            return self._fill(new, value)
        if issubclass(kind, nn.Module) or (is_plain_class(kind) and not kind.__module__.startswith("torch.")):
            self.copies[id(value)] = new = empty_like(value)
            return self._fill(new, value)
        return self._other(self, value)

    def _fill(self, new: Any, original: Any) -> Any:
        for name, item in attributes_of(original).items():
            vars(new)[name] = item if type(item) in ATOMS else self.visit(item)
        return new

    def _fixed(self, value: Any) -> Any:
        if isinstance(value, tuple):
            items = [item for _, item in items_of(value)]
        else:
            items = list(value)
        new = [self.visit(item) for item in items]
        if _same(items, new):
            return value
        if isinstance(value, tuple):
            return self._fill(tuple_of(type(value), new), value)
        return type(value)(new)

    def _method(self, value: types.MethodType) -> types.MethodType:
        old = value.__func__, value.__self__
        new = self.visit(old[0]), self.visit(old[1])
        if _same(old, new):
            return value
        return types.MethodType(*new)

    def _partial(self, value: functools.partial) -> functools.partial:
        old = [value.func, *value.args, *value.keywords.values()]
        new = [self.visit(part) for part in old]
        if _same(old, new):
            return value
        count = len(value.args) + 1
        copied = functools.partial(*new[:count], **dict(zip(value.keywords, new[count:], strict=True)))
        return self._fill(copied, value)

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """Returns a closure over copied values with the copies in their place.

        This includes closures that wrap a method, such as those of `torch.compile` and `torch.no_grad()(self.step)`.
        """
        if not value.__closure__:
            return value
        self.copies[id(value)] = value  # it may enclose itself
        cells = tuple(map(self.visit, value.__closure__))
        if _same(cells, value.__closure__):
            return value
        new = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, self.visit(value.__defaults__), cells
        )
        new.__kwdefaults__ = self.visit(value.__kwdefaults__)
        new.__dict__.update(value.__dict__)
        self.copies[id(value)] = new
        return new

    def _cell(self, value: types.CellType) -> types.CellType:
        self.copies[id(value)] = value
        try:
            content = self.visit(value.cell_contents)
        except ValueError:  # the cell is empty
            return value
        if content is not value.cell_contents:
            self.copies[id(value)] = types.CellType(content)
        return self.copies[id(value)]

    def _weak(self, value: Any) -> Any:
        is_proxy = type(value) in weakref.ProxyTypes
        try:
            target = value.__init__.__self__ if is_proxy else value()
        except ReferenceError:
            return value
        if isinstance(target, (nn.Module, torch.Tensor)):
            new = self.visit(target)
        else:
            new = target
        if new is target:
            return value
        return (weakref.proxy if is_proxy else weakref.ref)(new)

    def _weak_dict(self, value: Any) -> Any:
        self.copies[id(value)] = new = type(value)()
        for key, item in list(value.items()):
            new[self.visit(key)] = self.visit(item)
        return new

    def _handle(self, value: RemovableHandle) -> RemovableHandle:
        """Returns a handle that removes the hook from the copy of its module."""
        self.copies[id(value)] = new = object.__new__(RemovableHandle)
        new.__setstate__(self.visit(value.__getstate__()))
        return new


_BY_KIND: dict[type, Callable[[_Copier, Any], Any]] = {
    types.MethodType: _Copier._method,
    types.FunctionType: _Copier._function,
    types.CellType: _Copier._cell,
    functools.partial: _Copier._partial,
    weakref.ref: _Copier._weak,
    weakref.WeakKeyDictionary: _Copier._weak_dict,
    weakref.WeakValueDictionary: _Copier._weak_dict,
    **dict.fromkeys(weakref.ProxyTypes, _Copier._weak),
    RemovableHandle: _Copier._handle,
}


def override(module: nn.Module, copies: Iterable[Any], name: str, number: BridgeTensor) -> None:
    """Sets a number in an attribute of the copy of a module, or of an object that was copied with it."""
    *path, last = name.split(".")
    owner: Any = module
    for depth, step in enumerate(path):
        if not hasattr(owner, step):
            raise BridgeError(_no_number(name, ".".join(path[:depth]), owner, step))
        owner = getattr(owner, step)
    if not isinstance(getattr(owner, last, None), (bool, int, float)):
        raise BridgeError(_no_number(name, ".".join(path), owner, last))
    if all(owner is not each for each in copies):
        raise BridgeError(
            f"the override {name} names a number in a {type(owner).__name__}, which keeps its state elsewhere than in "
            "attributes and is not copied for a call; keep the number in the module"
        )
    object.__setattr__(owner, last, number)


def _no_number(name: str, place: str, owner: Any, step: str) -> str:
    if hasattr(owner, step):
        found = f"is {getattr(owner, step)!r}"
    else:
        found = "is not there"
    numbers = sorted(k for k, v in attributes_of(owner).items() if type(v) in (int, float) and not k.startswith("_"))
    return (
        f"the override {name} names no number: {step} {found} in {place or 'the module'} ({type(owner).__name__}); "
        f"numbers there: {', '.join(numbers) or 'none'}"
    )


def name_calls(modules: Mapping[str, nn.Module]) -> None:
    """Makes calls of each module run under `jax.named_scope("layers.0[Block]")`: its qualified name and its class.

    Profiles and compiled programs show the scope. It is set on the modules themselves, which are copies for one call.
    """
    for name, module in modules.items():
        if getattr(type(module), "forward", None) in (None, nn.Module.forward):  # a container
            continue
        forward = module.forward
        scoped = jax.named_scope(f"{name}[{type(module).__name__}]")(forward)
        module.__dict__["forward"] = functools.update_wrapper(scoped, forward)
