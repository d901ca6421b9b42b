"""Kinds of ATen operations by their schemas: views, writes, draws, and the operation without its write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge._compat.torch import arguments, overload_name, returns, schema_name
from bridge.dispatch.random import RANDOM
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten


_EACH = "aten::_foreach_"
_OF_ONE = {
    "maximum.Scalar": "clamp_min",
    "maximum.ScalarList": "clamp_min",
    "minimum.Scalar": "clamp_max",
    "minimum.ScalarList": "clamp_max",
    "norm.Scalar": "linalg_vector_norm",
}
"""Operations on lists whose names are not those of the operation on one tensor, by what follows `_foreach_`."""


def each_of(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Callable[..., Any], tuple, dict]]:
    """The operation on one tensor, with its arguments, for every tensor in the lists of a `_foreach_` one.

    Raises `NotImplementedError` if there is none.
    """
    name = schema_name(func).removeprefix(_EACH)
    base, mark = name.removesuffix("_"), "_" * name.endswith("_")
    one = getattr(aten, _OF_ONE.get(f"{base}.{overload_name(func)}", base) + mark, None)
    given = {a.name: value for a, value in zip(arguments(func), args, strict=False)} | kwargs
    if "scalars" in given and base in ("addcdiv", "addcmul"):
        given["value"] = given.pop("scalars")
    if one is None or isinstance(given.get("value"), torch.Tensor):
        raise NotImplementedError("its form for lists; call the operation for one tensor on each of them")
    lists = {a.name for a in arguments(func) if "List[" in str(a.type)} | {"value"}
    lists = {key: value for key, value in given.items() if key in lists and isinstance(value, (list, tuple))}
    if len(set(map(len, lists.values()))) > 1:
        raise RuntimeError(f"lists must have the same number of items, got {[len(v) for v in lists.values()]}")
    for items in zip(*lists.values(), strict=True):
        mine = given | dict(zip(lists, items, strict=True))
        keywords = {key: mine.pop(key) for key in ("alpha", "value", "dtype") if key in mine}
        yield one, tuple(mine.values()), keywords


@functools.cache
def kind_of(func: Any) -> str:
    """`each` (an operation on every tensor of a list), `write`, `view` or `compute`."""
    if schema_name(func).startswith(_EACH):
        return "each"
    if written_places(func):
        return "write"
    if any(r.alias_info is not None for r in returns(func)):
        return "view"
    return "compute"


@functools.cache
def takes_dimension(func: Any) -> bool:
    """True if it acts along dimensions that it is told."""
    return any(a.name in ("dim", "dims") for a in arguments(func))


def shapes_by_data(func: Any) -> bool:
    """True if the shape of its result depends on values."""
    return torch.Tag.dynamic_output_shape in func.tags or func is aten.index.Tensor


def draws_numbers(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether, with these arguments, dropout is on inside of it."""
    names = [a.name for a in arguments(func)]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p"))


_RENAMED = {"normal_": "normal_functional", "bernoulli_.float": "bernoulli.p"}


@functools.cache
def functional_op(func: Any) -> Any:
    """The operation without the write: `mul_.Tensor` -> `mul.Tensor`, `sum.IntList_out` -> `sum.dim_IntList`."""
    name, overload = schema_name(func).removeprefix("aten::"), overload_name(func)
    full = f"{name}.{overload}"
    renamed = _RENAMED.get(full) or _RENAMED.get(name)
    if renamed is not None:
        name, _, overload = renamed.partition(".")
        return getattr(getattr(aten, name), overload or "default")
    wanted = [
        (a.name, str(a.type))
        for a in arguments(func)
        if not (a.alias_info is not None and a.alias_info.is_write and a.kwarg_only)
    ]
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
    """True if its result may depend on a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags or any(a.name == "generator" for a in arguments(func))


def is_draw(func: Any) -> bool:
    """True if an ATen op, in place or not, is one of those whose numbers `verify` records and replays."""
    if not is_random(func):
        return False
    try:
        return (functional_op(func) if kind_of(func) == "write" else func) in RANDOM
    except NotImplementedError:
        return False


def functional_of(func: Any, args: tuple, kwargs: dict) -> tuple[BridgeTensor, Any, tuple, dict]:
    """(tensor written, functional op, its args, its kwargs)."""
    written = [a for a in arguments(func) if a.alias_info is not None and a.alias_info.is_write]
    if len(written) != 1 or "[]" in str(written[0].type):
        raise NotImplementedError("it writes several tensors at once")
    if func in (aten.copy_.default,):
        return args[0], aten.copy.default, args, kwargs
    if written[0].kwarg_only:
        kwargs = dict(kwargs)
        target = kwargs.pop(written[0].name)
    else:
        target = args[0]
    return target, functional_op(func), args, kwargs


@functools.cache
def has_out(func: Any) -> bool:
    """True if the operation writes its result into the tensor of `out=`."""
    return any(arguments(func)[place].kwarg_only for place, _ in written_places(func))


@functools.cache
def written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Returns place and name of each argument that the operation writes into."""
    named = enumerate(arguments(func))
    return tuple((i, a.name) for i, a in named if a.alias_info is not None and a.alias_info.is_write)


def written_arguments(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Returns the tensors that the operation writes into."""
    written: list[torch.Tensor] = []
    for place, name in written_places(func):
        given: Any = kwargs.get(name, args[place] if place < len(args) else None)
        written += [t for t in (given if type(given) in (list, tuple) else [given]) if isinstance(t, torch.Tensor)]
    return written
