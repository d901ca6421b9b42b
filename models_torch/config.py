"""What a model's configuration says: the sizes that data and devices decide, the fields that architectures share."""

# ruff: noqa: N815 (no_ACT_continue is the field's name)

import math
from dataclasses import dataclass

import torch

from models_torch.losses import LOSSES

POSITION_ENCODINGS = ("none", "rope", "learned")
FORWARD_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the trainer needs to know of a model, whichever it is."""

    batch_size: int = 1  # sequences in a training batch on one device; the trainer sets it
    seq_len: int = 1  # tokens of a puzzle, puzzle positions not counted; the data set decides
    vocab_size: int = 2  # tokens, padding included; the data set decides
    num_puzzle_identifiers: int = 1  # rows of the puzzle table, the blank one included; the data set decides

    halt_max_steps: int = 16  # ACT steps after which a sequence always halts
    forward_dtype: str = "bfloat16"  # float32, bfloat16, float16 or float64; parameters are float32 whatever it is
    loss_type: str = "stablemax_cross_entropy"  # stablemax_cross_entropy or softmax_cross_entropy

    def __post_init__(self):
        self.require_one_of("forward_dtype", FORWARD_DTYPES)
        self.require_one_of("loss_type", tuple(LOSSES))
        self.require_at_least_one("batch_size", "halt_max_steps")

    def require_one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        """Raises ValueError unless the field `name` has one of the values `allowed`."""
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(allowed)}")

    def require_at_least_one(self, *names: str) -> None:
        """Raises ValueError for a field among `names` that is below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use at least 1")

    @property
    def torch_dtype(self) -> torch.dtype:
        """`forward_dtype` as PyTorch's object."""
        return getattr(torch, self.forward_dtype)


@dataclass(frozen=True, kw_only=True)
class ArchitectureConfig(ModelConfig):
    """The fields that every architecture here has: blocks, positions, puzzle table, halting."""

    hidden_size: int = 512  # channels
    num_heads: int = 8  # attention heads; without meaning for the MLP mixer
    expansion: float = 4.0  # MLP width in multiples of its input, before the SwiGLU's two thirds
    mlp_multiple_of: int = 256  # MLP widths are rounded up to a multiple of this many channels
    mlp_t: bool = False  # mix positions by an MLP over them instead of attention
    attention_window: int = 0  # side of the square of cells that a cell attends to, beside puzzle positions; 0: all

    pos_encodings: str = "rope"  # none, rope or learned; rope has no effect on the MLP mixer
    rope_theta: float = 10000.0  # longest rotary wavelength, in positions over 2 pi
    rms_norm_eps: float = 1e-5  # added to a mean square

    puzzle_emb_ndim: int = 512  # channels of a puzzle vector; 0 for no puzzle table
    puzzle_emb_len: int = 0  # positions in front of the tokens; 0 for as many as the puzzle vector fills

    halt_exploration_prob: float = 0.1  # share of steps that draw a random minimum of ACT steps
    no_ACT_continue: bool = False  # halt on q_halt > 0; False: on q_halt > q_continue, bootstrapped (HRM)
    cycle_penalty: float = 0.0  # weight in the loss of the answer's mean squared change over its last H-cycle

    def __post_init__(self):
        super().__post_init__()
        self.require_one_of("pos_encodings", POSITION_ENCODINGS)
        self.require_at_least_one("hidden_size", "num_heads", "mlp_multiple_of")
        self._check_heads()
        self._check_window()
        self._check_puzzle_positions()
        if not 0 <= self.cycle_penalty < math.inf:
            raise ValueError(f"cycle_penalty is {self.cycle_penalty}; use at least 0")

    def _check_heads(self) -> None:
        if self.mlp_t:
            return
        # A remainder is allowed: the published baseline has 12 heads of 42 channels on 512.
        if not self.head_dim:
            raise ValueError(
                f"hidden_size {self.hidden_size} leaves no channel for each of {self.num_heads} heads; "
                f"use at most {self.hidden_size // 2} heads"
            )
        if self.pos_encodings == "rope" and self.head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} gives {self.num_heads} heads of {self.head_dim} channels, and rope "
                f"turns channels in pairs; use a hidden_size of {(self.head_dim + 1) * self.num_heads}"
            )

    def _check_window(self) -> None:
        if not self.attention_window:
            return
        if self.attention_window < 0 or self.attention_window % 2 == 0:
            raise ValueError(
                f"attention_window is {self.attention_window}; use an odd number, which has a middle, or 0"
            )
        if self.mlp_t:
            raise ValueError(
                f"attention_window {self.attention_window} is for attention and mlp_t mixes positions without; "
                "use mlp_t False, or attention_window 0"
            )
        if self.side**2 != self.seq_len:
            raise ValueError(
                f"attention_window {self.attention_window} needs a square grid and {self.seq_len} tokens are none; "
                "use attention_window 0"
            )

    def _check_puzzle_positions(self) -> None:
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
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def side(self) -> int:
        """Cells of a side of the grid, where it is a square."""
        return math.isqrt(self.seq_len)

    @property
    def puzzle_positions(self) -> int:
        """Positions in front of the tokens that hold the puzzle vector."""
        return self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size)

    @property
    def positions(self) -> int:
        """Positions that the network works on: puzzle vector and tokens."""
        return self.puzzle_positions + self.seq_len
