"""Attention for large grids: a cell attends to the cells around it and to the puzzle's positions, these to everything.

The weights are those of full attention, so the one can go on from the other.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from models_torch.layers import Attention, Heads


class LocalAttention(Attention):
    """Attention among `puzzle_positions` global positions and, after them, the cells of a square, row by row.

    A row of cells attends to the `window` rows around it, with what lies too far to the left or right masked out: dense
    products of `window / side` of the size, where a mask alone would save nothing.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, *, window: int, side: int, puzzle_positions: int
    ):
        """`window`, odd: cells on a side of what a cell sees; `side`: cells on a side of the grid."""
        super().__init__(hidden_size, head_dim, num_heads, num_heads)
        self.window, self.side, self.puzzle_positions = window, side, puzzle_positions
        self.visible = nn.Buffer(visible_cells(window, side, puzzle_positions), persistent=False)

    def mix(self, query: Heads, key: Heads, value: Heads) -> Heads:
        first = self.puzzle_positions
        cells = F.scaled_dot_product_attention(
            self.rows(query[:, :, first:]), self.around(key), self.around(value), attn_mask=self.visible
        )
        cells = cells.transpose(1, 2).flatten(2, 3)
        if not first:
            return cells
        return torch.cat((F.scaled_dot_product_attention(query[:, :, :first], key, value), cells), dim=2)

    def rows(self, cells: Heads) -> Float[Tensor, "batch side heads side head_dim"]:
        """The rows of the square as sequences of their own."""
        return cells.unflatten(2, (self.side, self.side)).transpose(1, 2)

    def around(self, x: Heads) -> Float[Tensor, "batch side heads seen head_dim"]:
        """For every row what it may see: the puzzle's positions, then the rows around it, zeros beyond the edge."""
        first, reach = self.puzzle_positions, self.window // 2
        cells = F.pad(x[:, :, first:].unflatten(2, (self.side, self.side)), (0, 0, 0, 0, reach, reach))
        near = torch.cat([cells[:, :, i : i + self.side] for i in range(self.window)], dim=3)
        puzzle = x[:, :, None, :first].expand(-1, -1, self.side, -1, -1)
        return torch.cat((puzzle, near), dim=3).transpose(1, 2)


def visible_cells(window: int, side: int, puzzle_positions: int) -> Bool[Tensor, "side 1 side seen"]:
    """Which of what `LocalAttention.around` gives a row its cells attend to; an axis for the heads."""
    reach = window // 2
    at = torch.arange(side)
    rows = at[:, None] + torch.arange(-reach, reach + 1)
    inside = (rows >= 0) & (rows < side)
    close = (at[:, None] - at).abs() <= reach
    near = (inside[:, None, :, None] & close[None, :, None, :]).flatten(2)
    return torch.cat((torch.ones(side, side, puzzle_positions, dtype=torch.bool), near), dim=-1)[:, None]
