"""Tiny configurations of every architecture, and functions that run them."""

import dataclasses

import pytest
import torch
from torch import Tensor

from models_torch import registry
from models_torch.config import ArchitectureConfig
from models_torch.losses import ACTLossHead

VARIANTS = {name: {} for name in registry.ARCHITECTURES} | {"trm-mixer": {"mlp_t": True, "pos_encodings": "none"}}
EVERY_VARIANT = pytest.mark.parametrize("name", VARIANTS)


def make_head(name: str, **changes) -> tuple[ACTLossHead, ArchitectureConfig]:
    """Returns a tiny variant with its loss head; halting head and puzzle table are not zero as initially."""
    model = name.removesuffix("-mixer")
    config = dataclasses.replace(registry.ARCHITECTURES[model].tiny_config, **(VARIANTS[name] | changes))
    torch.manual_seed(0)
    head = registry.build(model, config)
    assert isinstance(head, ACTLossHead)
    torch.nn.init.normal_(head.model.inner.q_head.weight)
    torch.nn.init.zeros_(head.model.inner.q_head.bias)
    if config.puzzle_emb_ndim:
        torch.nn.init.normal_(head.model.inner.puzzle_emb.weights)
    return head, config


def set_halting(head: ACTLossHead, q_halt: float, q_continue: float = 0.0) -> None:
    """Sets the halting logits to constants."""
    torch.nn.init.zeros_(head.model.inner.q_head.weight)
    with torch.no_grad():
        head.model.inner.q_head.bias.copy_(torch.tensor([q_halt, q_continue]))


def latents(inner_carry) -> dict[str, Tensor]:
    """Returns the latents of a carry by name."""
    return {field.name: getattr(inner_carry, field.name) for field in dataclasses.fields(inner_carry)}


def run_steps(head: ACTLossHead, config: ArchitectureConfig, count: int) -> list:
    """Returns the carries after each of `count` ACT steps, with a different example batch in each step."""
    carry = head.initial_carry(registry.example_batch(config, config.batch_size, seed=0))
    carries = []
    for step in range(count):
        carry, *_ = head(carry, registry.example_batch(config, config.batch_size, seed=step))
        carries.append(carry)
    return carries
