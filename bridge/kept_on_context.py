"""What a `torch.autograd.Function` keeps on its context besides tensors, and when its backward would see other values.

PyTorch runs a backward after the whole forward, on the very objects that the code holds. JAX runs it on what the
context held when the Function was applied, and keeps nothing of what a backward changes.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bridge.held_objects import PLAIN, inside, is_plain_object, unchanged
from bridge.holders import Holder, holder_of, of_cells, of_dict

_DEPTH = 5
_CONTAINERS = (dict, list, set, collections.deque)
_PYTREES = (dict, list, tuple)


class KeptOnContext:
    """Snapshot of the containers and objects that hang on a context, and of the modules where `modules` says so."""

    def __init__(self, contents: Mapping[str, Any], *, modules: bool = False):
        self._modules = modules
        self._holders: list[tuple[str, Holder]] = []
        self._seen: set[int] = set()
        self.hidden: dict[str, torch.Tensor] = {}
        """Tensors inside of objects that JAX does not look into, by their paths."""
        for name, value in contents.items():
            self._visit(f"ctx.{name}", value, True, _DEPTH)

    def changed(self) -> str:
        """The path of something that is not as it was, or nothing."""
        return next((path for path, holder in self._holders if not unchanged(holder.read(), holder.before)), "")

    def _visit(self, path: str, value: Any, visible: bool, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if not visible:
                self.hidden[path] = value
            return
        if not depth or isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        visible = visible and (isinstance(value, _PYTREES) or dataclasses.is_dataclass(value))
        for name, item in self._items(path, value):
            self._visit(f"{path}{name}", item, visible, depth - 1)

    def _items(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, nn.Module):
            if self._modules:
                for contents in (value.__dict__, value._buffers, value._parameters):
                    self._holders.append((path, of_dict(contents)))
            return
        if isinstance(value, types.FunctionType) and value.__closure__:
            yield from ((f", {name}", item) for name, item in of_cells(value).original.items())
            return
        parts = inside(value)
        if parts is None and (isinstance(value, _CONTAINERS) or is_plain_object(value)):
            holder = holder_of(value)
            if holder is not None:
                if not self._modules or not isinstance(value, _CONTAINERS):
                    self._holders.append((path, holder))
                parts = holder.original
        for name, item in (parts or {}).items():
            yield f".{name}" if isinstance(name, str) and not isinstance(value, _CONTAINERS) else f"[{name!r}]", item
