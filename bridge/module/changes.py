"""What a call changes in a module besides the values of its parameters and buffers."""

from __future__ import annotations

import collections
import contextlib
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge._compat.torch import below_modes
from bridge.module.state import Slot
from bridge.tensor.pytrees import (
    ATOMS,
    attributes_of,
    built_in,
    is_plain_class,
    items_of,
)
from bridge.tensor.tensor import INTERNAL, BridgeTensor

Place = tuple[str, Any]
"""(path of a container from the module, key or position in it)"""
GONE = object()
"""Stands for a value that is gone."""
KEPT = object()
"""Stands for the same tensor as before, which would be another one in a later call."""
ORDER = "the order of the keys"
_PLAIN = (dict, collections.OrderedDict)
_TENSORS = frozenset({torch.Tensor, nn.Parameter, BridgeTensor})
_CODE = frozenset({type, types.FunctionType, types.MethodType, types.ModuleType, *weakref.ProxyTypes})
_ATOMS = ATOMS | {torch.Tensor, nn.Parameter} | _CODE | {np.ndarray}
"""Types of values that hold no further state."""
REGISTRIES = ("_parameters", "_buffers", "_modules")
_LISTS_OF_STATE = frozenset({"_flat_weights", "_flat_weight_refs", "_non_persistent_buffers_set"})
"""Attributes that list parameters and buffers; recurrent modules rebuild theirs at each call."""


class _Unreadable:
    """Stands for a value; code that asks anything of it fails."""

    def _fail(self, *_: Any) -> Any:
        raise LookupError("a value of an earlier call was read")

    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __index__ = __len__ = __iter__ = __call__ = _fail
    __getattr__ = __getitem__ = __setitem__ = __contains__ = __hash__ = _fail


UNREADABLE = _Unreadable()


class Snapshot:
    """The attributes of a copied module tree, and the contents of its containers and objects, at one time."""

    def __init__(self, modules: Mapping[str, nn.Module], slots: Mapping[str, Slot], copies: Iterable[Any]):
        """`modules`: the copies of a call, by qualified name. `slots`: the places of its parameters and buffers.

        `copies`: all that was copied for the call.
        """
        self._modules = modules
        self._slots = slots
        self._held: list[tuple[Any, dict]] = []
        """(container, its items)"""
        for value in copies:
            kind = type(value)
            if kind in _PLAIN:
                self._held.append((value, value.copy()))
            elif kind is BridgeTensor or isinstance(value, (dict, list, set, collections.deque)):
                self._held.append((value, _items(value)))
            if kind.__dictoffset__ and kind not in _ATOMS and kind is not BridgeTensor:
                self._held.append((value.__dict__, value.__dict__.copy()))

    def changes(self) -> dict[Place, Any]:
        """Returns the present value at every place that has changed since; `GONE` where there is none."""
        changed: dict[Place, Any] = {}
        for value, before in self._held:
            now = value if type(value) in _PLAIN else _items(value)
            same_keys = len(now) == len(before) and all(map(operator.is_, now, before))
            if same_keys and all(map(operator.is_, now.values(), before.values())):
                continue
            if any(value is vars(m).get(name) for m in self._modules.values() for name in _LISTS_OF_STATE):
                continue
            places = {key: now.get(key, GONE) for key in {**before, **now} if key not in _LISTS_OF_STATE}
            changed |= {
                (self._path(value), key): item
                for key, item in places.items()
                if not self._is_slot(value, key) and not equal(before.get(key, GONE), item)
            }
            if not same_keys and now.keys() == before.keys():
                changed[self._path(value), ORDER] = tuple(now)
        return changed

    def _is_slot(self, registry: Any, key: Any) -> bool:
        """True for the place of a parameter or buffer."""
        owners = [owner for owner, name in self._slots.values() if name == key]
        return any(registry is owner._parameters or registry is owner._buffers for owner in owners)

    def _path(self, wanted: Any) -> str:
        """Returns the path from the module to a container."""
        return next((path for path, held in self._walk() if held is wanted), "an object that a function encloses")

    def _walk(self) -> Iterator[tuple[str, Any]]:
        """Yields the containers, the attributes of objects and the tensors that the modules hold, with their paths."""
        seen = set[int]()
        todo: list[tuple[str, Any]] = [(name, module.__dict__) for name, module in self._modules.items()]
        for path, value in todo:  # the list grows during the loop
            container = isinstance(value, (dict, list, tuple, set, collections.deque)) or type(value) is BridgeTensor
            held = value if container else getattr(value, "__dict__", None)
            if held is not None and id(held) not in seen:
                seen.add(id(held))
                yield path, held
                todo += [(joined(path, key), item) for key, item in _items(held).items() if type(item) not in _ATOMS]

    def put(self, values: Mapping[Place, Any]) -> None:
        """Puts values at their places; code that reads `UNREADABLE` fails."""
        for path, held in self._walk():
            items = vars(held) if type(held) is BridgeTensor else held
            for (where, key), value in values.items():
                if where == path:
                    with contextlib.suppress(TypeError, IndexError):  # a set, or a list that is not as long yet
                        items[key] = value

    def holders(self, memory: Callable[[torch.Tensor], bool]) -> dict[Place, Any]:
        """Returns the places where attributes and containers held tensors over some memory before and still do."""
        return {
            (self._path(value), key): KEPT
            for value, before in self._held
            for key, item in _items(value).items()
            if item is before.get(key) and not self._is_slot(value, key)
            if any(type(t) in _TENSORS and memory(t) for t in (item if type(item) is tuple else (item,)))
        }


def _items(value: Any) -> dict:
    """Returns the items of a container by key or position, read without methods of its own class.

    Those of a tensor are the attributes that the code has set.
    """
    if type(value) is BridgeTensor:
        if vars(value).keys() - INTERNAL:
            return value._attributes()
        return {}
    if isinstance(value, dict):
        return dict.copy(value)
    if isinstance(value, set):
        return dict(zip(value, value, strict=True))
    kind: Any = next(kind for kind in (list, tuple, collections.deque) if isinstance(value, kind))
    return dict(enumerate(kind.__iter__(value)))


def joined(path: str, key: Any) -> str:
    if isinstance(key, str):
        return f"{path}.{key}"
    return f"{path}[{_shown(key)}]"


def _shown(key: Any) -> str:
    if type(key) in _ATOMS and not isinstance(key, torch.Tensor):
        return repr(key)
    return type(key).__name__


def equal(a: Any, b: Any, twins: Mapping[int, Any] | None = None) -> bool:
    """True if code that reads the two cannot tell them apart.

    Objects are equal only if they are identical; with `twins`, from the ids of modules to modules that count as equal
    to them, also if their attributes are equal.
    """
    if a is b or (twins and twins.get(id(a)) is b):
        return True
    if type(a) is not type(b) or isinstance(a, BridgeTensor):
        return False
    if isinstance(a, torch.Tensor):
        with below_modes():
            return a.shape == b.shape and a.dtype == b.dtype and not a.is_meta and torch.equal(a, b)
    if built_in(type(a)):
        pairs = zip(items_of(a), items_of(b), strict=False)
        return len(a) == len(b) and all(j == k and equal(x, y, twins) for (j, x), (k, y) in pairs)
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if twins and hasattr(a, "__func__"):
        return a.__func__ is b.__func__ and equal(a.__self__, b.__self__, twins)
    if twins and is_plain_class(type(a)):
        return equal(dict(attributes_of(a)), dict(attributes_of(b)), twins)
    return (type(a) in _ATOMS or isinstance(a, set)) and bool(a == b)
