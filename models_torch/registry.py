"""Models by name: configuration classes, constructors, tiny configurations and an example batch.

A name is one of `ARCHITECTURES` (puzzle models), one of `LANGUAGE_MODELS`, or `package.module:Class` for a model of
the user (`outside.py`, `outside_language.py`).
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from models_torch import outside
from models_torch.config import ACTConfig, ModelConfig
from models_torch.losses import IGNORE_LABEL_ID, ACTLossHead


@dataclass(frozen=True)
class Architecture:
    """A model without its loss head: the class NAME and its configuration, NAMEConfig, of a module of this package.

    The module is imported when one of them is used.
    """

    module: str
    name: str
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the tiny configuration: float32, a forward pass in milliseconds, for tests and `bridge.verify`."""

    def _find(self, name: str) -> Any:
        return getattr(importlib.import_module(f"models_torch.{self.module}"), name)

    @cached_property
    def config_class(self) -> Any:
        return self._find(f"{self.name}Config")

    @cached_property
    def model(self) -> Any:
        return self._find(self.name)

    @cached_property
    def tiny_config(self) -> Any:
        return self.config_class(**self.tiny)


def _puzzle_model(module: str, name: str, **tiny: Any) -> Architecture:
    sizes = {
        "batch_size": 4,
        "seq_len": 16,
        "vocab_size": 6,
        "num_puzzle_identifiers": 5,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_multiple_of": 16,
        "puzzle_emb_ndim": 32,
        "halt_max_steps": 4,
        "forward_dtype": "float32",
    }
    return Architecture(module, name, sizes | tiny)


def _language_model(module: str, name: str, **tiny: Any) -> Architecture:
    return Architecture(module, name, {"seq_len": 16, "vocab_size": 61, "forward_dtype": "float32"} | tiny)


ARCHITECTURES = {
    "trm": _puzzle_model("trm", "TRM", H_cycles=2, L_cycles=2, puzzle_emb_len=2),
    "trm_singlez": _puzzle_model("trm_singlez", "TRMSingleZ", H_cycles=2, L_cycles=2, puzzle_emb_len=2),
    "trm_hier6": _puzzle_model("trm_hier6", "TRMHier6", H_cycles=2, L_cycles=6, L_layers=1, puzzle_emb_len=2),
    "hrm": _puzzle_model("hrm", "HRM", H_layers=1, L_layers=1),
    "transformer": _puzzle_model("transformer", "Transformer", H_layers=2),
}
"""Models of puzzles."""
LANGUAGE_MODELS = {
    "gpt": _language_model("gpt", "GPT", n_layer=2, n_head=4, n_kv_head=2, n_embd=64),
    "gpt_2026": _language_model("gpt_2026", "GPT2026", n_layer=3, n_head=4, n_kv_head=2, n_embd=64),
    "hrm_text": _language_model("hrm_text", "HRMText", n_layers=2, hidden_size=32, num_heads=2, mlp_multiple_of=16),
}
"""Language models, which compute their own loss."""


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


def _built_in(name: str) -> Architecture:
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
    if outside.is_outside(name) and not isinstance(config, ACTConfig):
        from models_torch import outside_language  # imports GPT, which puzzles do not need

        return outside_language.build_model(name, config)  # pyright: ignore[reportArgumentType]
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
    weights: Any = config  # every built-in architecture has an `ArchitectureConfig`
    return ACTLossHead(model, config.loss_type, weights.cycle_penalty, weights.halt_loss_weight)


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
