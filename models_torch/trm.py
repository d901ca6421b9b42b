"""The Tiny Recursive Model (arXiv 2510.04871): one small network applied recursively to its own answer.

The carry holds two latents: `z_H`, the embedding of the current answer (y in the paper), and `z_L`, the latent
reasoning feature (z in the paper). An *H-cycle* (latent recursion in the paper) updates `z_L` `L_cycles` times from the
input embeddings and `z_H`, then `z_H` once from `z_L`, all with the same network. An *ACT step* (deep recursion) runs
`H_cycles` of them and reads out logits; a sequence stays in the batch for several ACT steps, until it halts.
"""

# ruff: noqa: N815 (z_H and no_ACT_continue are the field's names)

from dataclasses import dataclass

import torch

from models_torch.act import ACT
from models_torch.blocks import ReasoningModule
from models_torch.config import ArchitectureConfig, Cycles, Layers, PuzzleEmbLen
from models_torch.inner import Inner
from models_torch.layers import CosSin, Latent


@dataclass(frozen=True, kw_only=True)
class TRMConfig(ArchitectureConfig):
    """The configuration of a TRM; defaults are the published ones."""

    L_layers: Layers = 2  # blocks in the network
    H_cycles: Cycles = 3  # H-cycles in an ACT step; only the last one has gradients
    L_cycles: Cycles = 6  # updates of z_L in an H-cycle
    puzzle_emb_len: PuzzleEmbLen = 16  # positions before the tokens; 0: the number that the puzzle embedding fills
    no_ACT_continue: bool = True  # halt if q_halt > 0; False: if q_halt > q_continue, bootstrapped (HRM)


@dataclass
class TRMInnerCarry:
    """The latents of a TRM: the answer and the latent reasoning feature."""

    z_H: Latent
    z_L: Latent


class TRMInner(Inner):
    """One ACT step of TRM without the halting."""

    config: TRMConfig

    def __init__(self, config: TRMConfig):
        super().__init__(config)
        self.L_level = ReasoningModule(config, config.L_layers)
        self.H_init = self.new_initial_latent()
        self.L_init = self.new_initial_latent()

    def initial_latents(self) -> TRMInnerCarry:
        return TRMInnerCarry(z_H=self.H_init, z_L=self.L_init)

    def latent_recursion(
        self, z_H: Latent, z_L: Latent, input_embeddings: Latent, cos_sin: CosSin | None
    ) -> tuple[Latent, Latent]:
        """Runs one H-cycle: `L_cycles` updates of `z_L`, then one of `z_H`."""
        for _ in range(self.config.L_cycles):
            z_L = self.L_level(z_L + (z_H + input_embeddings), cos_sin)
        return self.L_level(z_H + z_L, cos_sin), z_L

    def deep_recursion(
        self, carry: TRMInnerCarry, input_embeddings: Latent, cos_sin: CosSin | None
    ) -> tuple[TRMInnerCarry, Latent, Latent]:
        """Runs `H_cycles` H-cycles; only the last one has gradients, the earlier ones run under `torch.no_grad`."""
        z_H = carry.z_H
        z_L = carry.z_L
        with torch.no_grad():
            for _ in range(self.config.H_cycles - 1):
                z_H, z_L = self.latent_recursion(z_H, z_L, input_embeddings, cos_sin)
        previous_z_H = z_H
        z_H, z_L = self.latent_recursion(z_H, z_L, input_embeddings, cos_sin)
        return TRMInnerCarry(z_H, z_L), z_H, previous_z_H


class TRM(ACT):
    """The Tiny Recursive Model with halting."""

    def __init__(self, config: TRMConfig):
        super().__init__(config, TRMInner(config))
