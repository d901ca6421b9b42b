"""Modules from other projects, compared with PyTorch on the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import bridge
from train_jax.pod.prove.context import Context
from train_jax.pod.prove.rows import Row, absent, passed

TOLERANCE = 1e-3
"""Largest error, unless 8 times the difference between PyTorch's float32 and float64 is larger."""
_IDS = (2, 12)


class _Recurrent(nn.Module):
    """A classifier of token sequences by an LSTM or a GRU of torch."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(24, 5)
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
    "nn.Transformer": (
        lambda: nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True),
        lambda: (_latents(2, 9, 32), _latents(2, 7, 32)),
    ),
    "nn.MultiheadAttention": (
        lambda: nn.MultiheadAttention(32, 4, batch_first=True),
        lambda: (_latents(2, 9, 32), _latents(2, 7, 32), _latents(2, 7, 32)),
    ),
    "a 1-d U-Net": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 4, 2, 1), nn.GELU(), nn.ConvTranspose1d(8, 4, 4, 2, 1)),
        lambda: (_latents(2, 4, 16),),
    ),
}
_SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_GPT2 = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "GPT2Model": _GPT2, "LlamaModel": _SMALL, "BertModel": _SMALL, "Qwen2Model": _SMALL, "GPTNeoXModel": _SMALL,
    "RobertaModel": _SMALL | {"pad_token_id": 0}, "OPTModel": _SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "MistralModel": _SMALL | {"num_key_value_heads": 2}, "PhiModel": _SMALL,
    "ElectraModel": _SMALL | {"embedding_size": 32},
    "Gemma2Model": _SMALL | {"num_key_value_heads": 2, "head_dim": 8}, "StableLmModel": _SMALL,
}  # fmt: skip
"""Models of transformers by class, with the fields of their configuration."""


def foreign_rows(context: Context) -> list[Row]:
    """Compares outputs, gradients and buffers of two calls of each module, in float32."""
    names = [*_TORCH, *_TRANSFORMERS][: context.foreign]
    return [_row(name) for name in names]


def _row(name: str) -> Row:
    try:
        module, args, keywords = _built(name)
    except ImportError as error:
        return absent(name, str(error))
    try:
        report = bridge.verify(module, *args, tolerance=TOLERANCE, jitter=0.02, input_gradients=False, **keywords)
    except bridge.BridgeError as error:
        return passed(name, " ".join(str(error).split())[:300], fail=True)
    beyond, where = report.count("beyond tolerance"), report.environment
    text = f"{len(report.rows)} leaves in float32, products {where.matmul_precision}, on {where.device}"
    worst = max(each.error for each in report.rows)
    text += f"; largest error {worst:.0e}" + f"; {beyond} beyond, most {report.worst.name}" * bool(beyond)
    return passed(name, text, fail=bool(beyond), limit=f"{TOLERANCE:g}, or 8 x PyTorch's rounding", error=worst)


def _built(name: str) -> tuple[nn.Module, tuple, dict[str, Any]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in _TORCH:
            build, inputs = _TORCH[name]
            return build().train(), inputs(), {}
        library = importlib.import_module("transformers")
        model = getattr(library, name)
        return model(model.config_class(**_TRANSFORMERS[name])).eval(), (_ids(),), {"use_cache": False}
