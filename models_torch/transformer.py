"""The baseline without recursion inside a step: a plain transformer that only the halting repeats.

Published as `transformers_baseline`, an ablation of HRM: one latent, no cycles; an ACT step adds the question to the
latent and passes it once through all blocks, every one of them with gradients.
"""

# ruff: noqa: N815 (z_H is the field's name)

from dataclasses import dataclass

from models_torch.act import ACT
from models_torch.blocks import Level
from models_torch.config import ArchitectureConfig
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ArchitectureConfig):
    """Everything that decides the shape and the meaning of the baseline; defaults are the published ones.

    The published configuration has no `mlp_t`; here the blocks are those of every architecture.
    """

    num_heads: int = 12  # attention heads; 42 channels each, 504 of 512 in all, as published
    H_layers: int = 8  # blocks

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least_one("H_layers")


@dataclass
class TransformerInnerCarry:
    """The only latent, read out as the answer."""

    z_H: Latent


class TransformerInner(Inner):
    """One ACT step of the baseline without the halting."""

    carry_class = TransformerInnerCarry
    config: TransformerConfig

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.H_level = Level(config, config.H_layers)
        self.add_starts()

    def think(
        self, carry: TransformerInnerCarry, question: Latent, cos_sin: CosSin | None
    ) -> tuple[TransformerInnerCarry, Latent, Latent]:
        z_H = self.H_level(carry.z_H + question, cos_sin)
        return TransformerInnerCarry(z_H), z_H, carry.z_H


class Transformer(ACT):
    """The baseline with its halting."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config, TransformerInner(config))
