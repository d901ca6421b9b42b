"""The common part of the architectures: input embeddings, initial latents and output heads."""

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


def map_latents(function: Callable[..., Tensor], latents: Latents, *others: Any) -> Latents:
    """Applies `function` to each field of the dataclass `latents` and the same field of `others`."""
    names = [field.name for field in dataclasses.fields(latents)]  # pyright: ignore[reportArgumentType]
    return type(latents)(**{name: function(*(getattr(each, name) for each in (latents, *others))) for name in names})


class Inner(nn.Module):
    """One ACT step without the halting.

    A subclass creates its reasoning modules and then its initial latents (`new_initial_latent`) in `__init__`, and
    defines `initial_latents` and `deep_recursion`. A latent `z_X` starts from the buffer `X_init`, as published.
    """

    def __init__(self, config: ArchitectureConfig):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        dtype = config.torch_dtype
        self.embed_scale = math.sqrt(hidden)
        init_std = 1 / self.embed_scale

        self.embed_tokens = CastEmbedding(config.vocab_size, hidden, init_std, dtype)
        self.lm_head = CastLinear(hidden, config.vocab_size)
        self.q_head = CastLinear(hidden, 2, bias=True)
        # The halt probability is near 0 initially; otherwise an untrained model would never reach a second ACT step.
        nn.init.zeros_(self.q_head.weight)
        nn.init.constant_(self.q_head.get_parameter("bias"), -5)

        self.puzzle_emb = self.rotary_emb = self.embed_pos = None
        if config.puzzle_emb_ndim:
            self.puzzle_emb = SparseEmbedding(
                config.num_puzzle_identifiers, config.puzzle_emb_ndim, config.batch_size, 0.0, dtype
            )
        if config.pos_encodings == "rope" and config.attends:
            self.rotary_emb = RotaryEmbedding(config.head_dim, config.positions, config.rope_theta)
        if config.pos_encodings == "learned":
            self.embed_pos = CastEmbedding(config.positions, hidden, init_std, dtype)

    def new_initial_latent(self) -> nn.Buffer:
        """Returns the initial value of a latent: a random vector for all positions, in a buffer that is not trained."""
        latent = truncated_normal_(torch.empty(self.config.hidden_size), 1.0)
        return nn.Buffer(latent.to(self.config.torch_dtype))

    def initial_latents(self) -> Any:
        """Returns the carry with the buffers `X_init` as latents, each of shape (hidden,)."""
        raise NotImplementedError

    def deep_recursion(
        self, carry: Any, input_embeddings: Latent, cos_sin: CosSin | None
    ) -> tuple[Any, Latent, Latent]:
        """Updates the latents in one ACT step, with the gradients of the architecture.

        Returns the new carry, the latent of the answer, and the detached value of that latent before the last H-cycle.
        """
        raise NotImplementedError

    def embed(self, inputs: Int[Tensor, "batch seq"], puzzle_identifiers: Int[Tensor, "batch"]) -> Latent:
        """Returns the puzzle embedding, zero-padded to fill its positions, followed by the token embeddings."""
        embeddings = self.embed_tokens(inputs)
        if self.puzzle_emb is not None:
            puzzle = self.puzzle_emb(puzzle_identifiers)
            capacity = self.config.puzzle_positions * self.config.hidden_size
            puzzle = F.pad(puzzle, (0, capacity - self.config.puzzle_emb_ndim))
            embeddings = torch.cat((puzzle.unflatten(-1, (-1, self.config.hidden_size)), embeddings), dim=1)
        if self.embed_pos is not None:
            # The sum of two independent terms has twice the variance of one term.
            embeddings = math.sqrt(0.5) * (embeddings + self.embed_pos.embedding_weight.to(embeddings.dtype))
        return self.embed_scale * embeddings

    def empty_carry(self, batch_size: int, device: torch.device) -> Any:
        """Returns a carry of zeros with the shapes and dtypes of the latents."""
        shape = (batch_size, self.config.positions, self.config.hidden_size)
        return map_latents(lambda z: torch.zeros(shape, dtype=z.dtype, device=device), self.initial_latents())

    def reset_carry(self, reset: Bool[Tensor, "batch"], carry: Latents) -> Latents:
        """Returns the carry with initial latents for the sequences in `reset`."""
        reset = reset.view(-1, 1, 1)
        return map_latents(lambda z, initial: torch.where(reset, initial, z), carry, self.initial_latents())

    def token_logits(self, answer: Latent) -> Float[Tensor, "batch seq vocab"]:
        """Returns the logits of the tokens, without those of the puzzle positions."""
        return self.lm_head(answer)[:, self.config.puzzle_positions :]

    def halting_logits(self, answer: Latent) -> tuple[PerSequence, PerSequence]:
        """Returns the float32 logits of halting and continuing, read from the first position."""
        q_halt, q_continue = at_least_float32(self.q_head(answer[:, 0])).unbind(dim=-1)
        return q_halt, q_continue

    def forward(
        self, carry: Any, data: dict[str, Tensor]
    ) -> tuple[Any, Float[Tensor, "batch seq vocab"], tuple[PerSequence, PerSequence], PerSequence | None]:
        """Runs one ACT step.

        Returns the detached new carry, the logits of the tokens, float32 logits of halting and continuing, and the mean
        squared change of the answer over the last H-cycle (None if `cycle_penalty` is 0).
        """
        cos_sin = None if self.rotary_emb is None else self.rotary_emb()
        input_embeddings = self.embed(data["inputs"], data["puzzle_identifiers"])
        carry, answer, previous_answer = self.deep_recursion(carry, input_embeddings, cos_sin)
        logits = self.token_logits(answer)
        q_halt, q_continue = self.halting_logits(answer)
        cycle_change = None
        if self.config.cycle_penalty:
            difference = at_least_float32(answer) - at_least_float32(previous_answer)
            cycle_change = difference.square().mean(dim=(1, 2))
        return map_latents(Tensor.detach, carry), logits, (q_halt, q_continue), cycle_change
