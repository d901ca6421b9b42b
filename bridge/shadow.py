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
from torch.utils.hooks import RemovableHandle

from bridge.generators import CallGenerator
from bridge.held_objects import PROXIES, is_iterator, referent
from bridge.tracing import active

COPIED_KINDS = (
    dict, collections.OrderedDict, collections.defaultdict, collections.Counter, list, collections.deque,
    types.SimpleNamespace,
)  # fmt: skip
"""What is copied besides modules, wherever it hangs. Other objects are shared: nobody knows how far one reaches."""

_ATOMS = frozenset({str, float, bool, bytes, type(None), torch.Size, torch.dtype, torch.device})
"""What holds nothing."""


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


def shadow(
    module: nn.Module, known: Mapping[int, torch.Tensor]
) -> tuple[nn.Module, dict[int, nn.Module], dict[int, Any]]:
    """The copy, the copy of every submodule by the id of its original, and the same of all that was copied or `known`.

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
    return copies[id(module)], {id(m): copies[id(m)] for m in module.modules()}, copies


def with_copies(copies: dict[int, Any], value: Any) -> Any:
    """What an object that is not copied holds during the call instead of `value`: `value`, where that was not copied.

    Containers that were not copied belong to somebody else as well and stay.
    """
    known = copies.get(id(value))
    if known is not None or type(value) in _ATOMS:
        return value if known is None else known
    return _rebuilt(copies, value, functools.partial(with_copies, copies))


def _fill(new: Any, original: Any, visit: Callable[[Any], Any]) -> None:
    new.__dict__.update({name: visit(value) for name, value in original.__dict__.items()})


def _copied(copies: dict[int, Any], value: Any) -> Any:
    known = copies.get(id(value))
    if known is not None or type(value) in _ATOMS:
        return value if known is None else known
    visit = functools.partial(_copied, copies)
    kind = type(value)
    if kind not in PROXIES and isinstance(value, nn.Module):  # one that is not registered
        copies[id(value)] = new = object.__new__(kind)
        _fill(new, value, visit)
        return new
    if kind in COPIED_KINDS:
        copies[id(value)] = new = copy.copy(value)
        if kind is types.SimpleNamespace:
            _fill(new, value, visit)
        else:
            if isinstance(value, dict) and any(visit(key) is not key for key in value):
                new.clear()  # in the same order
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                new[visit(key)] = visit(item)
        return new
    if isinstance(value, torch.Generator):  # to each call it is one that the call has not seeded
        return copies.setdefault(id(value), CallGenerator())
    if kind is set:
        return copies.setdefault(id(value), {visit(item) for item in value})
    if is_iterator(value):
        return copies.setdefault(id(value), HeldIterator())
    return _rebuilt(copies, value, visit)


def _rebuilt(copies: dict[int, Any], value: Any, visit: Callable[[Any], Any]) -> Any:
    """Another one of what cannot be changed, holding `visit` of what `value` holds; `value`, where that is the same."""
    kind = type(value)
    if kind is weakref.ref or kind in PROXIES:
        target = value() if kind is weakref.ref else referent(value)
        new = visit(target) if isinstance(target, (nn.Module, torch.Tensor)) else target
        return value if new is target else weakref.ref(new) if kind is weakref.ref else weakref.proxy(new)
    if kind is RemovableHandle:
        return _handle(copies, value, visit)
    if kind is int:  # `rates[id(self.weight)]`
        return id(copies[value]) if value in copies else value
    if isinstance(value, (tuple, frozenset)):
        items = [visit(item) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else kind(*items) if hasattr(kind, "_fields") else kind(items)
    if kind is types.MethodType:
        owner, function = visit(value.__self__), visit(value.__func__)
        same = owner is value.__self__ and function is value.__func__
        return value if same else types.MethodType(function, owner)
    if kind is functools.partial:
        parts = value.func, *value.args, *value.keywords.values()
        new, given = visit(parts), len(value.args) + 1
        keywords = dict(zip(value.keywords, new[given:], strict=True))
        return value if new is parts else functools.partial(*new[:given], **keywords)
    return _with_cells(copies, value) if kind is types.FunctionType and value.__closure__ else value


def _handle(copies: dict[int, Any], handle: RemovableHandle, visit: Callable[[Any], Any]) -> RemovableHandle:
    """One that removes the hook from the copy of its module."""
    hooks, number, others = handle.hooks_dict_ref(), handle.id, [ref() for ref in handle.extra_dict_ref]
    registries = [registry for registry in (hooks, *others) if registry is not None]
    copied = [visit(registry) for registry in registries]
    if hooks is None or all(a is b for a, b in zip(registries, copied, strict=True)):
        return handle
    copies[id(handle)] = new = object.__new__(RemovableHandle)
    new.__setstate__((copied[0], number, tuple(copied[1:])))
    return new


def _in_cell(copies: dict[int, Any], content: Any) -> Any:
    if type(content) in PROXIES:
        return with_copies(copies, content)
    if isinstance(content, (nn.Module, torch.Tensor)):
        return copies.get(id(content), content)
    if isinstance(content, (types.MethodType, functools.partial)):
        return with_copies(copies, content)
    if isinstance(content, types.FunctionType) and content.__closure__ and id(content) not in copies:
        copies[id(content)] = content  # it may hold itself
        new = _with_cells(copies, content)
        del copies[id(content)]
        return new
    return content


def _with_cells(copies: dict[int, Any], function: types.FunctionType) -> types.FunctionType:
    """A closure over what was copied, closed over the copies instead.

    Also one that wraps a method, as those of `torch.compile` and `torch.no_grad()(self.step)` do.
    """
    old = [getattr(cell, "cell_contents", None) for cell in function.__closure__ or ()]
    new_contents = [_in_cell(copies, content) for content in old]
    if all(a is b for a, b in zip(old, new_contents, strict=True)):
        return function
    cells = [
        cell if a is b else types.CellType(b)
        for cell, a, b in zip(function.__closure__ or (), old, new_contents, strict=True)
    ]
    defaults = with_copies(copies, function.__defaults__)
    new = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, tuple(cells))
    given = function.__kwdefaults__
    new.__kwdefaults__ = given and {name: with_copies(copies, value) for name, value in given.items()}
    new.__dict__.update(function.__dict__)
    return new
