"""Strides of results where PyTorch's meta device answers otherwise than its CPU does, channels last above all.

Strides decide whether `flatten` and `reshape` copy, so whether a later write reaches the source, and whether `view` is
possible. Where all arguments are contiguous the answers agree, and nothing more is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bridge.internals import convolution_format, decomposition
from bridge.lowerings.norms import batch_norm
from bridge.lowerings.registry import DECOMPOSITIONS, METAS, lowers
from bridge.tensors import BridgeTensor

aten, prims = torch.ops.aten, torch.ops.prims

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _suggested(x: torch.Tensor) -> torch.memory_format:
    """What PyTorch's `suggest_memory_format` says."""
    last = _CHANNELS_LAST.get(x.dim())
    return last if last and x.is_contiguous(memory_format=last) and not x.is_contiguous() else torch.contiguous_format


def _plain(x: torch.Tensor) -> bool:
    """Whether no other memory format describes it: a kernel of size 1 may be channels last and contiguous at once."""
    return x.stride() == torch.empty(x.shape, device="meta").stride()


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, *settings: Any) -> torch.Tensor:
    out = aten.convolution.default(x, weight, bias, *settings)
    if _plain(x) and _plain(weight):
        return out
    if x.dim() != 3:
        return torch.empty_like(out, memory_format=convolution_format(x, weight, *settings))
    stride, padding, dilation, transposed, extra, groups = settings  # PyTorch makes it an image of one row
    rows = [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *extra], groups
    chosen = convolution_format(x.contiguous().unsqueeze(2), weight.unsqueeze(2), *rows)
    return torch.empty_like(out.unsqueeze(2), memory_format=chosen).squeeze(2)


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As a sum of the same tensors, whose meta kernel is that of the CPU."""
    out = func(*args, **kwargs)
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if all(t.is_contiguous() for t in tensors):
        return out
    same = functools.reduce(aten.add.Tensor, [torch.empty_like(t, dtype=out.dtype) for t in tensors])
    return torch.empty_strided(out.shape, same.stride(), dtype=out.dtype, device="meta")


def _rolled(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=_suggested(x))


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous, as are both results of PyTorch's kernel."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


METAS[aten.convolution.default] = _convolution
METAS[aten.roll.default] = _rolled
METAS[aten.log_sigmoid_forward.default] = _log_sigmoid
for _op in (
    aten.copysign.Tensor,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.logaddexp.default,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.xlogy.Tensor,
    aten.special_xlog1py.default,
):
    METAS[_op] = functools.partial(_elementwise, _op)


def _formatted(made_of: Callable[..., Any], wanted: Callable[[torch.Tensor], torch.memory_format]) -> Callable:
    """The decomposition, with the first result in the memory format that is wanted for the first argument, and no view.

    PyTorch's kernels give new memory where nothing is to be done, too, as for one group of channels to shuffle.
    """

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = made_of(x, *args, **kwargs)
        first = made if isinstance(made, torch.Tensor) else made[0]
        if first.is_contiguous(memory_format=wanted(x)) and not _is_view_of(x, first):
            return made
        first = first.clone(memory_format=wanted(x))
        return first if isinstance(made, torch.Tensor) else (first, *made[1:])

    return run


def _is_view_of(x: torch.Tensor, result: torch.Tensor) -> bool:
    return isinstance(result, BridgeTensor) and isinstance(x, BridgeTensor) and result._cell.storage is x._cell.storage


def _composed(op: Any) -> Callable:
    """How torchax or PyTorch make the operation of others; asked at its first use, since it claims the devices."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made_of = decomposition(op)
        if made_of is None:
            raise NotImplementedError("neither a lowering nor a decomposition")
        return made_of(*args, **kwargs)

    return run


DECOMPOSITIONS[aten.native_batch_norm.default] = _formatted(batch_norm, _suggested)
for _op, _wanted in {
    aten.channel_shuffle.default: _suggested,
    aten.replication_pad2d.default: _suggested,
    aten.replication_pad3d.default: _suggested,
}.items():
    DECOMPOSITIONS[_op] = _formatted(_composed(_op), _wanted)


@lowers(prims.copy_strided.default)
def copy_strided(x, _stride):
    """Which is a matter of strides alone."""
    return x
