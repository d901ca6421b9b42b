"""The contents of a call's arguments, and those that the call changes and does not return."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import torch

from bridge.tensor.pytrees import (
    attributes_of,
    built_in,
    convert,
    is_plain_class,
    items_of,
)
from bridge.tensor.tensor import BridgeTensor


class Arguments:
    """The contents of a call's arguments before the call."""

    def __init__(self, method: Callable, args: tuple, kwargs: dict):
        self._containers: list[tuple[Any, Any, dict]] = []
        self._tensors: list[tuple[Any, BridgeTensor, Any, int]] = []
        self._given = method, args, kwargs
        seen: set[int] = set()
        todo: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
        while todo:
            name, value = todo.pop(0)
            if isinstance(value, BridgeTensor):
                self._tensors.append((name, value, value._handle.storage, value._handle.storage.version))
                continue
            items = _items(value)
            if items is not None and id(value) not in seen:
                seen.add(id(value))
                self._containers.append((name, value, items))
                todo += [(name, item) for item in items.values()]

    def changed(self, outputs: Any) -> list[str]:
        """Returns the names of those that the call has changed and does not return."""
        places = [(n, {id(v)}) for n, v, before in self._containers if not _same(_items(v), before)]
        places += [
            (n, {id(storage), id(tensor._handle.storage)})
            for n, tensor, storage, version in self._tensors
            if storage.version != version
        ]
        if not places:
            return []
        returned = _contents(outputs)
        names: dict[Any, str] = dict(enumerate(_names(*self._given)))
        return list(dict.fromkeys(names.get(n, str(n)) for n, ids in places if not ids & returned))


def _names(method: Callable, args: tuple, kwargs: dict) -> Iterator[str]:
    """Yields the names of the positional arguments in the signature."""
    parameters = [*parameters_of(getattr(method, "forward", method)).values()]
    for i in range(len(args)):
        known = i < len(parameters) and parameters[i].kind is not inspect.Parameter.VAR_POSITIONAL
        yield parameters[i].name if known else f"argument {i}"


def parameters_of(method: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):
        return {}


def _items(value: Any) -> dict | None:
    """Returns the items of a container or the attributes of an object; None for anything else."""
    if built_in(type(value)):
        return dict(items_of(value))
    if is_plain_class(type(value)) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return dict(attributes_of(value))
    return None


def _same(now: dict | None, before: dict) -> bool:
    return now is not None and [*now] == [*before] and all(now[key] is before[key] for key in now)


def _contents(outputs: Any) -> set[int]:
    """Returns the ids of the containers among the results, and of the memory of the tensors."""
    found: set[int] = set()
    todo = [outputs]
    while todo:
        value = todo.pop()
        items = _items(value)
        if items is not None and id(value) not in found:
            found.add(id(value))
            todo += items.values()
    leaves = jax.tree.leaves(convert(outputs, lambda v: v, objects=True), is_leaf=lambda v: isinstance(v, torch.Tensor))
    return found | {id(t._handle.storage) for t in leaves if isinstance(t, BridgeTensor)}
