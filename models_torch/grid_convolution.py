"""A convolution over the cells of a grid instead of attention, for rules that hold between neighbouring cells."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from models_torch.layers import CastLinear, CosSin, Latent, truncated_normal_


class GridConvolution(nn.Module):
    """Mixes the cells of a square grid, which follow `puzzle_positions` positions in row-major order.

    A cell gets the convolution of the `window` x `window` cells around it, with zeros outside the grid. Every position
    gets a projection of the mean of all positions, by which the halting head, which reads the first one, sees the grid.
    """

    def __init__(self, hidden_size: int, *, window: int, side: int, puzzle_positions: int):
        """`window` is the side of the window in cells, an odd number; `side` is the side of the grid."""
        super().__init__()
        self.side = side
        self.puzzle_positions = puzzle_positions
        deviation = (hidden_size * window**2) ** -0.5
        self.weight = nn.Parameter(truncated_normal_(torch.empty(hidden_size, hidden_size, window, window), deviation))
        self.mean_proj = CastLinear(hidden_size, hidden_size)

    def forward(self, x: Latent, cos_sin: CosSin | None) -> Latent:
        """Returns the update of each position; the positions of the rotary encoding are not used."""
        puzzle, cells = x.split((self.puzzle_positions, self.side**2), dim=1)
        mean = self.mean_proj(x.mean(dim=1, keepdim=True))
        return torch.cat((mean.expand_as(puzzle), self.convolved(cells) + mean), dim=1)

    def convolved(self, cells: Float[Tensor, "batch cells hidden"]) -> Float[Tensor, "batch cells hidden"]:
        grid = cells.transpose(1, 2).unflatten(2, (self.side, self.side))
        return F.conv2d(grid, self.weight.to(cells.dtype), padding="same").flatten(2).transpose(1, 2)
