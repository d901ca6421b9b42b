"""A module's tree copied for one call: values shared, slots its own, so that what the call assigns dies with it."""

from __future__ import annotations

import collections
import copy
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bridge.generators import CallGenerator
from bridge.holders import is_iterator
from bridge.tracing import active

COPIED_KINDS = (
    dict, collections.OrderedDict, collections.defaultdict, collections.Counter, list, collections.deque,
    types.SimpleNamespace,
)  # fmt: skip
"""What is copied besides modules, wherever it hangs. Other objects are shared: nobody knows how far one reaches."""


class HeldIterator:
    """What stands in a traced call for an iterator from before it, which a call can neither advance nor rewind."""

    def __iter__(self) -> HeldIterator:
        return self

    def __next__(self) -> Any:
        dispatch = active()
        assert dispatch is not None, "a call runs while it is traced"
        raise dispatch.error(
            "the call advances an iterator that was made before it: each call would find another item in PyTorch",
            "pass the item as an argument, or keep a list and a counter that is a buffer",
        )

    def __getattr__(self, name: str) -> Any:
        """`send`, `throw`."""
        return next(self) if not name.startswith("__") else object.__getattribute__(self, name)


def shadow(module: nn.Module, known: Mapping[int, torch.Tensor]) -> tuple[nn.Module, dict[int, nn.Module], set[int]]:
    """The copy, the copy of every submodule by the id of its original, and the ids of all that was copied.

    Whatever the tree holds twice, its copy holds twice: a list that two submodules share, a module kept beside the
    registry, in a list, as a bound method or in a hook. `known`: what stands for a parameter or buffer, by the id of
    the real one, also where containers hold it.
    """
    copies: dict[int, Any] = dict(known)
    for original in module.modules():
        copies[id(original)] = object.__new__(type(original))
    visit = functools.partial(_copied, copies)
    for original in module.modules():
        _fill(copies[id(original)], original, visit)
    made = {id(copy) for key, copy in copies.items() if key not in known}
    return copies[id(module)], {id(m): copies[id(m)] for m in module.modules()}, made


def _fill(new: Any, original: Any, visit: Callable[[Any], Any]) -> None:
    new.__dict__.update({name: visit(value) for name, value in original.__dict__.items()})


def _copied(copies: dict[int, Any], value: Any) -> Any:  # noqa: C901 (one case for each kind of container)
    known = copies.get(id(value))
    if known is not None:
        return known
    visit = functools.partial(_copied, copies)
    kind = type(value)
    if isinstance(value, nn.Module):  # one that is not registered
        copies[id(value)] = new = object.__new__(kind)
        _fill(new, value, visit)
        return new
    if kind in COPIED_KINDS:
        copies[id(value)] = new = copy.copy(value)
        if kind is types.SimpleNamespace:
            _fill(new, value, visit)
        else:
            if isinstance(value, dict) and any(isinstance(key, torch.Tensor) for key in value):
                new.clear()  # in the same order
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                new[visit(key)] = visit(item)
        return new
    if isinstance(value, torch.Generator):  # to each call it is one that the call has not seeded
        return copies.setdefault(id(value), CallGenerator())
    if kind is set:
        return copies.setdefault(id(value), {visit(item) for item in value})
    if isinstance(value, tuple):
        items = [visit(item) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else kind(items) if kind is tuple else kind(*items)
    if kind is types.MethodType:
        return types.MethodType(visit(value.__func__), visit(value.__self__))
    if kind is functools.partial:
        return functools.partial(visit(value.func), *visit(value.args), **visit(value.keywords))
    if kind is weakref.ref:
        return weakref.ref(visit(value())) if isinstance(value(), nn.Module) else value
    if kind is types.FunctionType and value.__closure__:
        return _with_cells(copies, value)
    return copies.setdefault(id(value), HeldIterator()) if is_iterator(value) else value


def _with_cells(copies: dict[int, Any], function: types.FunctionType) -> types.FunctionType:
    """A closure over modules of the tree, closed over their copies instead."""
    contents = [getattr(cell, "cell_contents", None) for cell in function.__closure__ or ()]
    if not any(id(content) in copies for content in contents if isinstance(content, nn.Module)):
        return function
    cells = [
        types.CellType(copies[id(c)]) if isinstance(c, nn.Module) and id(c) in copies else cell
        for cell, c in zip(function.__closure__ or (), contents, strict=True)
    ]
    code, names, defaults = function.__code__, function.__globals__, function.__defaults__
    new = types.FunctionType(code, names, function.__name__, defaults, tuple(cells))
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    return new
