"""The baseline without recursion inside an ACT step: a plain transformer that is applied once per ACT step.

It is published as `transformers_baseline`, an ablation of HRM, with one latent and no cycles. An ACT step adds the
input embeddings to the latent and applies all blocks once, all with gradients.
"""

# ruff: noqa: N815 (z_H is the field's name)

from dataclasses import dataclass

from models_torch.act import ACT
from models_torch.blocks import ReasoningModule
from models_torch.config import ArchitectureConfig, Heads, Layers
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ArchitectureConfig):
    """The configuration of the baseline; defaults are the published ones.

    The published configuration has no `mlp_t`; here the blocks are those of every architecture.
    """

    num_heads: Heads = 12  # attention heads; 42 channels each, 504 of 512 in all, as published
    H_layers: Layers = 8  # blocks


@dataclass
class TransformerInnerCarry:
    """The only latent, which is also the answer."""

    z_H: Latent


class TransformerInner(Inner):
    """One ACT step of the baseline without the halting."""

    config: TransformerConfig

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.H_level = ReasoningModule(config, config.H_layers)
        self.H_init = self.new_initial_latent()

    def initial_latents(self) -> TransformerInnerCarry:
        return TransformerInnerCarry(z_H=self.H_init)

    def deep_recursion(
        self, carry: TransformerInnerCarry, input_embeddings: Latent, cos_sin: CosSin | None
    ) -> tuple[TransformerInnerCarry, Latent, Latent]:
        """Adds the input embeddings to the latent and applies all blocks once."""
        z_H = self.H_level(carry.z_H + input_embeddings, cos_sin)
        return TransformerInnerCarry(z_H), z_H, carry.z_H


class Transformer(ACT):
    """The baseline with halting."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config, TransformerInner(config))
