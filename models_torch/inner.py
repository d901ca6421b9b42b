"""What every architecture has inside its halting: the question in, latents at their start, the answer out."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models_torch.config import ArchitectureConfig
from models_torch.layers import (
    CastEmbedding,
    CastLinear,
    CosSin,
    Latent,
    PerSequence,
    RotaryEmbedding,
    at_least_float32,
    truncated_normal_,
)
from models_torch.sparse_embedding import SparseEmbedding

Latents = TypeVar("Latents")


def map_latents(function: Callable[..., Tensor], latents: Latents, *more: Any) -> Latents:
    """`function` on each field of a dataclass of latents, with what `more` has under the same name."""
    names = [field.name for field in dataclasses.fields(latents)]  # pyright: ignore[reportArgumentType]
    return type(latents)(**{name: function(*(getattr(each, name) for each in (latents, *more))) for name in names})


class Inner(nn.Module):
    """One ACT step without the halting.

    An architecture names the dataclass of the latents it carries, builds its levels in `__init__` and calls
    `add_starts` after them, and gives `think`. A latent `z_X` starts from the buffer `X_init`.
    """

    carry_class: type
    """A dataclass of latents, each called `z_` and a name."""

    def __init__(self, config: ArchitectureConfig):
        super().__init__()
        self.config = config
        hidden, dtype = config.hidden_size, config.torch_dtype
        self.embed_scale = math.sqrt(hidden)
        init_std = 1 / self.embed_scale

        self.embed_tokens = CastEmbedding(config.vocab_size, hidden, init_std, dtype)
        self.lm_head = CastLinear(hidden, config.vocab_size)
        self.q_head = CastLinear(hidden, 2, bias=True)
        # Almost surely "go on" at first: an untrained model that halts would never see a second ACT step.
        nn.init.zeros_(self.q_head.weight)
        nn.init.constant_(self.q_head.get_parameter("bias"), -5)

        self.puzzle_emb = self.rotary_emb = self.embed_pos = None
        if config.puzzle_emb_ndim:
            self.puzzle_emb = SparseEmbedding(
                config.num_puzzle_identifiers, config.puzzle_emb_ndim, config.batch_size, 0.0, dtype
            )
        if config.pos_encodings == "rope" and not config.mlp_t:
            self.rotary_emb = RotaryEmbedding(config.head_dim, config.positions, config.rope_theta)
        if config.pos_encodings == "learned":
            self.embed_pos = CastEmbedding(config.positions, hidden, init_std, dtype)

    def add_starts(self) -> None:
        """The value that each latent starts from: one vector for all positions, drawn once and never trained."""
        for field in dataclasses.fields(self.carry_class):
            start = truncated_normal_(torch.empty(self.config.hidden_size), 1.0)
            self.register_buffer(f"{field.name.removeprefix('z_')}_init", start.to(self.config.torch_dtype))

    @property
    def starts(self) -> Any:
        """The buffers of `add_starts` as a carry."""
        names = [field.name for field in dataclasses.fields(self.carry_class)]
        return self.carry_class(**{name: self.get_buffer(f"{name.removeprefix('z_')}_init") for name in names})

    def think(self, carry: Any, question: Latent, cos_sin: CosSin | None) -> tuple[Any, Latent, Latent]:
        """The latents after one ACT step, with whatever gradients the architecture gives them, and the answer.

        Last, what the answer was before the last H-cycle, without a gradient.
        """
        raise NotImplementedError

    def embed(self, inputs: Int[Tensor, "batch seq"], puzzle_identifiers: Int[Tensor, "batch"]) -> Latent:
        """The question: the puzzle's vector, filled up with zeros over its positions, then the tokens."""
        question = self.embed_tokens(inputs)
        if self.puzzle_emb is not None:
            vector = self.puzzle_emb(puzzle_identifiers)
            room = self.config.puzzle_positions * self.config.hidden_size
            vector = F.pad(vector, (0, room - self.config.puzzle_emb_ndim))
            question = torch.cat((vector.unflatten(-1, (-1, self.config.hidden_size)), question), dim=1)
        if self.embed_pos is not None:
            # A sum of two has twice the variance of one.
            question = math.sqrt(0.5) * (question + self.embed_pos.embedding_weight.to(question.dtype))
        return self.embed_scale * question

    def empty_carry(self, batch_size: int, device: torch.device) -> Any:
        """Zeros where the latents will be."""
        shape = (batch_size, self.config.positions, self.config.hidden_size)
        return map_latents(lambda start: torch.zeros(shape, dtype=start.dtype, device=device), self.starts)

    def reset_carry(self, reset: Bool[Tensor, "batch"], carry: Latents) -> Latents:
        """The carry with every latent back at its start for the sequences in `reset`."""
        reset = reset.view(-1, 1, 1)
        return map_latents(lambda z, start: torch.where(reset, start, z), carry, self.starts)

    def forward(
        self, carry: Any, data: dict[str, Tensor]
    ) -> tuple[Any, Float[Tensor, "batch seq vocab"], tuple[PerSequence, PerSequence], PerSequence | None]:
        """New carry (cut off from its history), answer logits, halt and continue logits in float32.

        Last, the mean square of the answer's change over the last H-cycle; None where the loss does not weigh it.
        """
        cos_sin = None if self.rotary_emb is None else self.rotary_emb()
        question = self.embed(data["inputs"], data["puzzle_identifiers"])
        carry, answer, before = self.think(carry, question, cos_sin)
        logits = self.lm_head(answer)[:, self.config.puzzle_positions :]
        q_halt, q_continue = at_least_float32(self.q_head(answer[:, 0])).unbind(dim=-1)
        change = None
        if self.config.cycle_penalty:
            change = (at_least_float32(answer) - at_least_float32(before)).square().mean(dim=(1, 2))
        return map_latents(Tensor.detach, carry), logits, (q_halt, q_continue), change
