"""Containers and objects that pass between the two sides: pytrees in JAX, plain objects in PyTorch."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes, closure_of
from bridge.errors import BridgeError

_Instance = TypeVar("_Instance")
_REGISTERED: set[type] = set()
"""Classes that JAX flattens by their fields, or by the functions given to `register`."""
_OBJECTS: set[type] = set()
"""Classes that JAX flattens by `_split`."""

ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
"""Types of values that hold nothing."""

# ---- containers, read and built by the methods of the built-in classes: a subclass may forbid or change its own

_BUILT_IN = (collections.OrderedDict, collections.defaultdict, dict, list, collections.deque, tuple)


@functools.lru_cache(4096)
def built_in(kind: type) -> Any:
    """The built-in container that a class is or derives from; None for any other class."""
    return next((base for base in _BUILT_IN if issubclass(kind, base)), None)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """The keys or places in a container, and what is there."""
    base = built_in(type(value))
    return list(base.items(value) if issubclass(base, dict) else enumerate(base.__iter__(value)))


def attributes_of(value: Any) -> dict[str, Any]:
    return vars(value) if type(value).__dictoffset__ else {}


def empty_like(value: Any) -> Any:
    """A new container without items, or a new object without attributes, of the class of `value`; no tuple."""
    return _empty(type(value), _setting(value))


def put_items(container: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Put (key, item) into a new container, in this order."""
    base = built_in(type(container))
    if issubclass(base, dict):
        for key, item in pairs:
            base.__setitem__(container, key, item)
    else:
        base.extend(container, (item for _, item in pairs))


def tuple_of(kind: type, items: Iterable[Any]) -> Any:
    """The items as a tuple of this class, made without its `__new__`."""
    return kind(list(items)) if kind.__module__ == "torch.return_types" else tuple.__new__(kind, items)  # pyright: ignore[reportCallIssue]


def _setting(value: Any) -> Any:
    """The setting of a container besides its items."""
    base = built_in(type(value))
    if base is collections.defaultdict:
        return value.default_factory
    return value.maxlen if base is collections.deque else None


def _empty(kind: Any, setting: Any) -> Any:
    base: Any = built_in(kind) or (types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object)
    new = base.__new__(kind)
    if base is collections.defaultdict:
        new.default_factory = setting
    elif base is collections.deque:
        base.__init__(new, (), setting)
    return new


# ---- objects whose state is their attributes


class _Plain:
    pass


_OF_PYTHON = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
_FOREIGN = sys.stdlib_module_names | {"jax", "jaxlib", "numpy"}


@functools.lru_cache(4096)
def is_plain_class(kind: type) -> bool:
    """True if everything that an object of the class holds is in its `__dict__`: no `__slots__`, nothing of C.

    Classes of Python's own are left out, such as loggers: they belong to the process.
    """
    if kind.__basicsize__ != _Plain.__basicsize__ or kind.__itemsize__ or not kind.__dictoffset__:
        return False
    if issubclass(kind, (nn.Module, torch.Tensor, enum.Enum)):
        return False
    return kind in _OF_PYTHON or kind.__module__.partition(".")[0] not in _FOREIGN


class _Opaque:
    """A part of an object that is passed on as it is; equal to itself alone."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Node(NamedTuple):
    """A container or an object: its class, what is in it and its attributes, each a part of a structure."""

    kind: type
    setting: Any
    keys: tuple
    items: tuple
    names: tuple
    attributes: tuple


class _Atom(NamedTuple):
    kind: type
    """Beside the value, since `True == 1`."""
    value: Any


class _Again(NamedTuple):
    """A container or an object that was met before."""

    number: int


_LEAF = _Again(-1)


class _Split:
    """The arrays in an object, at any depth of containers and further objects, and the hashable rest of it."""

    def __init__(self, value: Any):
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self._numbers: dict[int, int] = {}
        self.structure = self._node(value, "")

    def _part(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in ATOMS or isinstance(value, enum.Enum):
            return _Atom(kind, value)
        if id(value) in self._numbers:
            return _Again(self._numbers[id(value)])
        if built_in(kind) is None and not (is_plain_class(kind) and vars(value)):
            return self._leaf(value, path) if _is_leaf(value) else _Opaque(value)
        return self._leaf(value, path) if _has_own_flatten(value) else self._node(value, path)

    def _leaf(self, value: Any, path: str) -> Any:
        self.leaves.append(value)
        self.paths.append(path)
        return _LEAF

    def _node(self, value: Any, path: str) -> _Node:
        kind = type(value)
        if not isinstance(value, tuple):
            self._numbers[id(value)] = len(self._numbers)
        pairs = items_of(value) if built_in(kind) else []
        parts = tuple(self._part(item, f"{path}[{key!r}]") for key, item in pairs)
        own = attributes_of(value)
        attributes = tuple(self._part(item, f"{path}.{name}") for name, item in own.items())
        return _Node(kind, _setting(value), tuple(key for key, _ in pairs), parts, tuple(own), attributes)


def _join(structure: _Node, leaves: Iterable[Any], opaque: Callable[[Any], Any] = lambda value: value) -> Any:
    """The object of that structure; `opaque` is applied to what is neither an array nor a setting."""
    rest, made = iter(leaves), []

    def part(node: Any) -> Any:
        if node is _LEAF:
            return next(rest)
        if isinstance(node, _Node):
            return whole(node)
        if isinstance(node, _Atom):
            return node.value
        return made[node.number] if isinstance(node, _Again) else opaque(node.value)

    def whole(node: _Node) -> Any:
        if issubclass(node.kind, tuple):
            new = tuple_of(node.kind, [part(item) for item in node.items])
        else:
            new = _empty(node.kind, node.setting)
            made.append(new)
            if built_in(node.kind):
                put_items(new, zip(node.keys, map(part, node.items), strict=True))
        if node.names:
            vars(new).update(zip(node.names, map(part, node.attributes), strict=True))
        return new

    return whole(structure)


def _is_leaf(value: Any) -> bool:
    """True for tensors, arrays, and what JAX puts in their places."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) or type(value) is object:
        return True
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib") and not callable(value)


def _has_own_flatten(value: Any) -> bool:
    """True if JAX flattens it by functions of its class."""
    kind = type(value)
    if kind in _BUILT_IN or kind in _OBJECTS or (hasattr(kind, "_fields") and kind not in _REGISTERED):
        return False
    if dataclasses.is_dataclass(kind):
        if issubclass(kind, dict):
            register(kind)
        return issubclass(kind, dict) or (kind not in _REGISTERED and _known_to_jax(value))
    return kind in _REGISTERED or _known_to_jax(value)


def _is_object(value: Any) -> bool:
    """True for what `_Split` takes apart, since JAX does not know it or could not build it again."""
    kind = type(value)
    if kind in _OBJECTS:
        return True
    if kind in ATOMS or kind in _REGISTERED or dataclasses.is_dataclass(kind):
        return False
    if kind in _BUILT_IN:
        return kind is collections.deque
    if hasattr(kind, "_fields"):
        return _makes_itself(kind)
    return (built_in(kind) is not None or (is_plain_class(kind) and bool(vars(value)))) and not _known_to_jax(value)


@functools.lru_cache(4096)
def _makes_itself(kind: type) -> bool:
    """True for a named tuple with a `__new__` of its own, which may refuse what JAX puts into it."""
    return (
        issubclass(kind, tuple)
        and next(name for base in kind.__mro__ for name in ("_fields", "__new__") if name in vars(base)) == "__new__"
    )


def _register_object(kind: type) -> None:
    if kind in _OBJECTS:
        return

    def flatten_with_keys(value: Any) -> tuple[list, _Node]:
        split = _Split(value)
        keys = [jax.tree_util.GetAttrKey(path.removeprefix(".")) for path in split.paths]
        return list(zip(keys, split.leaves, strict=True)), split.structure

    def flatten(value: Any) -> tuple[list, _Node]:
        split = _Split(value)
        return split.leaves, split.structure

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, _join, flatten)
    _OBJECTS.add(kind)


# ---- what JAX is told


def register(
    cls: type[_Instance],
    flatten: Callable[[_Instance], tuple[Iterable[Any], Any]] | None = None,
    unflatten: Callable[[Any, Iterable[Any]], _Instance] | None = None,
) -> type[_Instance]:
    """Make a class a JAX pytree, so that its objects can be arguments and results of transformed functions.

    The fields of a dataclass are the children, text and other settings travel as structure. Of any other class whose
    objects keep everything in attributes, the arrays in them are the children, and all else, numbers of Python
    included, is structure. A call registers the classes that it meets by itself; this is for an object that goes into
    `jax.jit` before. Rebuilding does not run `__init__`. Usable as a decorator. For a class that keeps its state
    elsewhere, `flatten(object)` returns the children and a hashable structure, and `unflatten(structure, children)` the
    object, as for `jax.tree_util.register_pytree_node`. A call works on such a copy: return the object from the method
    to see what the call has changed.

    Registering twice is no error. Raises `TypeError` for a class that needs functions and has none.
    """
    if (flatten is None) != (unflatten is None):
        raise TypeError(f"{cls.__name__} has one of flatten and unflatten; give both, or neither")
    if cls in _REGISTERED or cls in _OBJECTS:
        return cls
    if flatten is not None and unflatten is not None:
        jax.tree_util.register_pytree_node(cls, flatten, unflatten)
        _REGISTERED.add(cls)
        return cls
    if not dataclasses.is_dataclass(cls):
        if not is_plain_class(cls) and built_in(cls) is None:
            raise TypeError(
                f"{cls.__name__} keeps its state elsewhere than in attributes; give flatten and unflatten, make it a "
                "dataclass, or pass its parts in a dict"
            )
        _register_object(cls)
        return cls
    names = tuple(f.name for f in dataclasses.fields(cls))

    def flatten_with_keys(obj):
        values = [getattr(obj, n) for n in names]
        fixed = tuple((n, v) for n, v in zip(names, values, strict=True) if _is_setting(v))
        free = [(jax.tree_util.GetAttrKey(n), v) for n, v in zip(names, values, strict=True) if not _is_setting(v)]
        return free, fixed

    def rebuild(fixed, children):
        values = dict(fixed)
        rest = iter(children)
        values |= {n: next(rest) for n in names if n not in values}
        if issubclass(cls, dict):  # a mapping that mirrors its fields, as Hugging Face's outputs do
            return cls(**values)
        obj = object.__new__(cls)
        for name in names:
            object.__setattr__(obj, name, values[name])
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, rebuild)
    _REGISTERED.add(cls)
    return cls


def _is_setting(value: Any) -> bool:
    return isinstance(value, (str, bytes, torch.dtype, torch.device, type)) or (
        callable(value) and not dataclasses.is_dataclass(value)
    )


def convert(tree: Any, leaf: Callable[[Any], Any], objects: bool = False) -> Any:
    """`jax.tree.map` over whatever the code passes around; dataclasses not met before are registered on the way.

    With `objects`, also over the attributes of other objects, which are rebuilt. Dicts keep their order.
    """

    def visit(value: Any) -> Any:
        if type(value) is dict:  # JAX would sort it
            _check_keys(value)
            return {key: convert(item, leaf, objects) for key, item in value.items()}
        if _is_object(value):
            return _converted(value, leaf) if objects else leaf(value)
        if _is_new_dataclass(value):
            _REGISTERED.add(type(value)) if _known_to_jax(value) else register(type(value))
        # Also of a class that another value has registered on the way.
        return convert(value, leaf, objects) if type(value) in _REGISTERED else leaf(value)

    def is_leaf(value: Any) -> bool:
        return type(value) is dict or _is_object(value) or _is_new_dataclass(value)

    return jax.tree.map(visit, tree, is_leaf=is_leaf)


def _is_new_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value) not in _REGISTERED


def _converted(value: Any, leaf: Callable[[Any], Any]) -> Any:
    _register_object(type(value))
    split = _Split(value)
    return _join(split.structure, [convert(part, leaf, True) for part in split.leaves], leaf)


def _check_keys(value: dict) -> None:
    try:
        sorted(value)
    except TypeError as error:
        raise BridgeError(
            "a dict has keys of several types, which JAX cannot bring into an order; use keys of one type, such as str"
        ) from error


def _known_to_jax(value: Any) -> bool:
    return not jax.tree_util.all_leaves([value])


def is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_number(value: Any) -> bool:
    """True if JAX takes it for a number; a call may return text and other objects, too."""
    return is_array(value) or isinstance(value, (bool, int, float, complex))


_ORDER = ("sorted_indices", "unsorted_indices")


def _register_packed_sequence() -> None:
    """Its batch sizes decide shapes: they travel as structure, unless they are traced."""

    def flatten_with_keys(packed):
        data, sizes, *order = packed
        known = _known_numbers(sizes)
        children = [("data", data), ("batch_sizes", sizes if known is None else None), *zip(_ORDER, order, strict=True)]
        return [(jax.tree_util.GetAttrKey(name), child) for name, child in children], known

    def unflatten(known, children):
        data, sizes, *order = children
        if known is not None:
            with below_modes():
                sizes = torch.tensor(known, dtype=torch.int64)
        return tuple.__new__(PackedSequence, (data, sizes, *order))

    jax.tree_util.register_pytree_with_keys(PackedSequence, flatten_with_keys, unflatten)
    _REGISTERED.add(PackedSequence)


def _known_numbers(sizes: Any) -> tuple[int, ...] | None:
    value = getattr(sizes, "value", sizes)  # of a tensor of the bridge
    if isinstance(value, Tracer) or not (is_array(value) or isinstance(value, torch.Tensor)):
        return None
    with below_modes():
        return tuple(value.tolist())


_register_packed_sequence()
jax.tree_util.register_pytree_node(torch.Size, lambda size: ((), tuple(size)), lambda size, _: torch.Size(size))
_REGISTERED.add(torch.Size)


# ---- results that are no pytrees

NO_PYTREE = (
    "return a tuple, a list, a dict, a dataclass or an object that keeps it in an attribute, or give `bridge.register` "
    "functions that flatten and rebuild it"
)


def tensor_inside(value: Any) -> str | None:
    """The way to a tensor that an object holds at any depth, such as `.value[0]`; None without one."""
    todo, seen = [("", value)], {}
    while todo:
        path, value = todo.pop()
        if isinstance(value, torch.Tensor):
            return path
        if type(value) not in ATOMS and id(value) not in seen:
            seen[id(value)] = value
            tensors = isinstance(value, nn.Module) and [*value.named_parameters(), *value.named_buffers()]
            steps = [(f".{name}", part) for name, part in tensors] if tensors else parts_of(value)
            todo += [(f"{path}{step}", part) for step, part in steps]
    return None


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """Returns what a container, a function or an object holds, each with the step to it."""
    if isinstance(value, types.FunctionType):
        return [*((f".{name}", item) for name, item in closure_of(value).items()), ("", value.__defaults__)]
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, functools.partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if isinstance(value, (type, types.ModuleType)):
        return []
    own = getattr(value, "__dict__", None)
    named = dict(own) if isinstance(own, dict) else {}
    for kind in type(value).__mro__:
        slots = [name for name, each in vars(kind).items() if isinstance(each, types.MemberDescriptorType)]
        named |= {name: getattr(value, name, None) for name in slots}
    if isinstance(value, (set, frozenset)):
        items: Any = enumerate(value)
    else:
        items = items_of(value) if built_in(type(value)) else ()
    return [*((f"[{key!r}]", item) for key, item in items), *((f".{name}", item) for name, item in named.items())]
