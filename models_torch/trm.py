"""The Tiny Recursive Model (arXiv 2510.04871): one small network applied over and over to its own answer.

Two latents are carried: `z_H`, the current answer, and `z_L`, the scratch pad. An *H-cycle* refines the
scratch pad `L_cycles` times from the question and the answer, then the answer once from the scratch pad,
always with the same layers. An *ACT step* runs `H_cycles` of them and gives logits; a sequence stays in the
batch for several ACT steps, until it halts.
"""

# ruff: noqa: N815 (z_H and no_ACT_continue are the field's names)

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models_torch.layers import (
    Attention,
    CastEmbedding,
    CastLinear,
    CosSin,
    RotaryEmbedding,
    SwiGLU,
    at_least_float32,
    rms_norm,
    truncated_normal_,
)
from models_torch.losses import LOSSES
from models_torch.sparse_embedding import SparseEmbedding

Latent = Float[Tensor, "batch positions hidden"]
PerSequence = Float[Tensor, "batch"]

POSITION_ENCODINGS = ("none", "rope", "learned")
FORWARD_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class TRMConfig:
    """Everything that decides the shape and the meaning of a TRM; defaults are the published ones."""

    batch_size: int = 1  # sequences in a training batch on one device; the trainer sets it
    seq_len: int = 1  # tokens of a puzzle, puzzle positions not counted; the data set decides
    vocab_size: int = 2  # tokens, padding included; the data set decides
    num_puzzle_identifiers: int = 1  # rows of the puzzle table, the blank one included; the data set decides

    hidden_size: int = 512  # channels
    num_heads: int = 8  # attention heads; without meaning for the MLP mixer
    L_layers: int = 2  # blocks in the network
    H_cycles: int = 3  # H-cycles in an ACT step; only the last one has gradients
    L_cycles: int = 6  # updates of z_L in an H-cycle
    expansion: float = 4.0  # MLP width in multiples of its input, before the SwiGLU's two thirds
    mlp_multiple_of: int = 256  # MLP widths are rounded up to a multiple of this many channels
    mlp_t: bool = False  # mix positions by an MLP over them instead of attention

    pos_encodings: str = "rope"  # one of POSITION_ENCODINGS; rope has no effect on the MLP mixer
    rope_theta: float = 10000.0  # longest rotary wavelength, in positions over 2 pi
    rms_norm_eps: float = 1e-5  # added to a mean square

    puzzle_emb_ndim: int = 512  # channels of a puzzle vector; 0 for no puzzle table
    puzzle_emb_len: int = 16  # positions in front of the tokens; 0 for as many as the puzzle vector fills

    halt_max_steps: int = 16  # ACT steps after which a sequence always halts
    halt_exploration_prob: float = 0.1  # share of steps that draw a random minimum of ACT steps
    no_ACT_continue: bool = True  # halt on q_halt > 0; False: on q_halt > q_continue, bootstrapped (HRM)

    forward_dtype: str = "bfloat16"  # one of FORWARD_DTYPES; parameters are float32 whatever it is
    loss_type: str = "stablemax_cross_entropy"  # one of losses.LOSSES

    def __post_init__(self):
        for name, allowed in (
            ("pos_encodings", POSITION_ENCODINGS),
            ("forward_dtype", FORWARD_DTYPES),
            ("loss_type", tuple(LOSSES)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(allowed)}")
        for name in ("batch_size", "H_cycles", "L_cycles", "L_layers", "halt_max_steps", "mlp_multiple_of"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use at least 1")
        if not self.mlp_t and self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_heads} heads of an even "
                f"size; use a multiple of {2 * self.num_heads}"
            )
        if self.puzzle_emb_len and not self.puzzle_emb_ndim:
            raise ValueError(
                f"puzzle_emb_len {self.puzzle_emb_len} has no vector to hold with puzzle_emb_ndim 0; "
                f"use puzzle_emb_len 0, or a puzzle_emb_ndim"
            )
        room = self.puzzle_positions * self.hidden_size
        if self.puzzle_emb_ndim > room:
            raise ValueError(
                f"puzzle_emb_ndim {self.puzzle_emb_ndim} does not fit in {self.puzzle_positions} positions "
                f"of {self.hidden_size} channels; use at most {room}, or a larger puzzle_emb_len"
            )

    @property
    def puzzle_positions(self) -> int:
        """Positions in front of the tokens that hold the puzzle vector."""
        return self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size)

    @property
    def positions(self) -> int:
        """Positions that the network works on: puzzle vector and tokens."""
        return self.puzzle_positions + self.seq_len

    @property
    def torch_dtype(self) -> torch.dtype:
        """`forward_dtype` as PyTorch's object."""
        return getattr(torch, self.forward_dtype)


@dataclass
class TRMInnerCarry:
    """The two latents: the answer and the scratch pad."""

    z_H: Latent
    z_L: Latent


@dataclass
class TRMCarry:
    """What lives on between ACT steps: latents, ACT steps taken, who has halted, the examples in work."""

    inner_carry: TRMInnerCarry
    steps: Int[Tensor, "batch"]
    halted: Bool[Tensor, "batch"]
    current_data: dict[str, Tensor]


class TRMBlock(nn.Module):
    """Mixes positions (by attention, or an MLP along them), then channels; a norm after each sum."""

    def __init__(self, config: TRMConfig):
        super().__init__()
        self.config = config
        if config.mlp_t:
            self.mlp_t = SwiGLU(config.positions, config.expansion, config.mlp_multiple_of)
        else:
            head_dim = config.hidden_size // config.num_heads
            self.self_attn = Attention(config.hidden_size, head_dim, config.num_heads, config.num_heads)
        self.mlp = SwiGLU(config.hidden_size, config.expansion, config.mlp_multiple_of)

    def forward(self, x: Latent, cos_sin: CosSin | None) -> Latent:
        epsilon = self.config.rms_norm_eps
        if self.config.mlp_t:
            # The norm, too, runs over positions here and not over channels, as published.
            x_t = x.transpose(1, 2)
            x = rms_norm(x_t + self.mlp_t(x_t), epsilon).transpose(1, 2)
        else:
            x = rms_norm(x + self.self_attn(x, cos_sin), epsilon)
        return rms_norm(x + self.mlp(x), epsilon)


class TRMLevel(nn.Module):
    """The one network of TRM: adds what it is told to what it knows, then runs its blocks."""

    def __init__(self, config: TRMConfig):
        super().__init__()
        self.layers = nn.ModuleList(TRMBlock(config) for _ in range(config.L_layers))

    def forward(self, z: Latent, injection: Latent, cos_sin: CosSin | None) -> Latent:
        z = z + injection
        for layer in self.layers:
            z = layer(z, cos_sin)
        return z


class TRMInner(nn.Module):
    """One ACT step without the halting: embeds the question, runs the H-cycles, reads out the logits."""

    def __init__(self, config: TRMConfig):
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
            self.rotary_emb = RotaryEmbedding(hidden // config.num_heads, config.positions, config.rope_theta)
        if config.pos_encodings == "learned":
            self.embed_pos = CastEmbedding(config.positions, hidden, init_std, dtype)

        self.L_level = TRMLevel(config)
        self.H_init = nn.Buffer(truncated_normal_(torch.empty(hidden), 1.0).to(dtype))
        self.L_init = nn.Buffer(truncated_normal_(torch.empty(hidden), 1.0).to(dtype))

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

    def reset_carry(self, reset: Bool[Tensor, "batch"], carry: TRMInnerCarry) -> TRMInnerCarry:
        """The carry with both latents back at their start for the sequences in `reset`."""
        reset = reset.view(-1, 1, 1)
        return TRMInnerCarry(
            z_H=torch.where(reset, self.H_init, carry.z_H), z_L=torch.where(reset, self.L_init, carry.z_L)
        )

    def h_cycle(self, z_H: Latent, z_L: Latent, question: Latent, cos_sin: CosSin | None) -> tuple[Latent, Latent]:
        """The scratch pad `L_cycles` times, then the answer once."""
        for _ in range(self.config.L_cycles):
            z_L = self.L_level(z_L, z_H + question, cos_sin)
        return self.L_level(z_H, z_L, cos_sin), z_L

    def forward(
        self, carry: TRMInnerCarry, data: dict[str, Tensor]
    ) -> tuple[TRMInnerCarry, Float[Tensor, "batch seq vocab"], tuple[PerSequence, PerSequence]]:
        """New carry (cut off from its history), answer logits, halt and continue logits in float32."""
        cos_sin = None if self.rotary_emb is None else self.rotary_emb()
        question = self.embed(data["inputs"], data["puzzle_identifiers"])
        z_H, z_L = carry.z_H, carry.z_L
        # Only the last H-cycle has gradients (the paper's "deep recursion"): the earlier ones bring z close
        # to the answer at no memory.
        with torch.no_grad():
            for _ in range(self.config.H_cycles - 1):
                z_H, z_L = self.h_cycle(z_H, z_L, question, cos_sin)
        z_H, z_L = self.h_cycle(z_H, z_L, question, cos_sin)

        logits = self.lm_head(z_H)[:, self.config.puzzle_positions :]
        q_halt, q_continue = at_least_float32(self.q_head(z_H[:, 0])).unbind(dim=-1)
        return TRMInnerCarry(z_H.detach(), z_L.detach()), logits, (q_halt, q_continue)


class TRM(nn.Module):
    """Adaptive computation time around `TRMInner`: a call is one ACT step for every sequence of the batch.

    A sequence that halted in the last step makes room for the example at its place in `batch`; the others go
    on with the example they have. In evaluation nothing halts before `halt_max_steps`, so that a batch ends
    together.
    """

    def __init__(self, config: TRMConfig):
        super().__init__()
        self.config = config
        self.inner = TRMInner(config)

    def initial_carry(self, batch: dict[str, Tensor]) -> TRMCarry:
        """All halted, so that the first step takes up its whole batch; the zeros elsewhere are never read."""
        batch_size, device = batch["inputs"].shape[0], batch["inputs"].device
        shape = (batch_size, self.config.positions, self.config.hidden_size)
        latent = torch.zeros(shape, dtype=self.config.torch_dtype, device=device)
        return TRMCarry(
            inner_carry=TRMInnerCarry(z_H=latent, z_L=latent.clone()),
            steps=torch.zeros(batch_size, dtype=torch.int32, device=device),
            halted=torch.ones(batch_size, dtype=torch.bool, device=device),
            current_data={key: torch.zeros_like(value) for key, value in batch.items()},
        )

    def forward(self, carry: TRMCarry, batch: dict[str, Tensor]) -> tuple[TRMCarry, dict[str, Tensor]]:
        """One ACT step; `batch` gives `inputs`, `labels` and `puzzle_identifiers`."""
        fresh = carry.halted
        data = {
            key: torch.where(fresh.view(-1, *[1] * (value.ndim - 1)), batch[key], value)
            for key, value in carry.current_data.items()
        }
        inner_carry = self.inner.reset_carry(fresh, carry.inner_carry)
        inner_carry, logits, (q_halt, q_continue) = self.inner(inner_carry, data)
        outputs = {"logits": logits, "q_halt_logits": q_halt, "q_continue_logits": q_continue}

        with torch.no_grad():
            steps = torch.where(fresh, 0, carry.steps) + 1
            halted = at_limit = steps >= self.config.halt_max_steps
            if self.training and self.config.halt_max_steps > 1:
                halted = self._halt_early(q_halt, q_continue, steps, at_limit)
                if not self.config.no_ACT_continue:
                    outputs["target_q_continue"] = self._continue_target(inner_carry, data, at_limit)
        return TRMCarry(inner_carry, steps, halted, data), outputs

    def _halt_early(
        self,
        q_halt: PerSequence,
        q_continue: PerSequence,
        steps: Int[Tensor, "batch"],
        at_limit: Bool[Tensor, "batch"],
    ) -> Bool[Tensor, "batch"]:
        """Who halts in training: who must or wants to, unless a random minimum of steps forbids it."""
        wants_to = q_halt > 0 if self.config.no_ACT_continue else q_halt > q_continue
        explores = torch.rand_like(q_halt) < self.config.halt_exploration_prob
        minimum_steps = torch.randint_like(steps, low=2, high=self.config.halt_max_steps + 1)
        return (at_limit | wants_to) & (steps >= explores * minimum_steps)

    def _continue_target(
        self, inner_carry: TRMInnerCarry, data: dict[str, Tensor], at_limit: Bool[Tensor, "batch"]
    ) -> PerSequence:
        """What going on is worth, in [0, 1]: the better value of the next step; at the limit, its halting."""
        _, _, (next_halt, next_continue) = self.inner(inner_carry, data)
        return torch.sigmoid(torch.where(at_limit, next_halt, torch.maximum(next_halt, next_continue)))
