"""The Tiny Recursive Model (arXiv 2510.04871): one small network applied over and over to its own answer.

Two latents are carried: `z_H`, the current answer, and `z_L`, the scratch pad. An *H-cycle* refines the
scratch pad `L_cycles` times from the question and the answer, then the answer once from the scratch pad,
always with the same layers. An *ACT step* runs `H_cycles` of them and gives logits; a sequence stays in the
batch for several ACT steps, until it halts.
"""

# ruff: noqa: N815 (z_H and no_ACT_continue are the field's names)

from dataclasses import dataclass

import torch

from models_torch.act import ACT
from models_torch.blocks import Level
from models_torch.config import ArchitectureConfig
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent


@dataclass(frozen=True, kw_only=True)
class TRMConfig(ArchitectureConfig):
    """Everything that decides the shape and the meaning of a TRM; defaults are the published ones."""

    L_layers: int = 2  # blocks in the network
    H_cycles: int = 3  # H-cycles in an ACT step; only the last one has gradients
    L_cycles: int = 6  # updates of z_L in an H-cycle
    puzzle_emb_len: int = 16  # positions in front of the tokens; 0 for as many as the puzzle vector fills
    no_ACT_continue: bool = True  # halt on q_halt > 0; False: on q_halt > q_continue, bootstrapped (HRM)

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least_one("L_layers", "H_cycles", "L_cycles")


@dataclass
class TRMInnerCarry:
    """The two latents: the answer and the scratch pad."""

    z_H: Latent
    z_L: Latent


class TRMInner(Inner):
    """One ACT step of TRM without the halting."""

    carry_class = TRMInnerCarry
    config: TRMConfig

    def __init__(self, config: TRMConfig):
        super().__init__(config)
        self.L_level = Level(config, config.L_layers)
        self.add_starts()

    def h_cycle(self, z_H: Latent, z_L: Latent, question: Latent, cos_sin: CosSin | None) -> tuple[Latent, Latent]:
        """The scratch pad `L_cycles` times, then the answer once."""
        for _ in range(self.config.L_cycles):
            z_L = self.L_level(z_L + (z_H + question), cos_sin)
        return self.L_level(z_H + z_L, cos_sin), z_L

    def think(
        self, carry: TRMInnerCarry, question: Latent, cos_sin: CosSin | None
    ) -> tuple[TRMInnerCarry, Latent, Latent]:
        z_H, z_L = carry.z_H, carry.z_L
        # Only the last H-cycle has gradients (the paper's "deep recursion"): the earlier ones bring z close
        # to the answer at no memory.
        with torch.no_grad():
            for _ in range(self.config.H_cycles - 1):
                z_H, z_L = self.h_cycle(z_H, z_L, question, cos_sin)
        before = z_H
        z_H, z_L = self.h_cycle(z_H, z_L, question, cos_sin)
        return TRMInnerCarry(z_H, z_L), z_H, before


class TRM(ACT):
    """The Tiny Recursive Model with its halting."""

    def __init__(self, config: TRMConfig):
        super().__init__(config, TRMInner(config))
