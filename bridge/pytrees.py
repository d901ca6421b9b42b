"""Dataclasses and containers that pass between the two sides: pytrees in JAX, plain objects in PyTorch."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes
from bridge.errors import BridgeError

_Instance = TypeVar("_Instance")
_REGISTERED: set[type] = set()


def register(
    cls: type[_Instance],
    flatten: Callable[[_Instance], tuple[Iterable[Any], Any]] | None = None,
    unflatten: Callable[[Any, Iterable[Any]], _Instance] | None = None,
) -> type[_Instance]:
    """Make a class a JAX pytree, so that its objects can be arguments and results of a call.

    The fields of a dataclass are the children, text and other settings travel as structure; rebuilding does not run
    `__init__`. Usable as a decorator. For any other class, `flatten(object)` returns the children and a hashable
    structure, and `unflatten(structure, children)` the object, as for `jax.tree_util.register_pytree_node`. A call
    works on such a copy: return the object from the method to see what the call has changed.

    Registering twice is no error. Raises `TypeError` for a class that is neither.
    """
    if (flatten is None) != (unflatten is None):
        raise TypeError(f"{cls.__name__} has one of flatten and unflatten; give both, or neither for a dataclass")
    if cls in _REGISTERED:
        return cls
    if flatten is not None and unflatten is not None:
        jax.tree_util.register_pytree_node(cls, flatten, unflatten)
        _REGISTERED.add(cls)
        return cls
    if not dataclasses.is_dataclass(cls):
        raise TypeError(
            f"{cls.__name__} is not a dataclass; make it one, give flatten and unflatten, or pass its parts in a dict"
        )
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


def convert(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """`jax.tree.map` over whatever the code passes around; dataclasses not met before are registered on the way.

    Dicts keep their order.
    """

    def visit(value: Any) -> Any:
        if type(value) is dict:  # JAX would sort it
            _check_keys(value)
            return {key: convert(item, leaf) for key, item in value.items()}
        if _is_named_result(value):
            _register_named_result(type(value))
        elif _makes_itself(value):
            _register_named_tuple(type(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value) not in _REGISTERED:
            if _known_to_jax(value):
                _REGISTERED.add(type(value))
                return leaf(value)
            register(type(value))
        # Also of a class that another value has registered on the way.
        return convert(value, leaf) if type(value) in _REGISTERED else leaf(value)

    return jax.tree.map(visit, tree, is_leaf=_is_unregistered)


def _check_keys(value: dict) -> None:
    try:
        sorted(value)
    except TypeError as error:
        raise BridgeError(
            "a dict has keys of several types, which JAX cannot bring into an order; use keys of one type, such as str"
        ) from error


def _is_unregistered(value: Any) -> bool:
    return (
        type(value) is dict
        or _is_named_result(value)
        or _makes_itself(value)
        or (dataclasses.is_dataclass(value) and type(value) not in _REGISTERED)
    )


def _is_named_result(value: Any) -> bool:
    """`torch.return_types.max` and its like: tuples with names, which are no named tuples."""
    return type(value).__module__ == "torch.return_types" and type(value) not in _REGISTERED


def _register_named_result(cls: type) -> None:
    jax.tree_util.register_pytree_node(cls, lambda value: (tuple(value), None), lambda _, items: cls(tuple(items)))
    _REGISTERED.add(cls)


def _makes_itself(value: Any) -> bool:
    """Whether it is a named tuple whose class has a `__new__` of its own, which may refuse what JAX puts into it."""
    if not isinstance(value, tuple) or type(value) in _REGISTERED or not hasattr(value, "_fields"):
        return False
    return next(n for c in type(value).__mro__ for n in ("_fields", "__new__") if n in vars(c)) == "__new__"


def _register_named_tuple(cls: type) -> None:
    """Rebuilding does not run `__new__`."""
    keys = [jax.tree_util.GetAttrKey(name) for name in cls._fields]  # pyright: ignore[reportAttributeAccessIssue]

    def flatten_with_keys(value):
        return list(zip(keys, value, strict=True)), None

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, lambda _, items: tuple.__new__(cls, items))
    _REGISTERED.add(cls)


def _known_to_jax(value: Any) -> bool:
    return not jax.tree_util.all_leaves([value])


def is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_number(value: Any) -> bool:
    """Whether JAX takes it for a number; a call may return text and other objects, too."""
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


def _register_size() -> None:
    """Its numbers are children, as those of a tuple: under `jax.jit` they are arrays, and it is a plain tuple then."""

    def unflatten(_, numbers):
        numbers = tuple(numbers)
        return torch.Size(numbers) if all(type(n) is int for n in numbers) else numbers

    def flatten_with_keys(size):
        return [(jax.tree_util.SequenceKey(i), n) for i, n in enumerate(size)], None

    jax.tree_util.register_pytree_with_keys(torch.Size, flatten_with_keys, unflatten)
    _REGISTERED.add(torch.Size)


_register_packed_sequence()
_register_size()
