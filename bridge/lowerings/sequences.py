"""Packed sequences, of lengths that are known while the call is traced."""

from __future__ import annotations

from typing import Any

import torch

from bridge.arrays import tensor_of
from bridge.internals import Tracer, below_modes
from bridge.lowerings.registry import decomposes
from bridge.tensors import BridgeTensor

aten = torch.ops.aten


def _known(lengths: torch.Tensor) -> torch.Tensor:
    """The numbers on the host. Raises `NotImplementedError` where they are traced."""
    if not isinstance(lengths, BridgeTensor):
        return lengths
    if isinstance(lengths.value, Tracer):
        raise NotImplementedError(
            "the lengths of its sequences are traced and decide shapes; give them as a list or a constant tensor"
        )
    return tensor_of(lengths.value).to(torch.int64)


@decomposes(aten._pack_padded_sequence.default)
def pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch packs the numbers of the rows, and by them the rows are gathered."""
    lengths = _known(lengths)
    with below_modes():
        rows = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1], 1)
        index, sizes = aten._pack_padded_sequence.default(rows, lengths, batch_first)
    return x.flatten(0, 1)[_constant(index[:, 0])], _constant(sizes)


@decomposes(aten._pad_packed_sequence.default)
def pad(
    x: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding_value: Any, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse; row 0 of the numbers stands for padding."""
    sizes = _known(sizes)
    with below_modes():
        rows = torch.arange(1, x.shape[0] + 1)[:, None]
        index, lengths = aten._pad_packed_sequence.default(rows, sizes, batch_first, 0, total_length)
    index = _constant(index[..., 0])
    padding = (index == 0).reshape(*index.shape, *(1,) * (x.dim() - 1))
    return x[(index - 1).clamp(min=0)].masked_fill(padding, padding_value), _constant(lengths)


def _constant(real: torch.Tensor) -> torch.Tensor:
    """A constant that belongs to the call."""
    return torch.tensor(real.tolist(), dtype=real.dtype).reshape(real.shape)
