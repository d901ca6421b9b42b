"""Questions about an operation, which its schema answers, and the traversal of its arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import torch

from bridge._compat.torch import (
    arguments,
    overload_name,
    returns,
    schema_name,
)
from bridge.context import CallState
from bridge.symbolic.numbers import NUMBERS, as_operand, same_number, weak_array
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten


@functools.cache
def kind_of(func: Any) -> str:
    """Returns `write`, `view` or `compute`."""
    if written_places(func):
        return "write"
    if any(r.alias_info is not None for r in returns(func)):
        return "view"
    return "compute"


@functools.cache
def takes_dimension(func: Any) -> bool:
    """True if the operation acts along dimensions given as an argument."""
    return any(a.name in ("dim", "dims") for a in arguments(func))


def shapes_by_data(func: Any) -> bool:
    """True if the shape of its result depends on values."""
    return torch.Tag.dynamic_output_shape in func.tags or func is aten.index.Tensor


def draws_numbers(func: Any, args: tuple, kwargs: dict) -> bool:
    """True if, with these arguments, the operation applies dropout inside."""
    names = [a.name for a in arguments(func)]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p"))


_RENAMED = {"normal_": "normal_functional", "bernoulli_.float": "bernoulli.p"}


@functools.cache
def functional_op(func: Any) -> Any:
    """Returns the operation without write: `mul_.Tensor` -> `mul.Tensor`, `sum.IntList_out` -> `sum.dim_IntList`."""
    name = schema_name(func).removeprefix("aten::")
    overload = overload_name(func)
    full = f"{name}.{overload}"
    written = [place for place, _ in written_places(func)]
    if len(written) > 1 or any("[]" in str(arguments(func)[place].type) for place in written):
        raise NotImplementedError("it writes several tensors at once")
    renamed = _RENAMED.get(full) or _RENAMED.get(name)
    if renamed is not None:
        name, _, overload = renamed.partition(".")
        return getattr(getattr(aten, name), overload or "default")
    wanted = [(a.name, str(a.type)) for i, a in enumerate(arguments(func)) if not (i in written and a.kwarg_only)]
    if name.startswith("__i"):  # `<<=` is `__ilshift__`
        name = f"__{name.removeprefix('__i')}"
    else:
        name = name.removesuffix("_")
    packet = getattr(aten, name, None)
    for candidate in packet.overloads() if packet is not None else ():
        op = getattr(packet, candidate)
        if kind_of(op) != "write" and [(a.name, str(a.type)) for a in arguments(op)] == wanted:
            return op
    raise NotImplementedError(f"{full} has no functional form")


@functools.cache
def is_random(func: Any) -> bool:
    """True if the result may depend on a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags or any(a.name == "generator" for a in arguments(func))


def functional_of(func: Any, args: tuple, kwargs: dict) -> tuple[BridgeTensor, Any, tuple, dict]:
    """Returns (tensor written, functional op, its args, its kwargs)."""
    if func is aten.copy_.default:
        functional = aten.copy.default
    else:
        functional = functional_op(func)
    if has_out(func):
        ((_, name),) = written_places(func)
        return kwargs[name], functional, args, {key: value for key, value in kwargs.items() if key != name}
    return args[0], functional, args, kwargs


@functools.cache
def has_out(func: Any) -> bool:
    """True if the operation writes its result into the tensor of `out=`."""
    return any(arguments(func)[place].kwarg_only for place, _ in written_places(func))


@functools.cache
def written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Returns position and name of each argument that the operation writes into."""
    named = enumerate(arguments(func))
    return tuple((i, a.name) for i, a in named if a.alias_info is not None and a.alias_info.is_write)


def written_arguments(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Returns the tensors that the operation writes into."""
    written: list[torch.Tensor] = []
    for place, name in written_places(func):
        given: Any = kwargs.get(name, args[place] if place < len(args) else None)
        if isinstance(given, torch.Tensor):
            written.append(given)
        elif isinstance(given, (list, tuple)):
            written.extend(given)
    return written


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns every tensor among the arguments of an operation."""
    found: list[torch.Tensor] = []
    for value in values if type(values) in (list, tuple) else [values]:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in([*value])
        elif isinstance(value, dict):
            found += tensors_in(tuple(value.values()))
    return found


def with_tensors(values: Any, traced: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns `values` with `traced(tensor)` for each tensor that is not of the bridge; itself if nothing changes.

    `values`: arguments by position, or by keyword in a dict.
    """
    if type(values) is dict:
        return dict(zip(values, with_tensors([*values.values()], traced), strict=True))
    changed: list[Any] | None = None
    for place, value in enumerate(values):
        kind = type(value)
        if kind is BridgeTensor:
            continue
        if kind is list or kind is tuple:
            new = with_tensors(value, traced)
        elif issubclass(kind, torch.Tensor):
            new = traced(value)
        else:
            continue
        if new is not value:
            if changed is None:
                changed = [*values]
            changed[place] = new
    if changed is None:
        return values
    return type(values)(changed)


_OF_NUMBERS = re.compile(r"(Optional\[)?(number|float|Tensor)\b")
"""The types of arguments, by their text, whose number decides no shape."""
_SHAPED_BY_NUMBERS = frozenset({"aten::arange", "aten::range"})


@functools.cache
def takes_numbers(func: Any) -> frozenset[str]:
    """Returns the names of the arguments that may be traced numbers."""
    if schema_name(func) in _SHAPED_BY_NUMBERS:
        return frozenset()
    return frozenset(a.name for a in arguments(func) if _OF_NUMBERS.match(str(a.type)))


def with_numbers(context: CallState, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns the arguments with traced numbers of one kind for those that PyTorch's code has made of them.

    Raises `BridgeError` for one that decides a shape or a dimension.
    """
    named = zip((a.name for a in arguments(func)), args, strict=False)
    for name, value in (*named, *kwargs.items()):
        if type(value) in NUMBERS and name not in takes_numbers(func):
            context.value_for_python(as_operand(value))  # raises an error
    args = tuple(same_number(value) if type(value) in NUMBERS else value for value in args)
    return args, {name: same_number(value) if type(value) in NUMBERS else value for name, value in kwargs.items()}


def listed(values: Any) -> tuple | list:
    if isinstance(values, (tuple, list)):
        return values
    return (values,)


def arrays_of(values: Any, seen: list[BridgeTensor], of: Callable[[BridgeTensor], jax.Array] | None = None) -> Any:
    """Returns `values`, of a dict or a list, with arrays in place of tensors, which are appended to `seen`."""
    if type(values) is dict:
        return dict(zip(values, arrays_of([*values.values()], seen, of), strict=True))
    arrays = []
    for value in values:
        kind = type(value)
        if kind is BridgeTensor:
            seen.append(value)
            arrays.append(value.value if of is None else of(value))
        elif kind is list or kind is tuple:
            arrays.append(arrays_of(value, seen, of))
        elif kind in NUMBERS:
            arrays.append(weak_array(value))
        else:
            arrays.append(value)
    if type(values) is list:
        return arrays
    return tuple(arrays)
