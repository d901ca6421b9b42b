"""The Hierarchical Reasoning Model (arXiv 2506.21734): a high-level and a low-level module, one step of gradient.

The low-level module updates `z_L` `L_cycles` times from the input embeddings and `z_H`, then the high-level module
updates `z_H` once from `z_L`. An ACT step does this `H_cycles` times. Unlike in TRM, the two modules have separate
weights, and only the last update of each module in an ACT step has gradients.
"""

# ruff: noqa: N815 (z_H is the field's name)

from dataclasses import dataclass

import torch

from models_torch.act import ACT
from models_torch.blocks import ReasoningModule
from models_torch.config import ArchitectureConfig, Cycles, Layers
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent


@dataclass(frozen=True, kw_only=True)
class HRMConfig(ArchitectureConfig):
    """The configuration of an HRM; defaults are the published ones."""

    H_layers: Layers = 4  # blocks in the high-level module
    L_layers: Layers = 4  # blocks in the low-level module
    H_cycles: Cycles = 2  # updates of z_H in an ACT step; only the last one has gradients
    L_cycles: Cycles = 2  # updates of z_L for one of z_H; only the very last one has gradients


@dataclass
class HRMInnerCarry:
    """The latents of the high-level module, which is the answer, and of the low-level module."""

    z_H: Latent
    z_L: Latent


class HRMInner(Inner):
    """One ACT step of HRM without the halting."""

    config: HRMConfig

    def __init__(self, config: HRMConfig):
        super().__init__(config)
        self.H_level = ReasoningModule(config, config.H_layers)
        self.L_level = ReasoningModule(config, config.L_layers)
        self.H_init = self.new_initial_latent()
        self.L_init = self.new_initial_latent()

    def initial_latents(self) -> HRMInnerCarry:
        return HRMInnerCarry(z_H=self.H_init, z_L=self.L_init)

    def update_low_level(self, z_L: Latent, injection: Latent, updates: int, cos_sin: CosSin | None) -> Latent:
        """Updates `z_L` `updates` times by the low-level module, with the same `injection`."""
        for _ in range(updates):
            z_L = self.L_level(z_L + injection, cos_sin)
        return z_L

    def deep_recursion(
        self, carry: HRMInnerCarry, input_embeddings: Latent, cos_sin: CosSin | None
    ) -> tuple[HRMInnerCarry, Latent, Latent]:
        """Runs `H_cycles` H-cycles; only the last update of each latent has gradients ("one-step gradient")."""
        z_H = carry.z_H
        z_L = carry.z_L
        with torch.no_grad():
            for _ in range(self.config.H_cycles - 1):
                z_L = self.update_low_level(z_L, z_H + input_embeddings, self.config.L_cycles, cos_sin)
                z_H = self.H_level(z_H + z_L, cos_sin)
            z_L = self.update_low_level(z_L, z_H + input_embeddings, self.config.L_cycles - 1, cos_sin)
        z_L = self.update_low_level(z_L, z_H + input_embeddings, 1, cos_sin)
        previous_z_H = z_H
        z_H = self.H_level(z_H + z_L, cos_sin)
        return HRMInnerCarry(z_H, z_L), z_H, previous_z_H


class HRM(ACT):
    """The Hierarchical Reasoning Model with halting."""

    def __init__(self, config: HRMConfig):
        super().__init__(config, HRMInner(config))
