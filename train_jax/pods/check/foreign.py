"""Modules from other projects, compared with PyTorch on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import bridge
from train_jax.pods.check.context import Context
from train_jax.pods.check.rows import Row, named

TOLERANCE = 1e-3
"""Largest error, unless 8 times the difference between PyTorch's float32 and float64 is larger."""
_IDS = (2, 12)


class _Recurrent(nn.Module):
    """A classifier of token sequences by an LSTM or a GRU of torch."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(24, 5)
        self.rnn = kind(16, 24, num_layers=2, batch_first=True)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0][:, -1])


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)


def _cnn() -> nn.Module:
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(8, 16, 3), nn.GroupNorm(4, 16), nn.SiLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 6 * 6, 5))


def _latents(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _ids() -> torch.Tensor:
    return torch.randint(0, 32, _IDS, generator=torch.Generator().manual_seed(0))


_TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple]]] = {
    "nn.TransformerEncoder": (_encoder, lambda: (_latents(2, 12, 32),)),
    "an LSTM classifier": (lambda: _Recurrent(nn.LSTM), lambda: (_ids(),)),
    "a CNN with BatchNorm": (_cnn, lambda: (_latents(2, 3, 16, 16),)),
    "nn.TransformerDecoder": (_decoder, lambda: (_latents(2, 12, 32), _latents(2, 9, 32))),
    "a GRU classifier": (lambda: _Recurrent(nn.GRU), lambda: (_ids(),)),
}


def foreign_rows(context: Context) -> list[Row]:
    """Compares outputs, gradients and buffers of two calls of each module, in float32."""
    return [_row(name) for name in _TORCH]


def _row(name: str) -> Row:
    build, inputs = _TORCH[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build().train()
        args = inputs()
    try:
        report = bridge.verify(module, *args, tolerance=TOLERANCE, jitter=0.02, input_gradients=False)
    except bridge.BridgeError as error:
        return named(name, " ".join(str(error).split())[:300], fail=True)
    beyond = report.count("beyond tolerance")
    where = report.environment
    text = f"{len(report.rows)} leaves in float32, products {where.matmul_precision}, on {where.device}"
    worst = max(each.error for each in report.rows)
    text += f"; largest error {worst:.0e}" + f"; {beyond} beyond, most {report.worst.name}" * bool(beyond)
    return named(name, text, fail=bool(beyond), limit=f"{TOLERANCE:g}, or 8 x PyTorch's rounding", error=worst)
