"""One ACT step of a TRM with levers; with none it computes what `models_torch.trm.TRMInner` computes."""

# ruff: noqa: N815 (z_H is the field's name)

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models_torch.inner import map_latents
from models_torch.layers import (
    Attention,
    CastEmbedding,
    CosSin,
    Heads,
    Latent,
    PerSequence,
    at_least_float32,
    rms_norm,
    truncated_normal_,
)
from models_torch.losses import LOSSES
from models_torch.trm import TRMInner, TRMInnerCarry
from train_jax.research.levers.config import LeverConfig


@dataclass
class LeverCarry:
    """The latents of a TRM, with a second axis of the latents that race if there are several, and the last answer."""

    z_H: Tensor
    z_L: Tensor
    answer: Int[Tensor, "batch seq"]
    steps: Int[Tensor, "batch"]
    """Number of ACT steps of the sequence so far."""


class NormedAttention(Attention):
    """Attention over all positions with queries and keys of equal norm."""

    UNSERVED: ClassVar = {"attention": "qk_norm"}
    """Kernels of `--compute` that compute something else, and the field that asks for this class."""

    @classmethod
    def around(cls, attention: Attention) -> "NormedAttention":
        """Returns the same attention, with the same weights, and norms."""
        normed = cls(
            attention.qkv_proj.weight.shape[1], attention.head_dim, attention.num_heads, attention.num_key_value_heads
        )
        normed.qkv_proj = attention.qkv_proj
        normed.o_proj = attention.o_proj
        return normed

    def attend(self, query: Heads, key: Heads, value: Heads) -> Heads:
        return super().attend(rms_norm(query, 1e-6), rms_norm(key, 1e-6), value)


class PositionTables(nn.Module):
    """Learned rows for the row, the column and the box of every cell of a square grid."""

    def __init__(self, config: LeverConfig, init_std: float):
        super().__init__()
        side = config.side
        cells = torch.arange(config.seq_len)
        row = cells // side
        column = cells % side
        box_columns = side // config.box_rows
        box = row // config.box_rows * config.box_rows + column // box_columns
        self.places = nn.Buffer(torch.stack((row, column, box)).to(torch.int32), persistent=False)
        self.tables = nn.ModuleList(
            CastEmbedding(side, config.hidden_size, init_std, config.torch_dtype) for _ in range(3)
        )

    def forward(self) -> Float[Tensor, "seq hidden"]:
        row, column, box = (table(places) for table, places in zip(self.tables, self.places, strict=True))
        return row + column + box


class LeverInner(TRMInner):
    """One ACT step of a TRM with levers, without the halting.

    Parameters of levers are created after all others, so that a seed gives the others the weights that it gives a TRM.
    """

    config: LeverConfig

    def __init__(self, config: LeverConfig):
        super().__init__(config)
        init_std = 1 / self.embed_scale
        if config.qk_norm:
            blocks: Any = self.L_level.layers
            for block in blocks:
                block.self_attn = NormedAttention.around(block.self_attn)
        self.embed_answer = self.places = None
        if config.repair or config.looped_flow:
            self.embed_answer = CastEmbedding(config.vocab_size, config.hidden_size, init_std, config.torch_dtype)
        if config.looped_flow:  # one sample, so that an evaluation gives the same answers each time
            self.flow_noise = nn.Buffer(torch.randn(config.seq_len, config.vocab_size))
        if config.position_tables:
            self.places = PositionTables(config, init_std)
        if config.race > 1:
            others = truncated_normal_(torch.empty(config.race - 1, config.hidden_size), 1.0)
            self.race_init = nn.Buffer(others.to(config.torch_dtype))

    # ---- the carry

    def _initial(self) -> tuple[Tensor, Tensor]:
        """Returns the initial latents in a shape that broadcasts over those of the carry."""
        if self.config.race == 1:
            return self.H_init, self.L_init
        z_L = torch.cat((self.L_init[None], self.race_init))
        return self.H_init, z_L[:, None]

    def empty_carry(self, batch_size: int, device: torch.device) -> LeverCarry:
        config = self.config
        racing = (config.race,) if config.race > 1 else ()
        shape = (batch_size, *racing, config.positions, config.hidden_size)
        z_H, z_L = (torch.zeros(shape, dtype=z.dtype, device=device) for z in self._initial())
        answer = torch.zeros(batch_size, config.seq_len, dtype=torch.int32, device=device)
        return LeverCarry(z_H, z_L, answer, torch.zeros(batch_size, dtype=torch.int32, device=device))

    def reset_carry(self, reset: Bool[Tensor, "batch"], carry: LeverCarry) -> LeverCarry:
        """Returns the carry with initial latents, in training perhaps noisy ones, for the sequences in `reset`."""
        fresh = []
        for latent, initial in zip((carry.z_H, carry.z_L), self._initial(), strict=True):
            fresh.append(self._noisy(initial.expand_as(latent), self.config.random_latents))
        of_latents = reset.view(-1, *[1] * (carry.z_H.ndim - 1))
        z_H = torch.where(of_latents, fresh[0], carry.z_H)
        z_L = torch.where(of_latents, fresh[1], carry.z_L)
        return LeverCarry(z_H, z_L, carry.answer, torch.where(reset, 0, carry.steps))

    def _noisy(self, latent: Tensor, deviation: float) -> Tensor:
        if not deviation or not self.training:
            return latent
        noise = torch.randn(latent.shape, dtype=at_least_float32(latent).dtype, device=latent.device)
        return latent + (deviation * noise).to(latent.dtype)

    # ---- the inputs

    def _inputs(self, carry: LeverCarry, data: dict[str, Tensor]) -> Latent:
        """Returns the input embeddings with those of the answer and of the positions of cells."""
        embeddings = self.embed(data["inputs"], data["puzzle_identifiers"])
        added = []
        if self.config.repair:
            added.append(self._last_answer(carry))
        if self.config.looped_flow:
            added.append(self._flowing_answer(carry, data))
        if self.places is not None:
            added.append(self.places())
        for of_cells in added:
            padded = F.pad(of_cells, (0, 0, self.config.puzzle_positions, 0))
            embeddings = embeddings + self.embed_scale * padded
        return embeddings

    def _last_answer(self, carry: LeverCarry) -> Float[Tensor, "batch seq hidden"]:
        """Returns the embedded last answer, damaged in training; zeros in the first ACT step."""
        answer = carry.answer
        if self.training:
            damaged = torch.rand(answer.shape, device=answer.device) < self.config.repair
            answer = torch.where(damaged, torch.randint_like(answer, self.config.vocab_size), answer)
        assert self.embed_answer is not None
        embedded = self.embed_answer(answer)
        return embedded * (carry.steps > 0).view(-1, 1, 1).to(embedded.dtype)

    def _flowing_answer(self, carry: LeverCarry, data: dict[str, Tensor]) -> Float[Tensor, "batch seq hidden"]:
        """Returns the embedded mixture of noise and an answer, in the proportion of the ACT step."""
        config = self.config
        assert self.embed_answer is not None
        weight = self.embed_answer.embedding_weight
        answer = data["labels"] if self.training else carry.answer
        share = carry.steps.to(weight.dtype) / max(1, config.halt_max_steps - 1)
        share = share.clamp(max=1).view(-1, 1, 1)
        tokens = torch.arange(config.vocab_size, device=weight.device)
        one_hot = (answer.unsqueeze(-1) == tokens).to(weight.dtype)
        noise = self.flow_noise.to(weight.dtype)
        if self.training:
            noise = torch.randn(one_hot.shape, dtype=weight.dtype, device=weight.device)
        mixture = share * one_hot + (1 - share) * config.looped_flow * noise
        return (mixture @ weight).to(config.torch_dtype)

    # ---- the step

    def forward(
        self, carry: LeverCarry, data: dict[str, Tensor]
    ) -> tuple[LeverCarry, Float[Tensor, "batch seq vocab"], tuple[PerSequence, PerSequence], PerSequence | None]:
        """Runs one ACT step; see `models_torch.inner.Inner.forward`."""
        cos_sin = None if self.rotary_emb is None else self.rotary_emb()
        inputs = self._inputs(carry, data)
        start = LeverCarry(self._noisy(carry.z_H, self.config.path_noise), carry.z_L, carry.answer, carry.steps)
        if self.config.race == 1:
            latents, answer, previous = self.deep_recursion(TRMInnerCarry(start.z_H, start.z_L), inputs, cos_sin)
            z_H = latents.z_H
            z_L = latents.z_L
        else:
            z_H, z_L, answer, previous = self._race(start, inputs, cos_sin, data["labels"])
        logits = self.token_logits(answer)
        cycle_change = None
        if self.config.cycle_penalty:
            cycle_change = (at_least_float32(answer) - at_least_float32(previous)).square().mean(dim=(1, 2))
        after = LeverCarry(z_H, z_L, logits.argmax(dim=-1).to(torch.int32), carry.steps + 1)
        return map_latents(Tensor.detach, after), logits, self.halting_logits(answer), cycle_change

    def _race(
        self, start: LeverCarry, inputs: Latent, cos_sin: CosSin | None, labels: Int[Tensor, "batch seq"]
    ) -> tuple[Tensor, Tensor, Latent, Latent]:
        """Runs all latents without gradients and the best of each sequence through the last H-cycle.

        Returns the new latents of all, the answer of the best, and its answer before the last H-cycle.
        """
        count = self.config.race
        with torch.no_grad():
            z_H = start.z_H.flatten(0, 1)
            z_L = start.z_L.flatten(0, 1)
            repeated = inputs.repeat_interleave(count, dim=0)
            for _ in range(self.config.H_cycles - 1):
                z_H, z_L = self.latent_recursion(z_H, z_L, repeated, cos_sin)
            badness = self._badness(z_H, labels).unflatten(0, (-1, count))
            won = F.one_hot(badness.argmin(dim=1), count).bool()[:, :, None, None]
            z_H = z_H.unflatten(0, (-1, count))
            z_L = z_L.unflatten(0, (-1, count))
            best_H, best_L = (torch.where(won, z, 0).sum(dim=1) for z in (z_H, z_L))
        new_H, new_L = self.latent_recursion(best_H, best_L, inputs, cos_sin)
        all_H = torch.where(won, new_H.detach()[:, None], z_H)
        all_L = torch.where(won, new_L.detach()[:, None], z_L)
        return all_H, all_L, new_H, best_H

    def _badness(self, z_H: Latent, labels: Int[Tensor, "batch seq"]) -> PerSequence:
        """Returns the token loss of every racing latent in training, minus its halting logit in evaluation."""
        if not self.training:
            return -self.halting_logits(z_H)[0]
        repeated = labels.repeat_interleave(self.config.race, dim=0)
        return LOSSES[self.config.loss_type](self.token_logits(z_H), repeated).sum(dim=-1)
