"""The Hierarchical Reasoning Model (arXiv 2506.21734): a slow network above a fast one, one step of gradient.

The fast network refines `z_L` `L_cycles` times from the question and `z_H`, then the slow one refines `z_H` once from
`z_L`; an ACT step does so `H_cycles` times. Unlike in TRM the two networks have weights of their own, and only the very
last update of each has gradients.
"""

# ruff: noqa: N815 (z_H is the field's name)

from dataclasses import dataclass

import torch

from models_torch.act import ACT
from models_torch.blocks import Level
from models_torch.config import ArchitectureConfig
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent


@dataclass(frozen=True, kw_only=True)
class HRMConfig(ArchitectureConfig):
    """Everything that decides the shape and the meaning of an HRM; defaults are the published ones."""

    H_layers: int = 4  # blocks in the slow network
    L_layers: int = 4  # blocks in the fast network
    H_cycles: int = 2  # updates of z_H in an ACT step; only the last one has gradients
    L_cycles: int = 2  # updates of z_L for one of z_H; only the very last one has gradients

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least_one("H_layers", "L_layers", "H_cycles", "L_cycles")


@dataclass
class HRMInnerCarry:
    """The latents of the slow network, which answers, and of the fast one."""

    z_H: Latent
    z_L: Latent


class HRMInner(Inner):
    """One ACT step of HRM without the halting."""

    carry_class = HRMInnerCarry
    config: HRMConfig

    def __init__(self, config: HRMConfig):
        super().__init__(config)
        self.H_level = Level(config, config.H_layers)
        self.L_level = Level(config, config.L_layers)
        self.add_starts()

    def refine(self, z_L: Latent, above: Latent, times: int, cos_sin: CosSin | None) -> Latent:
        """The fast network's latent after `times` updates under the same `above`."""
        for _ in range(times):
            z_L = self.L_level(z_L + above, cos_sin)
        return z_L

    def think(
        self, carry: HRMInnerCarry, question: Latent, cos_sin: CosSin | None
    ) -> tuple[HRMInnerCarry, Latent, Latent]:
        z_H, z_L = carry.z_H, carry.z_L
        # The gradient at the equilibrium, cut after its first term (the paper's "one-step gradient").
        with torch.no_grad():
            for _ in range(self.config.H_cycles - 1):
                z_L = self.refine(z_L, z_H + question, self.config.L_cycles, cos_sin)
                z_H = self.H_level(z_H + z_L, cos_sin)
            z_L = self.refine(z_L, z_H + question, self.config.L_cycles - 1, cos_sin)
        z_L = self.refine(z_L, z_H + question, 1, cos_sin)
        before = z_H
        z_H = self.H_level(z_H + z_L, cos_sin)
        return HRMInnerCarry(z_H, z_L), z_H, before


class HRM(ACT):
    """The Hierarchical Reasoning Model with its halting."""

    def __init__(self, config: HRMConfig):
        super().__init__(config, HRMInner(config))
