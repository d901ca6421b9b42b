"""A batch of the user, of any structure, as arrays by name: what a training step takes.

Tensors and arrays in dicts, lists, tuples, named tuples and dataclasses get names such as `0.input_ids`. Everything
else in a batch, such as text and numbers of Python, is part of its form and must be the same in every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from train_jax.errors import UserError

WHOLE = "batch"
"""Name of a batch that is one tensor."""


@dataclasses.dataclass(frozen=True)
class ArrayLeaf:
    """The place of an array in a form."""

    name: str
    is_scalar: bool
    """True for an array without axes, which is stored with one axis of size 1."""


class Form:
    """The structure of a batch, with an `ArrayLeaf` in the place of each array."""

    def __init__(self, batch: Any):
        self._leaves: dict[str, ArrayLeaf] = {}
        self._tree = mapped(batch, self._leaf_of)

    def _leaf_of(self, value: Any, name: str) -> Any:
        if not is_array(value):
            return value
        leaf = ArrayLeaf(name or WHOLE, not value.shape)
        self._leaves[leaf.name] = leaf
        return leaf

    @property
    def names(self) -> list[str]:
        return list(self._leaves)

    def arrays(self, batch: Any, where: str) -> dict[str, np.ndarray]:
        """Returns the arrays of a batch of this form by name, with at least one axis.

        `where` is the function that made it, for messages. Raises `UserError` for a batch of another form.
        """
        other = Form(batch)
        if difference := _difference(self._tree, other._tree, ""):
            raise UserError(f"{where} returns batches of different forms: {difference}; return the same form each time")
        return {name: as_numpy(value, f"{where}: {name}") for name, value in self.leaves(batch).items()}

    def leaves(self, batch: Any) -> dict[str, Any]:
        """Returns the tensors and arrays of a batch by name, with at least one axis."""
        return {name: value if value.shape else value.reshape(1) for name, value in arrays_in(batch).items()}

    def batch(self, arrays: Mapping[str, Any]) -> Any:
        """Returns the batch with these arrays, or tensors, in their places."""

        def filled(value: Any, _: str) -> Any:
            if not isinstance(value, ArrayLeaf):
                return value
            array = arrays[value.name]
            return array[0] if value.is_scalar else array

        return mapped(self._tree, filled)


def arrays_in(batch: Any) -> dict[str, Any]:
    """Returns the tensors and arrays of a batch by name."""
    found: dict[str, Any] = {}

    def note(value: Any, name: str) -> Any:
        if is_array(value):
            found[name or WHOLE] = value
        return value

    mapped(batch, note)
    return found


def is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, np.generic))


def as_numpy(value: Any, what: str) -> np.ndarray:
    """Returns a tensor or an array as NumPy. Raises `UserError` for a dtype or integers that JAX does not hold."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        value = value.resolve_conj().resolve_neg().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise UserError(f"{what} is an array of {array.dtype}, expected numbers; convert or omit it in collate")
    if array.dtype in (np.int64, np.uint64) and array.size:
        limits = np.iinfo(np.int32)
        if array.min() < limits.min or array.max() > limits.max:
            raise UserError(f"{what} has integers beyond 32 bits, which JAX computes with; use smaller ones")
        return array.astype(np.int32)
    return array


def mapped(value: Any, function: Callable[[Any, str], Any], name: str = "") -> Any:
    """Returns the structure with `function(leaf, name)` in the place of each leaf."""

    def below(key: Any) -> str:
        return f"{name}.{key}" if name else str(key)

    if isinstance(value, ArrayLeaf):
        return function(value, name)
    if isinstance(value, Mapping):
        parts = {key: mapped(each, function, below(key)) for key, each in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # pyright: ignore[reportCallIssue]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields: Any = value._fields  # pyright: ignore[reportAttributeAccessIssue]
        return type(value)(*(mapped(getattr(value, key), function, below(key)) for key in fields))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(each, function, below(key)) for key, each in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{k: mapped(getattr(value, k), function, below(k)) for k in keys})
    return function(value, name)


def _difference(one: Any, other: Any, name: str) -> str:
    """Returns the first difference between two forms in words; empty for none."""
    where = name or WHOLE
    are_sequences = {type(one), type(other)} == {list, tuple}  # default_collate makes a list of a tuple
    if type(one) is not type(other) and not are_sequences:
        return f"{where} is {_kind(one)} and {_kind(other)}"
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            different = ", ".join(map(str, sorted(one.keys() ^ other.keys(), key=str)))
            return f"{where} has {different} in one of them"
        pairs = [(one[key], other[key], key) for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where} has {len(one)} and {len(other)} entries"
        pairs = [(a, b, key) for key, (a, b) in enumerate(zip(one, other, strict=True))]
    elif dataclasses.is_dataclass(one) and not isinstance(one, ArrayLeaf):
        keys = [field.name for field in dataclasses.fields(one)]
        pairs = [(getattr(one, key), getattr(other, key), key) for key in keys]
    else:
        return "" if one == other else f"{where} is {one!r} and {other!r}, which cannot change unless it is a tensor"
    differences = (_difference(a, b, f"{name}.{key}" if name else str(key)) for a, b, key in pairs)
    return next(filter(None, differences), "")


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, ArrayLeaf) else type(value).__name__
