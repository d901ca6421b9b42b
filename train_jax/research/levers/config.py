"""The configuration of a TRM with levers of training; each is off by default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from models_torch.config import LossWeight
from models_torch.ranges import Range
from models_torch.trm import TRMConfig

Share = Annotated[float, Range(0, 1)]
Deviation = Annotated[float, Range(0, 1e3)]


@dataclass(frozen=True, kw_only=True)
class LeverConfig(TRMConfig):
    """A TRM and its levers; with the defaults it is the TRM itself.

    Raises ValueError for a lever that has no effect in this network.
    """

    repair: Share = 0.0
    """Share of the cells of the last answer, an input from the second ACT step on, that training replaces by random
    tokens; 0: the answer is no input."""
    random_latents: Deviation = 0.0
    """Standard deviation of noise on the initial latents, drawn for every sequence in training."""
    path_noise: Deviation = 0.0
    """Standard deviation of noise on z_H at the start of every ACT step in training."""
    race: Annotated[int, Range(1, 64)] = 1
    """Latents that run the H-cycles without gradients; in training the one with the lowest token loss is trained, in
    evaluation the halting head chooses."""
    label_smoothing: Annotated[float, Range(0, 1, high_excluded=True)] = 0.0
    """Share of the token loss in training that is the mean over all tokens instead of the label's."""
    act_step_weights: tuple[LossWeight, ...] = ()
    """Weights of the token loss in training by ACT step; the last one is that of all further steps."""
    qk_norm: bool = False
    """Norm queries and keys of every head."""
    position_tables: bool = False
    """Add learned rows for the row, the column and the box of a cell to the input embeddings."""
    looped_flow: Deviation = 0.0
    """Standard deviation of the noise at the first ACT step on an answer that is an input; it falls to 0 at the last
    step, while the answer's share rises. The answer is that of the labels in training, the last one in evaluation. 0:
    the answer is no input."""

    def __post_init__(self):
        super().__post_init__()
        if self.repair and self.looped_flow:
            raise ValueError("repair and looped_flow both feed an answer back; set one of them to 0")
        if self.race > 1 and self.H_cycles < 2:
            raise ValueError(
                f"race {self.race} needs H-cycles without gradients; use H_cycles of at least 2, or race 1"
            )
        if self.qk_norm and (not self.attends or self.attention_window):
            raise ValueError(
                "qk_norm needs attention over all cells; use mlp_t False and windows of 0, or qk_norm False"
            )
        if self.position_tables and self.side**2 != self.seq_len:
            raise ValueError(f"position_tables needs a square grid, but {self.seq_len} is not a square; use False")

    @property
    def box_rows(self) -> int:
        """Rows of a box: the largest divisor of the side up to its root, as in Sudokus (2 of 6, 3 of 9)."""
        return max(rows for rows in range(1, math.isqrt(self.side) + 1) if self.side % rows == 0)
