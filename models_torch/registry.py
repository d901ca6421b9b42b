"""Models by name: configuration classes, constructors, tiny configurations and an example batch.

A name is one of `ARCHITECTURES` (puzzle models), one of `LANGUAGE_MODELS`, or `package.module:Class` for a model of
the user (`outside.py`, `outside_language.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models_torch import outside, outside_language
from models_torch.act import ACT
from models_torch.config import ACTConfig, ArchitectureConfig, ModelConfig
from models_torch.gpt import GPT, GPTConfig
from models_torch.gpt_2026 import GPT2026, GPT2026Config
from models_torch.hrm import HRM, HRMConfig
from models_torch.hrm_text import HRMText, HRMTextConfig
from models_torch.losses import IGNORE_LABEL_ID, ACTLossHead
from models_torch.transformer import Transformer, TransformerConfig
from models_torch.trm import TRM, TRMConfig
from models_torch.trm_hier6 import TRMHier6, TRMHier6Config
from models_torch.trm_singlez import TRMSingleZ, TRMSingleZConfig


@dataclass(frozen=True)
class Architecture:
    """An architecture: its configuration class, its model class without loss head, a tiny configuration."""

    config_class: type[ArchitectureConfig]
    model: Callable[[Any], ACT]
    tiny_config: Any  # float32, a forward pass in milliseconds: for tests and `bridge.verify`


def _tiny(config_class: type[ArchitectureConfig], **fields: Any) -> Any:
    return config_class(
        batch_size=4,
        seq_len=16,
        vocab_size=6,
        num_puzzle_identifiers=5,
        hidden_size=32,
        num_heads=4,
        mlp_multiple_of=16,
        puzzle_emb_ndim=32,
        halt_max_steps=4,
        forward_dtype="float32",
        **fields,
    )


ARCHITECTURES = {
    "trm": Architecture(TRMConfig, TRM, _tiny(TRMConfig, H_cycles=2, L_cycles=2, puzzle_emb_len=2)),
    "trm_singlez": Architecture(
        TRMSingleZConfig, TRMSingleZ, _tiny(TRMSingleZConfig, H_cycles=2, L_cycles=2, puzzle_emb_len=2)
    ),
    "trm_hier6": Architecture(
        TRMHier6Config, TRMHier6, _tiny(TRMHier6Config, H_cycles=2, L_cycles=6, L_layers=1, puzzle_emb_len=2)
    ),
    "hrm": Architecture(HRMConfig, HRM, _tiny(HRMConfig, H_layers=1, L_layers=1)),
    "transformer": Architecture(TransformerConfig, Transformer, _tiny(TransformerConfig, H_layers=2)),
}


@dataclass(frozen=True)
class LanguageModel:
    """A language model: its configuration class, its model class, which computes its own loss, a tiny configuration."""

    config_class: type[ModelConfig]
    model: Callable[[Any], nn.Module]
    tiny_config: Any


LANGUAGE_MODELS = {
    "gpt": LanguageModel(
        GPTConfig,
        GPT,
        GPTConfig(seq_len=16, vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, forward_dtype="float32"),
    ),
    "gpt_2026": LanguageModel(
        GPT2026Config,
        GPT2026,
        GPT2026Config(seq_len=16, vocab_size=61, n_layer=3, n_head=4, n_kv_head=2, n_embd=64, forward_dtype="float32"),
    ),
    "hrm_text": LanguageModel(
        HRMTextConfig,
        HRMText,
        HRMTextConfig(
            seq_len=16,
            vocab_size=61,
            n_layers=2,
            hidden_size=32,
            num_heads=2,
            mlp_multiple_of=16,
            forward_dtype="float32",
        ),
    ),
}


def architecture(name: str) -> Architecture:
    """Returns the puzzle architecture called `name`. Raises ValueError for an unknown name or a language model."""
    if name in LANGUAGE_MODELS:
        raise ValueError(f"{name} is a language model; use one of {', '.join(ARCHITECTURES)} for puzzles")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"unknown architecture {name!r}; use one of {', '.join((*ARCHITECTURES, *LANGUAGE_MODELS))}, "
            "or package.module:Class for a model of your own"
        )
    return ARCHITECTURES[name]


def _built_in(name: str) -> Architecture | LanguageModel:
    return LANGUAGE_MODELS[name] if name in LANGUAGE_MODELS else architecture(name)


def config_class(name: str) -> type[ModelConfig]:
    """Returns the configuration class of the model called `name`; does not import models of the user.

    For these it is that of a puzzle model; that of a language model is `outside_language.OutsideLanguageConfig`.
    """
    if outside.is_outside(name):
        return outside.OutsideConfig
    return _built_in(name).config_class


def build_model(name: str, config: ModelConfig) -> nn.Module:
    """Builds a module without loss head; call `torch.manual_seed` first for reproducible weights.

    Raises ValueError for a model of the user that cannot be imported or constructed.
    """
    if isinstance(config, outside_language.OutsideLanguageConfig):
        return outside_language.build_model(name, config)
    if outside.is_outside(name):
        return outside.build_model(name, config)
    return _built_in(name).model(config)


def with_loss_head(name: str, model: nn.Module, config: ACTConfig) -> nn.Module:
    """Adds the ACT loss head to the result of `build_model`, unless a model of the user is a loss head itself.

    Raises ValueError for a language model, and for a model of the user without the interface in
    `models_torch/outside.py`.
    """
    if outside.is_outside(name):
        return outside.with_loss_head(name, model, config)
    architecture(name)
    return ACTLossHead(model, config.loss_type, getattr(config, "cycle_penalty", 0.0))


def build(name: str, config: ACTConfig) -> nn.Module:
    """Builds a module with the ACT loss head: `build_model`, then `with_loss_head`; raises their errors."""
    return with_loss_head(name, build_model(name, config), config)


def example_batch(config: ACTConfig, batch_size: int, seed: int) -> dict[str, Tensor]:
    """Returns a random int32 batch with the sizes of `config`; about one label in eight is ignored, like padding."""
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
