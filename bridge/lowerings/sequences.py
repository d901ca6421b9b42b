"""Packed sequences, whose lengths are known while the call is traced, and recurrent layers as scans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge._compat.torch import below_modes
from bridge.context import refusal
from bridge.lowerings.registry import decomposes, lowers
from bridge.lowerings.values import is_traced, known
from bridge.symbolic.constants import as_constant

aten = torch.ops.aten


def _known(lengths: torch.Tensor) -> torch.Tensor:
    if is_traced(lengths):
        remedy = as_constant(lengths.value, "give them as a list or a constant tensor")  # pyright: ignore
        raise refusal("the lengths of packed sequences are traced and decide shapes", remedy)
    return known(lengths)


@decomposes(aten._pack_padded_sequence.default)
def pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch packs the indices of the rows, which then gather the rows."""
    lengths = _known(lengths)
    with below_modes():
        rows = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1], 1)
        index, sizes = aten._pack_padded_sequence.default(rows, lengths, batch_first)
    return x.flatten(0, 1)[_constant(index[:, 0])], _constant(sizes)


@decomposes(aten._pad_packed_sequence.default)
def pad(
    x: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding_value: Any, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch pads the indices of the rows, counted from 1, so that 0 stands for padding."""
    sizes = _known(sizes)
    with below_modes():
        rows = torch.arange(1, x.shape[0] + 1)[:, None]
        index, lengths = aten._pad_packed_sequence.default(rows, sizes, batch_first, 0, total_length)
    index = _constant(index[..., 0])
    padding = (index == 0).reshape(*index.shape, *(1,) * (x.dim() - 1))
    return x[(index - 1).clamp(min=0)].masked_fill(padding, padding_value), _constant(lengths)


def _constant(real: torch.Tensor) -> torch.Tensor:
    """Returns a constant that belongs to the call."""
    return torch.tensor(real.tolist(), dtype=real.dtype).reshape(real.shape)


@lowers(aten.mkldnn_rnn_layer.default)
def lstm_layer(
    x, w_input, w_hidden, b_input, b_hidden, h, c, reverse, batch_sizes, mode, size, layers, has_biases, *_settings
):
    """Runs one direction of one LSTM layer over `(time, batch, features)`, as PyTorch's CPU build does.

    It is a scan, so that a long sequence compiles once, not once a step. The last output is MKL-DNN's workspace.
    """
    inputs = jnp.einsum("tbf,gf->tbg", x, w_input)
    if has_biases:  # otherwise the placeholders have the shape of the weights
        inputs = inputs + b_input + b_hidden

    def step(state, gates):
        hidden, cell = state
        i, f, g, o = jnp.split(gates + hidden @ w_hidden.T, 4, axis=-1)
        cell = jax.lax.logistic(f) * cell + jax.lax.logistic(i) * jnp.tanh(g)
        hidden = jax.lax.logistic(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    start = tuple(state.reshape(x.shape[1], -1) for state in (h, c))
    (hidden, cell), outputs = jax.lax.scan(step, start, inputs, reverse=bool(reverse))
    return outputs, hidden.reshape(h.shape), cell.reshape(c.shape), jnp.zeros(0, jnp.uint8)
