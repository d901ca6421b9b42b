"""Arguments that a call changes: in PyTorch the caller has the changed ones, here only if the call returns them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from bridge.errors import BridgeError
from bridge.pytrees import attributes_of, built_in, convert, is_plain_class, items_of
from bridge.tensors import BridgeTensor


class Arguments:
    """What the arguments of a call hold before it."""

    def __init__(self, method: Callable, args: tuple, kwargs: dict):
        self._containers: list[tuple[str, Any, Any]] = []
        self._tensors: list[tuple[str, BridgeTensor, Any, int]] = []
        self._seen: set[int] = set()
        for name, value in _named(method, args, kwargs):
            self._visit(name, value)

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, BridgeTensor):
            self._tensors.append((name, value, value._cell.storage, value._cell.version))
            return
        items = _items(value)
        if items is not None and id(value) not in self._seen:
            self._seen.add(id(value))
            self._containers.append((name, value, items))
            for item in items.values():
                self._visit(name, item)

    def changed(self, outputs: Any) -> list[str]:
        """The names of those that the call has changed and does not return."""
        containers, storages = _contents(outputs)
        names = [
            name
            for name, value, before in self._containers
            if id(value) not in containers and not _same(_items(value), before)
        ]
        names += [
            name
            for name, tensor, storage, version in self._tensors
            if storage.version != version and not {id(storage), id(tensor._cell.storage)} & storages
        ]
        return list(dict.fromkeys(names))


def refuse_shared(inputs: list[tuple[Any, BridgeTensor]]) -> None:
    """`inputs`: (array, what the code got for it). PyTorch's arguments may share memory, and arrays do not.

    Under `jit` each argument is a tracer of its own, so what is seen here is not seen there.
    """
    seen: dict[int, BridgeTensor] = {}
    for array, tensor in inputs:
        first = seen.setdefault(id(array), tensor)
        if first is not tensor and (first._cell.version or tensor._cell.version):
            raise BridgeError(SHARED)


SHARED = (
    "two arguments are one array and the call writes into it, but each argument has memory of its own here; pass a copy"
)


def _named(method: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[str, Any]]:
    """The arguments by their names in the signature; tuples and dicts that only the call holds are taken apart."""
    function = getattr(method, "forward", method)
    try:
        parameters = inspect.signature(function).parameters
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself says what does not fit
        yield from ((f"argument {i}", value) for i, value in enumerate(args))
        yield from kwargs.items()
        return
    for name, value in given.items():
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
        elif parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _items(value: Any) -> dict | None:
    """What a container holds, by key; None for anything else."""
    if built_in(type(value)):
        return dict(items_of(value))
    if is_plain_class(type(value)) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return dict(attributes_of(value))
    return None


def _same(now: dict | None, before: dict) -> bool:
    return now is not None and [*now] == [*before] and all(now[key] is before[key] for key in now)


def _contents(outputs: Any) -> tuple[set[int], set[int]]:
    """The identities of the containers among the results, and of the memory of the tensors."""
    containers: set[int] = set()

    def visit(value: Any) -> None:
        items = _items(value)
        if items is not None and id(value) not in containers:
            containers.add(id(value))
            for item in items.values():
                visit(item)

    visit(outputs)
    leaves = jax.tree.leaves(convert(outputs, lambda v: v, objects=True), is_leaf=lambda v: isinstance(v, torch.Tensor))
    return containers, {id(t._cell.storage) for t in leaves if isinstance(t, BridgeTensor)}
