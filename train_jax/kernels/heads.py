"""How the kernels of attention lay out heads: 128 channels at a time, which a register of a TPU holds, are a group.

A product with the channels of one head multiplies all 128 and takes zeros for those of the others. The matrix unit does
that many in any case, and no register is taken apart.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from models_torch.layers import round_up
from train_jax.kernels.blocks import Blocks
from train_jax.kernels.registers import LANES, SUBLANES, VECTOR_MEMORY

_MOST_EXAMPLES = 3
Rows = Float[Array, "rows lanes"]
Keys = Float[Array, "keys queries"]


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
        """What multiplies the product of a query and a key."""
        return self.head_dim**-0.5

    def each(self) -> list[tuple[int, int]]:
        """Examples and heads of a group, as pairs."""
        return [(example, head) for example in range(self.blocks.examples) for head in range(self.in_a_group)]

    def example(self, rows: Rows, example: int) -> Rows:
        """The rows of an example."""
        return rows[example * self.blocks.padded : (example + 1) * self.blocks.padded]

    def head(self, rows: Rows, example: int, head: int, *, by_halves: bool) -> Rows:
        """The rows of an example, with zeros in the channels of other heads than `head`.

        `by_halves` says that the first halves of all heads come before the second.
        """
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        if by_halves:
            of_head = jax.lax.div(jax.lax.rem(lane, LANES // 2), self.head_dim // 2)
        else:
            of_head = jax.lax.div(lane, self.head_dim)
        return jnp.where(of_head == head, self.example(rows, example), 0.0)

    def without_added_keys(self, scores: Keys) -> Keys:
        """The scores, with those of added keys -inf."""
        if self.blocks.padded == self.blocks.positions:
            return scores
        last = self.blocks.padded - SUBLANES
        there: Bool[Array, "sublanes 1"] = (
            jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, 1), 0) < self.blocks.positions - last
        )
        return jnp.concatenate([scores[:last], jnp.where(there, scores[last:], -jnp.inf)])


def heads_of(x: Any, qkv: Any, head_dim: int) -> Heads | None:
    """Returns the layout for inputs of the shapes and dtype of `x` and `qkv`; None where the kernels do not serve them.

    They serve bfloat16, hidden sizes of multiples of 128, as many heads for keys as for queries, heads of 16, 32, 64 or
    128 channels, up to 128 positions, and weights that fit into the vector memory of a TPU v4.
    """
    if x.ndim != 3 or x.dtype != jnp.bfloat16 or x.shape[2] % LANES or x.shape[1] > LANES:
        return None
    batch, positions, hidden = x.shape
    if qkv.shape != (3 * hidden, hidden) or head_dim not in (16, 32, 64, 128):
        return None
    padded = round_up(positions, SUBLANES)
    weights = 4 * hidden * hidden * (2 + 4)
    row = 2 * 2 * 7 * hidden + 4 * (4 * hidden + 12 * LANES)  # the temporaries as the compiler was seen to need them
    fitting = max(0, VECTOR_MEMORY - weights) // (row * padded)
    examples = min(fitting, _MOST_EXAMPLES, batch)
    return Heads(Blocks(examples, positions, padded, -(-batch // examples), 1), head_dim) if examples else None
