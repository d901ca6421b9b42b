"""Arguments that PyTorch's kernels refuse while its meta device takes them: indices out of range, dtypes.

An index is checked where it is a constant of the call. What is refused is run in PyTorch on zeros of the same shapes,
so that the error is PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge._compat.torch import below_modes, overload_name, tree_map_only
from bridge.kernel_checks import refused_by_kernel
from bridge.metas import tensors_in
from bridge.tensors import BridgeTensor

aten = torch.ops.aten

Check = Callable[[tuple, dict], bool]
"""Whether PyTorch would refuse the arguments of an operation."""

CHECKS: dict[Any, Check] = {}


def raise_if_refused(func: Any, args: tuple, kwargs: dict, nested: bool) -> None:
    """Raise PyTorch's own error for the arguments, if there is one.

    `nested`: the operation is part of a decomposition, so the types are ours, and only constants are checked.
    """
    check = CHECKS.get(func)
    if check is not None:
        _raise_if(check, func, args, kwargs)
    if not nested and func not in _CHECKED:
        error = refused_by_kernel(func, args, kwargs)
        if error is not None:
            raise error


def _raise_if(check: Check, func: Any, args: tuple, kwargs: dict) -> None:
    if check(args, kwargs):
        with below_modes():
            args, kwargs = tree_map_only(torch.Tensor, _copy, (args, kwargs))
            func(*args, **kwargs)


def raise_if_not_cast(func: Any, args: tuple, kwargs: dict) -> None:
    """Raise what PyTorch raises for an in-place operation whose result has a type that its target cannot hold."""
    if torch.Tag.pointwise in func.tags:
        _raise_if(_into_lesser_type, func, args, kwargs)


def _into_lesser_type(args: tuple, kwargs: dict) -> bool:
    target, *others = map(_kind_of_number, (*args, *kwargs.values()))
    return any(other > target for other in others)


def _kind_of_number(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        dtype = value.dtype
        return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype != torch.bool)
    return {bool: 0, int: 1, float: 2, complex: 3}.get(type(value), 0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, BridgeTensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().clone()


def _enter(names: str, check: Check) -> None:
    """For every overload, in place or not."""
    for name in names.split():
        for packet in (getattr(aten, name, None), getattr(aten, f"{name}_", None)):
            for overload in packet.overloads() if packet is not None else ():
                CHECKS[getattr(packet, overload)] = check


def _outside(index: Any, low: int, high: int, ignored: int | None = None) -> bool:
    """Whether a constant index has a value outside of [low, high)."""
    if not _is_constant(index) or index.dtype in (torch.bool, torch.uint8):
        return False
    with below_modes():
        wrong = (index < low) | (index >= high)
        return bool((wrong if ignored is None else wrong & (index != ignored)).any())


def _is_constant(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not isinstance(tensor, BridgeTensor) and not tensor.requires_grad


def _size(x: torch.Tensor, dim: int) -> int:
    return x.shape[dim] if x.dim() else 1


def _along_dimension(args: tuple, kwargs: dict) -> bool:
    return len(args) > 2 and isinstance(args[1], int) and _outside(args[2], 0, _size(args[0], args[1]))


def _of_rows(args: tuple, kwargs: dict) -> bool:
    return _outside(args[1], 0, args[0].shape[0])


def _of_elements(args: tuple, kwargs: dict) -> bool:
    return _outside(args[1], -args[0].numel(), args[0].numel())


def _of_classes(args: tuple, kwargs: dict) -> bool:
    x, target, *_, ignored = args
    return _outside(target, 0, x.shape[1 if x.dim() > 1 else 0], ignored)


def _in_brackets(args: tuple, kwargs: dict) -> bool:
    return any(wrong for wrong in _each_index(args[0], args[1]))


def _each_index(x: torch.Tensor, indices: list) -> Iterator[bool]:
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            yield index.shape != x.shape[dim : dim + index.dim()]
            dim += index.dim()
        else:
            yield dim < x.dim() and _outside(index, -x.shape[dim], x.shape[dim])
            dim += 1


def _of_one_dtype(args: tuple, kwargs: dict) -> bool:
    return len({t.dtype for t in tensors_in(args)}) > 1


def _of_nothing(args: tuple, kwargs: dict) -> bool:
    return len(args) == 1 and not args[0].numel()


def _not_floating(args: tuple, kwargs: dict) -> bool:
    return not (args[0].dtype.is_floating_point or args[0].dtype.is_complex)


def _not_integers(args: tuple, kwargs: dict) -> bool:
    return any(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors_in(args))


_enter(
    "gather index_select index_add index_copy index_fill index_reduce scatter scatter_add scatter_reduce",
    _along_dimension,
)
_enter("embedding embedding_bag _embedding_bag _embedding_bag_forward_only", _of_rows)
_enter("take put", _of_elements)
_enter("nll_loss_forward nll_loss2d_forward", _of_classes)
_enter("index index_put _unsafe_index", _in_brackets)
_enter("mm bmm addmm baddbmm addbmm mv addmv dot vdot linear convolution scaled_dot_product_attention", _of_one_dtype)
_enter("_softmax _log_softmax upsample_linear1d upsample_bicubic2d upsample_trilinear3d", _not_floating)
_enter("max min", _of_nothing)
_enter("bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift", _not_integers)


def _overloads(names: str) -> frozenset[Any]:
    packets = [getattr(aten, name) for name in names.split()]
    ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return frozenset(op for op in ops if not overload_name(op).endswith("out"))


_CHECKED = _overloads("mm bmm addmm baddbmm embedding _softmax _log_softmax convolution linear")
"""Operations of nearly every model, whose kernels refuse nothing else than what is checked here."""

ORDINARY = _overloads(
    "add mul div neg exp tanh sigmoid silu gelu rsqrt sqrt cos sin mean sum where cat clone copy_ _to_copy view "
    "_unsafe_view permute transpose t expand unsqueeze squeeze slice select split split_with_sizes detach alias "
    "native_layer_norm reshape _reshape_alias lift_fresh arange full zeros ones empty empty_like zeros_like ones_like"
)
"""Operations of nearly every model, whose kernels refuse nothing that their meta kernels take, and views."""
