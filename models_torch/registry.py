"""Architectures by name: configuration, builder with loss head, a tiny configuration and batch to try."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models_torch.losses import IGNORE_LABEL_ID, ACTLossHead
from models_torch.trm import TRM, TRMConfig


@dataclass(frozen=True)
class Architecture:
    """How to configure and build one architecture."""

    config_class: type
    build: Callable[
        [Any], nn.Module
    ]  # configuration -> module with its loss head, weights from torch's global generator
    tiny_config: Any  # float32, a forward pass in milliseconds: for tests, `verify` and a first look


ARCHITECTURES = {
    "trm": Architecture(
        config_class=TRMConfig,
        build=lambda config: ACTLossHead(TRM(config), config.loss_type),
        tiny_config=TRMConfig(
            batch_size=4,
            seq_len=16,
            vocab_size=6,
            num_puzzle_identifiers=5,
            hidden_size=32,
            num_heads=4,
            H_cycles=2,
            L_cycles=2,
            mlp_multiple_of=16,
            puzzle_emb_ndim=32,
            puzzle_emb_len=2,
            halt_max_steps=4,
            forward_dtype="float32",
        ),
    ),
}


def architecture(name: str) -> Architecture:
    """The architecture called `name`; a ValueError that lists the known names if there is none."""
    if name not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {name!r}; use one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def build(name: str, config: Any) -> nn.Module:
    """A fresh module with its loss head; call `torch.manual_seed` first for reproducible weights."""
    return architecture(name).build(config)


def example_batch(config: Any, batch_size: int, seed: int) -> dict[str, Tensor]:
    """A random int32 batch that `config` accepts, with about one label in eight ignored, as in padding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    labels = draw(config.vocab_size, batch_size, config.seq_len)
    padding = draw(8, batch_size, config.seq_len) == 0
    return {
        "inputs": draw(config.vocab_size, batch_size, config.seq_len),
        "labels": torch.where(padding, IGNORE_LABEL_ID, labels),
        "puzzle_identifiers": draw(config.num_puzzle_identifiers, batch_size),
    }
