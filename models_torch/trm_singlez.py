"""TRM with one latent (arXiv 2510.04871, "single z"): the answer and the latent reasoning feature are the same tensor.

An H-cycle updates the latent `L_cycles` times from the input embeddings, then once without them. The latent is also the
answer.
"""

# ruff: noqa: N815 (z_L is the field's name)

from dataclasses import dataclass

import torch

from models_torch.act import ACT
from models_torch.blocks import ReasoningModule
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent
from models_torch.trm import TRMConfig


@dataclass(frozen=True, kw_only=True)
class TRMSingleZConfig(TRMConfig):
    """The configuration of a TRM with one latent; `L_cycles` counts the updates with the input embeddings."""


@dataclass
class TRMSingleZInnerCarry:
    """The only latent; called `z_L` in published checkpoints."""

    z_L: Latent


class TRMSingleZInner(Inner):
    """One ACT step of the single-latent TRM without the halting."""

    config: TRMSingleZConfig

    def __init__(self, config: TRMSingleZConfig):
        super().__init__(config)
        self.L_level = ReasoningModule(config, config.L_layers)
        self.L_init = self.new_initial_latent()

    def initial_latents(self) -> TRMSingleZInnerCarry:
        return TRMSingleZInnerCarry(z_L=self.L_init)

    def latent_recursion(self, z_L: Latent, input_embeddings: Latent, cos_sin: CosSin | None) -> Latent:
        """Runs one H-cycle: `L_cycles` updates with the input embeddings, then one without them."""
        for _ in range(self.config.L_cycles):
            z_L = self.L_level(z_L + input_embeddings, cos_sin)
        return self.L_level(z_L, cos_sin)

    def deep_recursion(
        self, carry: TRMSingleZInnerCarry, input_embeddings: Latent, cos_sin: CosSin | None
    ) -> tuple[TRMSingleZInnerCarry, Latent, Latent]:
        """Runs `H_cycles` H-cycles; only the last one has gradients, as in TRM."""
        z_L = carry.z_L
        with torch.no_grad():
            for _ in range(self.config.H_cycles - 1):
                z_L = self.latent_recursion(z_L, input_embeddings, cos_sin)
        previous_z_L = z_L
        z_L = self.latent_recursion(z_L, input_embeddings, cos_sin)
        return TRMSingleZInnerCarry(z_L), z_L, previous_z_L


class TRMSingleZ(ACT):
    """The single-latent TRM with halting."""

    def __init__(self, config: TRMSingleZConfig):
        super().__init__(config, TRMSingleZInner(config))
