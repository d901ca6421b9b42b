"""How the attention kernels lay out heads: in groups of 128 channels, as many as a TPU register is wide.

A product with one head multiplies all 128 channels, with zeros for those of the other heads. The matrix unit does that
many anyway, and no register has to be taken apart.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models_torch.layers import round_up
from train_jax.kernels.blocks import Blocks
from train_jax.kernels.registers import LANES, SUBLANES, VECTOR_MEMORY

_MOST_EXAMPLES = 3
"""Examples of a step. Two take 3 % more bundles in the forward pass; four do not fit at the published size."""
Rows = Float[Array, "rows lanes"]
Scores = Float[Array, "keys queries"]


@dataclasses.dataclass(frozen=True)
class Heads:
    """The examples of a step of the kernels, and the width of their heads."""

    blocks: Blocks
    head_dim: int

    @property
    def in_a_group(self) -> int:
        """Heads in 128 channels."""
        return LANES // self.head_dim

    @property
    def scale(self) -> float:
        """The factor on the product of a query and a key."""
        return self.head_dim**-0.5

    def each(self) -> list[tuple[int, int]]:
        """Examples and heads of a group, as pairs."""
        return [(example, head) for example in range(self.blocks.examples) for head in range(self.in_a_group)]

    def example(self, rows: Rows, example: int) -> Rows:
        """The rows of an example."""
        return rows[example * self.blocks.padded : (example + 1) * self.blocks.padded]

    def by_example(self, of_heads: list[Array]) -> list[list[Array]]:
        """What belongs to the pairs of `each`, in a list for each example."""
        return [of_heads[i : i + self.in_a_group] for i in range(0, len(of_heads), self.in_a_group)]

    def masked(self, rows: Rows, dtype: Any, *, halves_first: bool) -> list[Rows]:
        """For each example and head of a group, the rows in `dtype` with zeros in the channels of other heads.

        `halves_first` says that the first halves of all heads come before the second halves.
        """
        return [self._head(rows, *each, halves_first).astype(dtype) for each in self.each()]

    def _head(self, rows: Rows, example: int, head: int, halves_first: bool) -> Rows:
        channel, width = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1), self.head_dim
        if halves_first:
            channel, width = channel & (LANES // 2 - 1), width // 2
        mine = (channel >= head * width) & (channel < (head + 1) * width)
        return jnp.where(mine, self.example(rows, example), 0.0)

    def without_added_keys(self, scores: Scores) -> Scores:
        """The scores, with those of added keys -inf."""
        if self.blocks.padded == self.blocks.positions:
            return scores
        key = jax.lax.broadcasted_iota(jnp.int32, (self.blocks.padded, 1), 0)
        return jnp.where(key < self.blocks.positions, scores, -jnp.inf)


def heads_of(x: Any, qkv: Any, head_dim: int) -> Heads | None:
    """Returns the layout for inputs of the shapes and dtype of `x` and `qkv`; None where the kernels do not serve them.

    They serve bfloat16, hidden sizes of multiples of 128, as many heads for keys as for queries, heads of 16, 32, 64 or
    128 channels, and up to 128 positions. Weights, their float32 gradients and the rows of an example have to fit into
    the vector memory of a TPU v4: at 97 positions, hidden sizes up to 640 do.
    """
    if x.ndim != 3 or x.dtype != jnp.bfloat16 or x.shape[2] % LANES or x.shape[1] > LANES or not x.size:
        return None
    batch, positions, hidden = x.shape
    if qkv.shape != (3 * hidden, hidden) or head_dim not in (16, 32, 64, 128):
        return None
    padded = round_up(positions, SUBLANES)
    weights = 4 * hidden * hidden * (2 + 4)
    row = 2 * 2 * 7 * hidden + 4 * (4 * hidden + 12 * LANES)  # the temporaries as the compiler was seen to need them
    fitting = max(0, VECTOR_MEMORY - weights) // (row * padded)
    if not fitting:
        return None
    examples, steps = _divided(batch, min(fitting, _MOST_EXAMPLES))
    return Heads(Blocks(examples, positions, padded, steps, 1), head_dim)


def _divided(batch: int, most: int) -> tuple[int, int]:
    """Returns examples of a step and steps, such that the busier core computes as few examples as possible.

    The backward pass divides an even number of steps between two cores, and takes one core for an odd number.
    """

    def of_a_core(divided: tuple[int, int]) -> int:
        examples, steps = divided
        return examples * steps // (2 - steps % 2)

    steps = {-(-batch // examples) for examples in range(1, most + 1)}
    return min(((-(-batch // count), count) for count in sorted(steps)), key=of_a_core)
