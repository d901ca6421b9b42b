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
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
import torch
from jax.tree_util import GetAttrKey
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes, closure_of

_Instance = TypeVar("_Instance")

ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
"""Types of values that have no parts."""

TRACED_NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool)
"""The classes of numbers whose value is traced."""

# ---- containers, read and built by the methods of the built-in classes: a subclass may forbid or change its own

_BUILT_IN = (collections.OrderedDict, collections.defaultdict, dict, list, collections.deque, tuple)


@functools.lru_cache(4096)
def built_in(kind: type) -> Any:
    """Returns the built-in container that a class is or derives from; None for any other class."""
    return next((base for base in _BUILT_IN if issubclass(kind, base)), None)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Returns the keys or indices of a container with its items."""
    base = built_in(type(value))
    return list(base.items(value) if issubclass(base, dict) else enumerate(base.__iter__(value)))


def attributes_of(value: Any) -> dict[str, Any]:
    if type(value).__dictoffset__:
        return vars(value)
    return {}


def _setting(value: Any) -> tuple:
    """Returns what a container has besides its items, as the arguments of its `__init__`."""
    if isinstance(value, collections.defaultdict):
        return (value.default_factory,)
    if isinstance(value, collections.deque):
        return ((), value.maxlen)
    return ()


def empty_like(value: Any) -> Any:
    """Returns a new container without items, or a new object without attributes, of the class of `value`; no tuple."""
    return _empty(type(value), _setting(value))


def _empty(kind: Any, setting: tuple) -> Any:
    base: Any = built_in(kind) or (types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object)
    new = base.__new__(kind)
    if setting:
        base.__init__(new, *setting)
    return new


def put_items(container: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Puts (key, item) pairs into a new container, in this order."""
    base = built_in(type(container))
    if issubclass(base, dict):
        for key, item in pairs:
            base.__setitem__(container, key, item)
    else:
        base.extend(container, (item for _, item in pairs))


def tuple_of(kind: type, items: Iterable[Any]) -> Any:
    """Returns the items as a tuple of this class, made without its `__new__`."""
    if kind.__module__ == "torch.return_types":
        return kind(list(items))  # pyright: ignore[reportCallIssue]
    return tuple.__new__(kind, items)


# ---- objects whose state is their attributes

_PLAIN_SIZES = {
    base: {base.__basicsize__, type("_Plain", (base,), {}).__basicsize__} for base in (types.SimpleNamespace, object)
}
"""The sizes of objects that hold nothing beside a `__dict__`, by their base in C."""
_OF_PYTHON = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
_FOREIGN = sys.stdlib_module_names | {"jax", "jaxlib", "numpy"}


@functools.lru_cache(4096)
def is_plain_class(kind: type) -> bool:
    """True if everything that an object of the class holds is in its `__dict__`: no `__slots__`, nothing in C.

    Classes of Python itself, such as loggers, are excluded: they belong to the process.
    """
    base = types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object
    if kind.__basicsize__ not in _PLAIN_SIZES[base] or kind.__itemsize__ or not kind.__dictoffset__:
        return False
    if issubclass(kind, (nn.Module, torch.Tensor, enum.Enum, *TRACED_NUMBERS)):
        return False
    return kind in _OF_PYTHON or kind.__module__.partition(".")[0] not in _FOREIGN


# ---- flattening of the objects of a class

_How = Literal["items", "functions", "fields", "parts", "leaf"]
_KINDS: dict[type, _How] = {PackedSequence: "functions"}
"""The classes that the bridge has registered -> how JAX flattens their objects:

* by their items: the containers that JAX knows by itself;
* by the functions that somebody has registered for the class;
* by the fields of a dataclass;
* by parts: the arrays in it, at any depth, are the children of an object or of a container that JAX does not know.
"""


def _how(value: Any) -> _How:
    """Returns how an object is flattened; registers a dataclass that is met for the first time."""
    kind = type(value)
    if kind in _KINDS:
        return _KINDS[kind]
    named = hasattr(kind, "_fields")
    if not jax.tree_util.all_leaves([value]):
        if named and "__new__" in vars(kind) and "_fields" not in vars(kind):  # it may refuse JAX's own placeholders
            return "parts"
        if named or kind in _BUILT_IN:
            return "items"
        return "functions"
    if dataclasses.is_dataclass(kind):
        register(kind)
        return "fields"
    if built_in(kind) or (is_plain_class(kind) and vars(value)):
        return "parts"
    return "leaf"


class _Opaque:
    """A part of an object that is passed on as it is; equal only to itself."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Node(NamedTuple):
    """The structure of a container or an object.

    A part of it is a `_Node`, None for an array, the number of an object that was met before, an `_Opaque`, or the
    class and the value of a setting, since `True == 1`.
    """

    kind: type
    setting: tuple
    items: tuple[tuple[Any, Any], ...]
    attributes: tuple[tuple[str, Any], ...]


def _split(whole: Any) -> tuple[list, _Node]:
    """Returns the arrays in an object, at any depth of containers and further objects, and the hashable rest of it."""
    leaves: list[tuple[Any, Any]] = []
    numbers: dict[int, int] = {}

    def part(value: Any, path: str) -> Any:
        kind = type(value)
        if kind in ATOMS or isinstance(value, enum.Enum):
            return kind, value
        if id(value) in numbers:
            return numbers[id(value)]
        how = _how(value)
        if how in ("items", "parts") or (how == "fields" and is_plain_class(kind)):
            return node(value, path)
        if how != "functions" and not issubclass(kind, dict) and not _is_array_like(value):
            return _Opaque(value)
        leaves.append((GetAttrKey(path.removeprefix(".")), value))
        return None

    def node(value: Any, path: str) -> _Node:
        if not isinstance(value, tuple):
            numbers[id(value)] = len(numbers)
        items = items_of(value) if built_in(type(value)) else []
        return _Node(
            type(value),
            _setting(value),
            tuple((key, part(item, f"{path}.{key}")) for key, item in items),
            tuple((name, part(item, f"{path}.{name}")) for name, item in attributes_of(value).items()),
        )

    return leaves, node(whole, "")


def _split_fields(value: Any) -> tuple[list, _Node]:
    """Returns the fields of a dataclass, and the object's structure, which includes the fields that are settings."""
    leaves = []
    structure = []
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        is_function = callable(item) and not dataclasses.is_dataclass(item)
        is_setting = is_function or isinstance(item, (str, bytes, torch.dtype, torch.device, type))
        structure.append((field.name, (type(item), item) if is_setting else None))
        if not is_setting:
            leaves.append((GetAttrKey(field.name), item))
    return leaves, _Node(type(value), (), (), tuple(structure))


def _join(structure: _Node, leaves: Iterable[Any], opaque: Callable[[Any], Any] = lambda value: value) -> Any:
    """Returns the object with that structure; `opaque` is applied to parts that are neither arrays nor settings."""
    rest = iter(leaves)
    made = []

    def part(node: Any) -> Any:
        if node is None:
            return next(rest)
        if isinstance(node, int):
            return made[node]
        if isinstance(node, _Opaque):
            return opaque(node.value)
        return whole(node) if isinstance(node, _Node) else node[1]

    def whole(node: _Node) -> Any:
        if issubclass(node.kind, tuple):
            new = tuple_of(node.kind, [part(item) for _, item in node.items])
        else:
            new = _empty(node.kind, node.setting)
            made.append(new)
            if node.items:
                put_items(new, [(key, part(item)) for key, item in node.items])
        for name, item in node.attributes:
            if dataclasses.is_dataclass(new):  # the fields may be slots
                object.__setattr__(new, name, part(item))
            else:
                vars(new)[name] = part(item)
        return new

    return whole(structure)


def _join_mapping(structure: _Node, leaves: Iterable[Any]) -> Any:
    """Returns a dataclass that is a dict of its fields, like the outputs of Hugging Face."""
    rest = iter(leaves)
    return structure.kind(**{name: next(rest) if item is None else item[1] for name, item in structure.attributes})


def _is_array_like(value: Any) -> bool:
    """True for tensors, arrays, and the placeholders that JAX uses for them."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, *TRACED_NUMBERS)) or type(value) is object:
        return True
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib") and not callable(value)


# ---- registration with JAX


def register(
    cls: type[_Instance],
    flatten: Callable[[_Instance], tuple[Iterable[Any], Any]] | None = None,
    unflatten: Callable[[Any, Iterable[Any]], _Instance] | None = None,
) -> type[_Instance]:
    """Makes a class a JAX pytree, so that its objects can be arguments and results of transformed functions.

    The fields of a dataclass are the children; text and other settings travel as structure. For any other class whose
    objects keep everything in attributes, the arrays in these are the children, and everything else, including Python
    numbers, is structure. Rebuilding does not run `__init__`. For a class that keeps its state elsewhere,
    `flatten(object)` returns the children and a hashable structure, and `unflatten(structure, children)` the object, as
    for `jax.tree_util.register_pytree_node`.

    A call registers the classes that it meets by itself; this function is for objects passed to `jax.jit` earlier, and
    can be used as a decorator. A call works on a rebuilt copy: return the object from the method to see its changes.

    Registering twice is no error. Raises `TypeError` for a class that needs functions and has none.
    """
    if (flatten is None) != (unflatten is None):
        raise TypeError(f"{cls.__name__} has one of flatten and unflatten; give both, or neither")
    if cls in _KINDS:
        return cls
    if flatten is not None and unflatten is not None:
        jax.tree_util.register_pytree_node(cls, flatten, unflatten)
        _KINDS[cls] = "functions"
    elif dataclasses.is_dataclass(cls):
        jax.tree_util.register_pytree_with_keys(cls, _split_fields, _join_mapping if issubclass(cls, dict) else _join)
        _KINDS[cls] = "fields"
    elif is_plain_class(cls) or built_in(cls):
        jax.tree_util.register_pytree_with_keys(cls, _split, _join)
        _KINDS[cls] = "parts"
    else:
        raise TypeError(
            f"{cls.__name__} keeps its state elsewhere than in attributes; give flatten and unflatten, make it a "
            "dataclass, or pass its parts in a dict"
        )
    return cls


def convert(tree: Any, leaf: Callable[[Any], Any], objects: bool = False) -> Any:
    """Applies `leaf` like `jax.tree.map` to any tree of the code; dataclasses not met before are registered on the way.

    With `objects`, also over the attributes of other objects, which are rebuilt. Dicts keep their order. What the tree
    holds twice, the result holds twice.
    """
    known: dict[int, tuple[Any, Any]] = {}

    def visit(value: Any) -> Any:
        if id(value) in known:
            return known[id(value)][1]
        kind = type(value)
        if kind is dict:  # JAX would sort it
            new: Any = dict(zip(value, map(visit, value.values()), strict=True))
        elif kind is list or kind is tuple:
            new = kind(map(visit, value))
        else:
            how = _how(value)
            if how == "leaf" or (how == "parts" and not objects):
                new = leaf(value)
            elif how == "parts":
                register(kind)
                leaves, structure = _split(value)
                new = _join(structure, [visit(part) for _, part in leaves], leaf)
            else:
                if value is None:
                    new = None
                else:
                    new = jax.tree.map(visit, value, is_leaf=lambda part: part is not value)
        known[id(value)] = value, new  # the value is kept alive, so that no other one gets its id
        return new

    return visit(tree)


def named_inputs(args: tuple, kwargs: dict) -> tuple[dict[str, Any], Any]:
    """Returns every leaf of a call's inputs by its name (`0`, `carry.inner.z_H`), and the structure."""
    flat, structure = jax.tree_util.tree_flatten_with_path(convert((args, kwargs), lambda v: v, objects=True))
    return {path_name(path[1:]): value for path, value in flat}, structure


def path_name(path: tuple) -> str:
    """Returns a path in a tree: `carry.inner.z_H`, `0.x`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_number(value: Any) -> bool:
    """True if JAX accepts it as a number; a call may return text and other objects, too."""
    return is_array(value) or isinstance(value, (bool, int, float, complex))


def _flatten_packed(packed: PackedSequence) -> tuple[list, tuple[int, ...] | None]:
    """Batch sizes decide shapes: they travel as structure, unless they are traced."""
    sizes = getattr(packed.batch_sizes, "value", packed.batch_sizes)  # in case it is a tensor of the bridge
    known = None
    if not isinstance(sizes, Tracer) and (is_array(sizes) or isinstance(sizes, torch.Tensor)):
        with below_modes():
            known = tuple(sizes.tolist())
    children = packed if known is None else packed._replace(batch_sizes=None)
    return [(GetAttrKey(name), child) for name, child in zip(packed._fields, children, strict=True)], known


def _rebuild_packed(known: tuple[int, ...] | None, children: Iterable[Any]) -> PackedSequence:
    packed = PackedSequence._make(children)
    if known is None:
        return packed
    with below_modes():
        return packed._replace(batch_sizes=torch.tensor(known, dtype=torch.int64))


jax.tree_util.register_pytree_with_keys(PackedSequence, _flatten_packed, _rebuild_packed)
jax.tree_util.register_pytree_node(torch.Size, lambda size: ((), tuple(size)), lambda size, _: torch.Size(size))


# ---- results that are no pytrees

NO_PYTREE = (
    "return a tuple, a list, a dict, a dataclass or an object that keeps it in an attribute, or give `bridge.register` "
    "functions that flatten and rebuild it"
)


def tensor_inside(value: Any) -> str | None:
    """Returns the path to a tensor that an object holds at any depth, such as `.value[0]`; None without one."""
    todo = [("", value)]
    seen = {}
    while todo:
        path, value = todo.pop()
        if isinstance(value, (torch.Tensor, *TRACED_NUMBERS)):
            return path
        if type(value) not in ATOMS and id(value) not in seen:
            seen[id(value)] = value
            todo += [(path + step, part) for step, part in parts_of(value)]
    return None


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """Returns the parts of a container, a function or an object, each with the step to it."""
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
    is_set = isinstance(value, (set, frozenset))
    if is_set:
        items = enumerate(value)
    elif built_in(type(value)):
        items = items_of(value)
    else:
        items = ()
    return [*((f"[{key!r}]", item) for key, item in items), *((f".{name}", item) for name, item in named.items())]
