"""Arguments that PyTorch's kernels refuse while its meta device takes them: types, and numbers out of range.

The kernel itself is asked, on the host, with zeros in place of traced tensors, once for each signature of a process.
What it refuses is its own error, also where the meta device refuses it in other words. Only elementwise operations are
asked with smaller sizes, which keep their relations there: other kernels may read beyond a tensor that is too small for
the rest. Large arguments of those are not checked.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from bridge._compat.torch import arguments, below_modes, schema_name, tree_map_only
from bridge.errors import BridgeError
from bridge.metas import tensors_in
from bridge.operations import has_out, is_random, kind_of
from bridge.tensors import BridgeTensor

aten = torch.ops.aten

_SMALL = 4
"""The largest size of a dimension for elementwise operations."""

_AFFORDABLE = 2**16
"""Elements up to which the kernel is asked with the real sizes."""

_BEARABLE = 2**26
"""As that, where the meta device has refused the arguments: what the kernel refuses, too, is not computed."""

_FITTING: set[Any] = set()
"""Signatures that the kernel takes."""

_MANY = 2**14
"""Signatures after which they are forgotten."""


def refused_by_kernel(func: Any, args: tuple, kwargs: dict) -> Exception | None:
    """What PyTorch's kernel raises for arguments of these types, sizes and numbers, if it does."""
    if not _can_be_asked(func) or not any(isinstance(t, BridgeTensor) for t in tensors_in((args, kwargs))):
        return None
    error = _of_out(func, args, kwargs)
    if error is not None:
        return error
    try:
        key = func, _signature(args), _signature(tuple(kwargs.items())) if kwargs else None
        if key in _FITTING:
            return None
    except (TypeError, RuntimeError):  # an argument without a hash, or a tensor that is no plain one
        return None
    by_values = torch.Tag.pointwise not in func.tags
    error = _asked(func, args, kwargs, by_values)
    if error is None and not (by_values and any(map(_is_index, tensors_in((args, kwargs))))):
        if len(_FITTING) >= _MANY:
            _FITTING.clear()
        _FITTING.add(key)
    return error


def as_said_by_kernel(error: Exception, func: Any, args: tuple, kwargs: dict) -> Exception | None:
    """The kernel's own error where PyTorch's meta device, or Python code of it, has raised `error`.

    None if the kernel takes the arguments, is not asked, or is not reached because the autograd layer raises before.
    """
    if isinstance(error, (BridgeError, jax.errors.JaxRuntimeError)) or not isinstance(error, _OF_ARGUMENTS):
        return None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_code.co_filename in _OF_AUTOGRAD or not _can_be_asked(func):
        return None
    return _asked(func, args, kwargs, by_values=True, affordable=_BEARABLE)


_OF_ARGUMENTS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
_OF_AUTOGRAD = frozenset(
    os.path.join(os.path.dirname(__file__), *name.split("/"))
    for name in ("aliasing.py", "memory.py", "lowerings/no_derivative.py")
)
"""Files that raise what PyTorch's autograd layer and its checks of memory raise, before a kernel looks at sizes."""


def _is_index(tensor: torch.Tensor) -> bool:
    """A constant that may decide by its values whether the kernel takes it."""
    return not isinstance(tensor, BridgeTensor) and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


@functools.cache
def _can_be_asked(func: Any) -> bool:
    """Not what makes views or random numbers, what PyTorch's engine calls, nor what has the shape of its values."""
    if func in _IN_SPITE_OF_TAGS:
        return True
    if func.namespace != "aten" or kind_of(func) == "view" or "backward" in func.name() or func in _BY_VALUES:
        return False
    return not is_random(func) and not {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape} & set(func.tags)


_IN_SPITE_OF_TAGS = {
    aten._ctc_loss.default, aten.index.Tensor, aten.one_hot.default, aten.scaled_dot_product_attention.default,
}  # fmt: skip

_BY_VALUES = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten._linalg_check_errors.default,
    aten.repeat_interleave.Tensor, aten.set_.source_Tensor, aten.equal.default, aten.allclose.default,
    aten.segment_reduce.default,
}  # fmt: skip
"""Operations that raise, or have a shape, by values."""


def _signature(value: Any) -> Any:
    """What of an argument decides whether the kernel takes it. `True` and `1` are not the same."""
    if isinstance(value, BridgeTensor):
        return value.dtype, value._meta.shape
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if type(value) in (list, tuple):
        return tuple(map(_signature, value))
    return type(value), value


def _asked(func: Any, args: tuple, kwargs: dict, by_values: bool, affordable: int = _AFFORDABLE) -> Exception | None:
    """The error with the real sizes if every attempt has failed, with zeros and with ones in the same way."""
    named = {"device": "cpu", "dropout_p": 0.0}
    kwargs = {k: named.get(k, v) for k, v in kwargs.items()}
    args = tuple(named.get(a.name, v) for a, v in zip(arguments(func), args, strict=False))
    errors: list[Exception] = []
    with below_modes(), torch.no_grad():
        for attempt in _attempts((args, kwargs), by_values, affordable):
            try:
                some, rest = tree_map_only(torch.Tensor, attempt, (args, kwargs))
                func(*some, **rest)
                return None
            except Exception as error:
                if not isinstance(error, (RuntimeError, IndexError, ValueError, TypeError)):
                    return None
                errors.append(error)
    if not errors or str(errors[-1]) != str(errors[-2]) or any(n in str(errors[-1]) for n in _NOT_ON_THE_HOST):
        return None
    return errors[-1]


_NOT_ON_THE_HOST = ("for 'Half'", "for 'BFloat16'", "for 'Float8")


def _attempts(values: Any, by_values: bool, affordable: int) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """What takes the place of each tensor."""
    sizes = [(t.numel(), by_values and _is_index(t)) for t in tensors_in(values)]
    if sum(n for n, is_index in sizes if is_index) > affordable:
        return

    def stand_in(tensor: torch.Tensor, fill: int) -> torch.Tensor:
        if by_values and _is_index(tensor):
            return tensor.clone()
        shape = tensor.shape if by_values else [min(n, _SMALL) for n in tensor.shape]
        return torch.full(shape, fill, dtype=tensor.dtype)

    if by_values and sum(n for n, _ in sizes) > affordable:
        return
    for fill in (0, 1):
        yield functools.partial(stand_in, fill=fill)


def _of_out(func: Any, args: tuple, kwargs: dict) -> Exception | None:
    if not has_out(func) or not torch.is_grad_enabled():
        return None
    if not any(t.requires_grad for t in tensors_in((args, kwargs))):
        return None
    name = schema_name(func).removeprefix("aten::")
    return RuntimeError(
        f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the arguments "
        "requires grad."
    )
