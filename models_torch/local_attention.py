"""Windowed attention for large grids: a cell attends to the cells around it and to the puzzle positions.

Puzzle positions attend to all positions. The weights have the names and shapes of full attention, so checkpoints are
interchangeable.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from models_torch.layers import Attention, Heads


class LocalAttention(Attention):
    """Attention over `puzzle_positions` global positions followed by the cells of a square grid in row-major order.

    A row of cells attends to the `window` rows around it; cells too far to the left or right are masked. The dense
    products have `window / side` of the full size; a mask of full attention would not reduce the computation.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, *, window: int, side: int, puzzle_positions: int
    ):
        """`window` is the side of the window in cells, an odd number; `side` is the side of the grid."""
        super().__init__(hidden_size, head_dim, num_heads, num_heads)
        self.window = window
        self.side = side
        self.puzzle_positions = puzzle_positions
        self.visible = nn.Buffer(visible_cells(window, side, puzzle_positions), persistent=False)

    def attend(self, query: Heads, key: Heads, value: Heads) -> Heads:
        first = self.puzzle_positions
        cells = F.scaled_dot_product_attention(
            self.grid_rows(query[:, :, first:]),
            self.neighbourhoods(key),
            self.neighbourhoods(value),
            attn_mask=self.visible,
        )
        cells = cells.transpose(1, 2).flatten(2, 3)
        if not first:
            return cells
        return torch.cat((F.scaled_dot_product_attention(query[:, :, :first], key, value), cells), dim=2)

    def grid_rows(self, cells: Heads) -> Float[Tensor, "batch side heads side head_dim"]:
        """Splits the cells into the rows of the grid."""
        return cells.unflatten(2, (self.side, self.side)).transpose(1, 2)

    def neighbourhoods(self, x: Heads) -> Float[Tensor, "batch side heads keys head_dim"]:
        """Returns the keys (or values) of each grid row: puzzle positions, then the rows around it, padded by zeros."""
        first = self.puzzle_positions
        radius = self.window // 2
        cells = F.pad(x[:, :, first:].unflatten(2, (self.side, self.side)), (0, 0, 0, 0, radius, radius))
        nearby = torch.cat([cells[:, :, i : i + self.side] for i in range(self.window)], dim=3)
        puzzle = x[:, :, None, :first].expand(-1, -1, self.side, -1, -1)
        return torch.cat((puzzle, nearby), dim=3).transpose(1, 2)


def visible_cells(window: int, side: int, puzzle_positions: int) -> Bool[Tensor, "side 1 side keys"]:
    """Returns the attention mask of each grid row over its `neighbourhoods`; axis 1 broadcasts over heads."""
    radius = window // 2
    index = torch.arange(side)
    rows = index[:, None] + torch.arange(-radius, radius + 1)
    inside = (rows >= 0) & (rows < side)
    close = (index[:, None] - index).abs() <= radius
    nearby = (inside[:, None, :, None] & close[None, :, None, :]).flatten(2)
    return torch.cat((torch.ones(side, side, puzzle_positions, dtype=torch.bool), nearby), dim=-1)[:, None]
