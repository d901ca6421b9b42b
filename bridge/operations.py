"""What an ATen operation is: whether it views, writes or draws, what it is without its write, who else lowers it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch
import torchax

from bridge.randomness import RANDOM
from bridge.semantics import BridgeTensor

aten = torch.ops.aten


def is_composite(func: Any) -> bool:
    """Whether PyTorch itself takes it apart into others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def kind_of(func: Any) -> str:
    """`write`, `view` or `compute`."""
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            return "write"
    if any(r.alias_info is not None for r in func._schema.returns):
        return "view"
    return "compute"


def shapes_by_data(func: Any) -> bool:
    """Whether the shape of its result depends on values."""
    return torch.Tag.dynamic_output_shape in func.tags or func is aten.index.Tensor


def draws_numbers(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether, with these arguments, dropout is on inside of it."""
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p"))


_RENAMED = {"normal_": "normal_functional", "bernoulli_.float": "bernoulli.p"}


@functools.cache
def functional_op(func: Any) -> Any:
    """The operation without the write: `mul_.Tensor` -> `mul.Tensor`, `sum.IntList_out` -> `sum.dim_IntList`."""
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    full = f"{name}.{overload}"
    renamed = _RENAMED.get(full) or _RENAMED.get(name)
    if renamed is not None:
        name, _, overload = renamed.partition(".")
        return getattr(getattr(aten, name), overload or "default")
    wanted = [
        (a.name, str(a.type))
        for a in func._schema.arguments
        if not (a.alias_info is not None and a.alias_info.is_write and a.kwarg_only)
    ]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else getattr(aten, name)
    for candidate in packet.overloads() if packet is not None else ():
        op = getattr(packet, candidate)
        if kind_of(op) != "write" and [(a.name, str(a.type)) for a in op._schema.arguments] == wanted:
            return op
    raise NotImplementedError(f"{full} has no functional form")


def is_draw(func: Any) -> bool:
    """Whether an ATen op, in place or not, is one of those whose numbers `verify` records and replays."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    try:
        return (functional_op(func) if kind_of(func) == "write" else func) in RANDOM
    except NotImplementedError:
        return False


def functional_of(func: Any, args: tuple, kwargs: dict) -> tuple[BridgeTensor, Any, tuple, dict]:
    """(tensor written, functional op, its args, its kwargs)."""
    written = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
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
def _torchax() -> Any:
    """The library of lowerings; made late, because making it claims the devices, and never part of a trace."""
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        return torchax.default_env()


@functools.cache
def torchax_lowering(func: Any) -> Callable | None:
    """torchax's function of arrays for it, if there is one that needs nothing else."""
    for key in (func, func.overloadpacket):
        op = _torchax()._ops.get(key)
        if op is not None and op.is_jax_function and not op.needs_env:
            return op.func
    return None


@functools.cache
def decomposition(func: Any) -> Callable | None:
    """How torchax or PyTorch make it of others."""
    from torch._decomp import decomposition_table

    op = _torchax()._decomps.get(func) or _torchax()._decomps.get(func.overloadpacket)
    return op.func if op is not None else decomposition_table.get(func)
