"""Copies of a module: one with traced tensors for each traced call, and those that `verify` works on.

Modules, containers and objects whose state is their attributes are copied at any depth, so the call's assignments are
lost with the copy. Whatever a module holds twice, its copy holds twice.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bridge._compat.torch import base_of, below_modes
from bridge.dispatch.random import CallGenerator
from bridge.errors import BridgeError
from bridge.tensor.arrays import overlap
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
from bridge.tensor.tensor import INTERNAL, BridgeTensor, Storage

Slot = tuple[nn.Module, str]
"""A submodule, and the name of a parameter or buffer in it."""


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every parameter and buffer by its first qualified name; a tied one appears once.

    The functions of `nn.Module` itself find those, too, that a class hides by a `named_parameters` of its own.
    """
    seen: dict[int, str] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in [*nn.Module.named_parameters(module), *nn.Module.named_buffers(module)]:
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            state[name] = tensor
    return state


def trained_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state that requires grad, without parameters that the module hides from optimizers."""
    shown = {id(parameter) for _, parameter in module.named_parameters()}
    state = state_of(module).items()
    return {n: t for n, t in state if t.requires_grad and (id(t) in shown or not isinstance(t, nn.Parameter))}


def second_names(module: nn.Module) -> dict[str, str]:
    """Returns the further names of parameters and buffers that have several -> the first one."""
    first = {id(tensor): name for name, tensor in state_of(module).items()}
    every = [
        *nn.Module.named_parameters(module, remove_duplicate=False),
        *nn.Module.named_buffers(module, remove_duplicate=False),
    ]
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def slots_of(modules: Mapping[str, nn.Module], names: Iterable[str]) -> dict[str, Slot]:
    """Returns the slots of the parameters and buffers with these names, given the modules by name."""
    slots: dict[str, Slot] = {}
    for name in names:
        path, _, slot = name.rpartition(".")
        slots[name] = modules[path], slot
    return slots


def slot_of(module: nn.Module, name: str) -> Slot:
    """Returns the submodule and the local name for a qualified name."""
    path, _, slot = name.rpartition(".")
    return module.get_submodule(path), slot


def value_in(name: str, slot: Slot) -> Any:
    """Returns the object in the slot of a parameter or buffer. Raises `BridgeError` if a call has deleted it."""
    owner, key = slot
    for registry in (owner._parameters, owner._buffers):
        if key in registry:
            return registry[key]
    if not hasattr(owner, key):
        raise BridgeError(f"the call deletes {name}, which the next one would miss; write zeros to it instead")
    return getattr(owner, key)


class Start(NamedTuple):
    """A parameter or buffer at the beginning of a call."""

    tensor: BridgeTensor
    memory: Storage
    requires_grad: bool
    version: int

    def written(self, tensor: Any) -> bool:
        """True if a call that leaves `tensor` in its place has given it other values."""
        if tensor is not self.tensor or self.tensor._handle.storage is not self.memory:
            return True
        return self.memory.version != self.version


def check_final(start: Mapping[str, Start], final: Mapping[str, Any], memory_of: Callable) -> dict[str, Any]:
    """Returns the memory of each parameter and buffer after a call, by name.

    Raises `BridgeError` where the next call cannot start from what a call leaves, each tensor as an array of its own.
    `final`: what is in the place of each parameter and buffer after the call. `memory_of(tensor)`: what tensors that
    share memory have in common.
    """
    before: dict[str, Any] = {}
    replaced = False
    for name, value in final.items():
        if value is None:
            raise BridgeError(
                f"the call sets {name} to None, from which the next one cannot start: a buffer stays an array; keep a "
                "flag in another buffer, or zeros in this one"
            )
        at = start[name]
        before[name] = at.memory
        replaced = replaced or value is not at.tensor or at.tensor._handle.storage is not at.memory
    if not replaced:
        return before
    after = {name: memory_of(t) for name, t in final.items() if isinstance(t, torch.Tensor)}
    _check_sharing(before, after, final)
    return after


def _check_sharing(before: Mapping[str, Any], after: Mapping[str, Any], final: Mapping[str, Any]) -> None:
    """Raises for names that share memory before the call or after it, but not both.

    If two share memory before the call, one array is a window on the other at each call.
    """
    for memory, other, what in (
        (before, after, "share memory before the call and not after it, and would share it in the next one"),
        (after, before, "share their memory after the call, and would be separate in the next one"),
    ):
        groups = dict[Any, list[str]]()
        for name, at in memory.items():
            for twin in groups.setdefault(at, []):
                if not {twin, name} <= other.keys() or other[twin] == other[name]:
                    continue
                # Parts of one memory may have no element in common.
                if memory is before or overlap(_laid_out(final[twin]), _laid_out(final[name])):
                    remedy = "write in place, or register a clone" if memory is before else "assign a clone()"
                    raise BridgeError(f"{twin} and {name} {what}; {remedy}")
            groups[at].append(name)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._meta if isinstance(tensor, BridgeTensor) else tensor


def check_tied(names: Mapping[str, str], slots: Mapping[str, Slot], final: Mapping[str, Any]) -> None:
    """Raises for a tensor with two names that is two tensors after the call: it has only one array."""
    for name, first in names.items():
        if value_in(name, slots[name]) is not final[first]:
            raise BridgeError(
                f"{first} and {name} are one tensor before the call and two after it, and would be one in the next "
                "call; write in place, or register a clone"
            )


# ---- copies


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
        items = [item for _, item in items_of(value)] if isinstance(value, tuple) else list(value)
        new = [self.visit(item) for item in items]
        if _same(items, new):
            return value
        return self._fill(tuple_of(type(value), new), value) if isinstance(value, tuple) else type(value)(new)

    def _method(self, value: types.MethodType) -> types.MethodType:
        old = value.__func__, value.__self__
        new = self.visit(old[0]), self.visit(old[1])
        return value if _same(old, new) else types.MethodType(*new)

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
        new = self.visit(target) if isinstance(target, (nn.Module, torch.Tensor)) else target
        return value if new is target else (weakref.proxy if is_proxy else weakref.ref)(new)

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


# ---- changes by a call

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
        return value._attributes() if vars(value).keys() - INTERNAL else {}
    if isinstance(value, dict):
        return dict.copy(value)
    if isinstance(value, set):
        return dict(zip(value, value, strict=True))
    kind: Any = next(kind for kind in (list, tuple, collections.deque) if isinstance(value, kind))
    return dict(enumerate(kind.__iter__(value)))


def joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{_shown(key)}]"


def _shown(key: Any) -> str:
    return repr(key) if type(key) in _ATOMS and not isinstance(key, torch.Tensor) else type(key).__name__


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


# ---- overrides and names


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
    found = f"is {getattr(owner, step)!r}" if hasattr(owner, step) else "is not there"
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
