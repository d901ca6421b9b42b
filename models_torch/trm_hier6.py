"""TRM with six latent reasoning features (arXiv 2510.04871, "multi-scale z") instead of one.

The i-th update of an H-cycle reads the sum of all six features, the answer and the input embeddings, and replaces only
the i-th feature.
"""

# ruff: noqa: N815 (z_L1 is the field's name)

from dataclasses import dataclass
from functools import reduce

import torch

from models_torch.act import ACT
from models_torch.blocks import ReasoningModule
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent
from models_torch.trm import TRMConfig

NUM_Z_L = 6


@dataclass(frozen=True, kw_only=True)
class TRMHier6Config(TRMConfig):
    """The configuration of this TRM; with fewer than six `L_cycles`, the last features keep their initial values."""

    def __post_init__(self):
        super().__post_init__()
        if self.L_cycles > NUM_Z_L:
            raise ValueError(
                f"L_cycles is {self.L_cycles}, but each needs its own latent; use at most {NUM_Z_L}, or model trm"
            )


@dataclass
class TRMHier6InnerCarry:
    """The answer and the six latent reasoning features."""

    z_H: Latent
    z_L1: Latent
    z_L2: Latent
    z_L3: Latent
    z_L4: Latent
    z_L5: Latent
    z_L6: Latent


class TRMHier6Inner(Inner):
    """One ACT step of the six-feature TRM without the halting."""

    config: TRMHier6Config

    def __init__(self, config: TRMHier6Config):
        super().__init__(config)
        self.L_level = ReasoningModule(config, config.L_layers)
        self.H_init = self.new_initial_latent()
        self.L1_init = self.new_initial_latent()
        self.L2_init = self.new_initial_latent()
        self.L3_init = self.new_initial_latent()
        self.L4_init = self.new_initial_latent()
        self.L5_init = self.new_initial_latent()
        self.L6_init = self.new_initial_latent()

    def initial_latents(self) -> TRMHier6InnerCarry:
        return TRMHier6InnerCarry(
            z_H=self.H_init,
            z_L1=self.L1_init,
            z_L2=self.L2_init,
            z_L3=self.L3_init,
            z_L4=self.L4_init,
            z_L5=self.L5_init,
            z_L6=self.L6_init,
        )

    def latent_recursion(
        self, z_H: Latent, z_Ls: tuple[Latent, ...], input_embeddings: Latent, cos_sin: CosSin | None
    ) -> tuple[Latent, tuple[Latent, ...]]:
        """Runs one H-cycle: an update of each of the first `L_cycles` features, then of `z_H` from their sum."""
        for i in range(self.config.L_cycles):
            z_L = self.L_level(reduce(torch.add, z_Ls) + (z_H + input_embeddings), cos_sin)
            z_Ls = (*z_Ls[:i], z_L, *z_Ls[i + 1 :])
        return self.L_level(z_H + reduce(torch.add, z_Ls), cos_sin), z_Ls

    def deep_recursion(
        self, carry: TRMHier6InnerCarry, input_embeddings: Latent, cos_sin: CosSin | None
    ) -> tuple[TRMHier6InnerCarry, Latent, Latent]:
        """Runs `H_cycles` H-cycles; only the last one has gradients, as in TRM."""
        z_H = carry.z_H
        z_Ls = (carry.z_L1, carry.z_L2, carry.z_L3, carry.z_L4, carry.z_L5, carry.z_L6)
        with torch.no_grad():
            for _ in range(self.config.H_cycles - 1):
                z_H, z_Ls = self.latent_recursion(z_H, z_Ls, input_embeddings, cos_sin)
        previous_z_H = z_H
        z_H, z_Ls = self.latent_recursion(z_H, z_Ls, input_embeddings, cos_sin)
        return TRMHier6InnerCarry(z_H, *z_Ls), z_H, previous_z_H


class TRMHier6(ACT):
    """The six-feature TRM with halting."""

    def __init__(self, config: TRMHier6Config):
        super().__init__(config, TRMHier6Inner(config))
