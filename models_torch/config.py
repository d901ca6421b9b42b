"""Configurations of models: the fields of every model, of a model with halting, and of the architectures here."""

# ruff: noqa: N815 (no_ACT_continue is the field's name)

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from models_torch.losses import LOSSES
from models_torch.ranges import Choices, Range, check_ranges

ODD = "an odd number, which has a middle, or 0"

Rows = Annotated[int, Range(1, 2**31 - 1)]  # an identifier is an int32
SeqLen = Annotated[int, Range(1, 2**20)]
VocabSize = Annotated[int, Range(1, 2**24)]
Channels = Annotated[int, Range(1, 65536)]
Expansion = Annotated[float, Range(0.01, 256)]
Window = Annotated[int, Range(0, 1023, expected=ODD)]
LossWeight = Annotated[float, Range(0, why="a weight of a loss term is meaningful at any size")]
Layers = Annotated[int, Range(1, 1024)]
Cycles = Annotated[int, Range(1, 4096)]
ForwardDtype = Annotated[str, Choices(("float32", "bfloat16", "float16", "float64"))]
LossType = Annotated[str, Choices(tuple(LOSSES))]
Heads = Annotated[int, Range(1, 4096)]
PuzzleEmbLen = Annotated[int, Range(0, 65536)]
PositionEncodings = Annotated[str, Choices(("none", "rope", "learned"))]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields of every model: sizes set by the data set and the devices, and the dtype of the forward pass.

    Raises ValueError for a field outside its declared range (`models_torch/ranges.py`); so does every subclass.
    """

    batch_size: Annotated[int, Range(1, 2**20)] = 1  # sequences per training batch on one device; set by the trainer
    seq_len: SeqLen = 1  # tokens of a sequence without puzzle positions; set by the data set
    vocab_size: VocabSize = 2  # number of tokens, including padding; set by the data set
    forward_dtype: ForwardDtype = "bfloat16"  # float32, bfloat16, float16 or float64; parameters are always float32

    def __post_init__(self):
        check_ranges(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`forward_dtype` as a `torch.dtype`."""
        return getattr(torch, self.forward_dtype)


@dataclass(frozen=True, kw_only=True)
class ACTConfig(ModelConfig):
    """The fields of a puzzle model with adaptive computation time and of its loss head."""

    num_puzzle_identifiers: Rows = 1  # rows of the puzzle table, including the blank one; set by the data set
    halt_max_steps: Annotated[int, Range(1, 4096)] = 16  # ACT steps after which a sequence always halts
    loss_type: LossType = "stablemax_cross_entropy"  # stablemax_cross_entropy or softmax_cross_entropy


@dataclass(frozen=True, kw_only=True)
class ArchitectureConfig(ACTConfig):
    """The fields of every built-in architecture: blocks, positions, puzzle table, halting."""

    hidden_size: Channels = 512  # channels
    num_heads: Heads = 8  # attention heads; no effect without attention
    expansion: Expansion = 4.0  # MLP width in multiples of its input, before the factor 2/3 of SwiGLU
    mlp_multiple_of: Channels = 256  # MLP widths are rounded up to a multiple of this number
    mlp_t: bool = False  # mix positions by an MLP over positions instead of attention
    attention_window: Window = 0  # side of the square of cells that a cell attends to; 0: all cells
    convolution_window: Window = 0  # mix cells by a convolution of this side instead of attention; 0: attention

    pos_encodings: PositionEncodings = "rope"  # none, rope or learned; rope has no effect without attention
    rope_theta: Annotated[float, Range(1, 1e9)] = 10000.0  # longest rotary wavelength, in positions over 2 pi
    rms_norm_eps: Annotated[float, Range(0, 1)] = 1e-5  # added to a mean square

    puzzle_emb_ndim: Annotated[int, Range(0, 2**20)] = 512  # channels of a puzzle embedding; 0 for no puzzle table
    puzzle_emb_len: PuzzleEmbLen = 0  # positions before the tokens; 0: the number that the puzzle embedding fills

    halt_exploration_prob: Annotated[float, Range(0, 1)] = 0.1  # share of steps that draw a random minimum of ACT steps
    no_ACT_continue: bool = False  # halt if q_halt > 0; False: if q_halt > q_continue, bootstrapped (HRM)
    halt_loss_weight: LossWeight = 0.5  # weight in the loss of the halting loss
    cycle_penalty: LossWeight = 0.0  # weight in the loss of the answer's mean squared change over its last H-cycle

    def __post_init__(self):
        super().__post_init__()
        self._check_heads()
        self._check_windows()
        self._check_puzzle_positions()

    def _check_heads(self) -> None:
        if not self.attends:
            return
        # A remainder is allowed: the published baseline has 12 heads of 42 channels on 512.
        if not self.head_dim:
            smallest = 2 if self.pos_encodings == "rope" else 1
            raise ValueError(
                f"hidden_size {self.hidden_size} is too small for {self.num_heads} heads; "
                f"use at most {max(1, self.hidden_size // smallest)} heads"
            )
        if self.pos_encodings == "rope" and self.head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} gives {self.num_heads} heads of {self.head_dim} channels, but rope "
                f"needs an even number; use a hidden_size of {(self.head_dim + 1) * self.num_heads}"
            )

    def _check_windows(self) -> None:
        if self.attention_window and self.convolution_window:
            raise ValueError(
                f"attention_window {self.attention_window} needs attention, which convolution_window "
                f"{self.convolution_window} replaces; set one of them to 0"
            )
        for name in ("attention_window", "convolution_window"):
            window = getattr(self, name)
            if not window:
                continue
            if window % 2 == 0:
                raise ValueError(f"{name} is {window}; use {ODD}")
            if self.mlp_t:
                raise ValueError(f"{name} {window} has no effect with mlp_t; use mlp_t False, or {name} 0")
            if self.side**2 != self.seq_len:
                raise ValueError(
                    f"{name} {window} needs a square grid, but {self.seq_len} is not a square; use {name} 0"
                )

    def _check_puzzle_positions(self) -> None:
        if self.puzzle_emb_len and not self.puzzle_emb_ndim:
            raise ValueError(
                f"puzzle_emb_len {self.puzzle_emb_len} has no effect with puzzle_emb_ndim 0; "
                "use puzzle_emb_len 0, or a larger puzzle_emb_ndim"
            )
        capacity = self.puzzle_positions * self.hidden_size
        if self.puzzle_emb_ndim > capacity:
            raise ValueError(
                f"puzzle_emb_ndim {self.puzzle_emb_ndim} does not fit in {self.puzzle_positions} positions "
                f"of {self.hidden_size} channels; use at most {capacity}, or a larger puzzle_emb_len"
            )

    @property
    def attends(self) -> bool:
        """Returns True if positions are mixed by attention, rather than by an MLP or a convolution."""
        return not (self.mlp_t or self.convolution_window)

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def side(self) -> int:
        """Number of rows and columns of a square grid."""
        return math.isqrt(self.seq_len)

    @property
    def puzzle_positions(self) -> int:
        """Number of positions before the tokens, which contain the puzzle embedding."""
        return self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size)

    @property
    def positions(self) -> int:
        """Length of the sequence inside the network: puzzle positions and tokens."""
        return self.puzzle_positions + self.seq_len
