"""TRM with six scratch pads (arXiv 2510.04871, "multi-scale z"): each update of an H-cycle has a pad of its own.

The i-th update of an H-cycle reads the sum of all six pads, the answer and the question, and replaces pad i alone.
"""

# ruff: noqa: N815 (z_L1 is the field's name)

from dataclasses import dataclass
from functools import reduce

import torch

from models_torch.act import ACT
from models_torch.blocks import Level
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent
from models_torch.trm import TRMConfig

PADS = 6


@dataclass(frozen=True, kw_only=True)
class TRMHier6Config(TRMConfig):
    """As a TRM's: with fewer than six `L_cycles` the last pads keep their start."""

    def __post_init__(self):
        super().__post_init__()
        if self.L_cycles > PADS:
            raise ValueError(
                f"L_cycles is {self.L_cycles}, and each has a latent of its own; use at most {PADS}, or model trm"
            )


@dataclass
class TRMHier6InnerCarry:
    """The answer and the six scratch pads."""

    z_H: Latent
    z_L1: Latent
    z_L2: Latent
    z_L3: Latent
    z_L4: Latent
    z_L5: Latent
    z_L6: Latent


class TRMHier6Inner(Inner):
    """One ACT step of the six-pad TRM without the halting."""

    carry_class = TRMHier6InnerCarry
    config: TRMHier6Config

    def __init__(self, config: TRMHier6Config):
        super().__init__(config)
        self.L_level = Level(config, config.L_layers)
        self.add_starts()

    def h_cycle(
        self, z_H: Latent, pads: tuple[Latent, ...], question: Latent, cos_sin: CosSin | None
    ) -> tuple[Latent, tuple[Latent, ...]]:
        """Each pad once, as far as `L_cycles` goes, then the answer once from all of them."""
        for i in range(self.config.L_cycles):
            pad = self.L_level(reduce(torch.add, pads) + (z_H + question), cos_sin)
            pads = (*pads[:i], pad, *pads[i + 1 :])
        return self.L_level(z_H + reduce(torch.add, pads), cos_sin), pads

    def think(
        self, carry: TRMHier6InnerCarry, question: Latent, cos_sin: CosSin | None
    ) -> tuple[TRMHier6InnerCarry, Latent, Latent]:
        z_H = carry.z_H
        pads = (carry.z_L1, carry.z_L2, carry.z_L3, carry.z_L4, carry.z_L5, carry.z_L6)
        with torch.no_grad():  # only the last H-cycle has gradients, as in TRM
            for _ in range(self.config.H_cycles - 1):
                z_H, pads = self.h_cycle(z_H, pads, question, cos_sin)
        before = z_H
        z_H, pads = self.h_cycle(z_H, pads, question, cos_sin)
        return TRMHier6InnerCarry(z_H, *pads), z_H, before


class TRMHier6(ACT):
    """The six-pad TRM with its halting."""

    def __init__(self, config: TRMHier6Config):
        super().__init__(config, TRMHier6Inner(config))
