"""TRM with one latent (arXiv 2510.04871, "single z"): answer and scratch pad are the same thing.

The latent is refined `L_cycles` times from the question, then once from itself alone, and read out as the answer.
"""

# ruff: noqa: N815 (z_L is the field's name)

from dataclasses import dataclass

import torch

from models_torch.act import ACT
from models_torch.blocks import Level
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent
from models_torch.trm import TRMConfig


@dataclass(frozen=True, kw_only=True)
class TRMSingleZConfig(TRMConfig):
    """As a TRM's: `L_cycles` counts the updates that see the question; one without it ends each H-cycle."""


@dataclass
class TRMSingleZInnerCarry:
    """The only latent; called `z_L` in published checkpoints."""

    z_L: Latent


class TRMSingleZInner(Inner):
    """One ACT step of the single-latent TRM without the halting."""

    carry_class = TRMSingleZInnerCarry
    config: TRMSingleZConfig

    def __init__(self, config: TRMSingleZConfig):
        super().__init__(config)
        self.L_level = Level(config, config.L_layers)
        self.add_starts()

    def h_cycle(self, z: Latent, question: Latent, cos_sin: CosSin | None) -> Latent:
        """`L_cycles` times with the question, then once without it."""
        for _ in range(self.config.L_cycles):
            z = self.L_level(z + question, cos_sin)
        return self.L_level(z, cos_sin)

    def think(
        self, carry: TRMSingleZInnerCarry, question: Latent, cos_sin: CosSin | None
    ) -> tuple[TRMSingleZInnerCarry, Latent, Latent]:
        z = carry.z_L
        with torch.no_grad():  # only the last H-cycle has gradients, as in TRM
            for _ in range(self.config.H_cycles - 1):
                z = self.h_cycle(z, question, cos_sin)
        before = z
        z = self.h_cycle(z, question, cos_sin)
        return TRMSingleZInnerCarry(z), z, before


class TRMSingleZ(ACT):
    """The single-latent TRM with its halting."""

    def __init__(self, config: TRMSingleZConfig):
        super().__init__(config, TRMSingleZInner(config))
