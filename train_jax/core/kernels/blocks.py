"""Common parts of the Pallas kernels: sizes of a TPU, products, the gate of an MLP, the rows of a step.

A step of the kernels over channels computes whole examples, or a part of the positions of one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models_torch.layers import round_up

Latent = Float[Array, "batch positions hidden"]

LANES = 128
SUBLANES = 8
"""A vector register of a TPU holds 8 rows of 128 numbers of 32 bits."""
VECTOR_MEMORY = 15 * 2**20
"""Bytes of a TPU v4's vector memory that a kernel may plan with; it has 16 MiB."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The part of the input that a step of a kernel computes: some whole examples, or some positions of one example.

    A TPU holds the positions of an example in registers of 8 rows. The kernels keep the rows that this adds, as zeros.
    """

    examples: int
    positions: int
    padded: int
    """Positions of a block with the added rows."""
    steps: int
    of_an_example: int
    """Number of steps in which one example is computed; 1 if a step has whole examples."""

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.examples * self.padded


def blocks_of(x: Any, width: int) -> Blocks | None:
    """Returns the blocks for inputs of the shape and dtype of `x`; None where the kernels do not serve them.

    They serve bfloat16, hidden sizes of multiples of 128, widths of multiples of 256, and weights that fit into the
    vector memory of a TPU v4.
    """
    if x.ndim != 3 or x.dtype != jnp.bfloat16 or x.shape[2] % LANES or width % (2 * LANES):
        return None
    batch, positions, hidden = x.shape
    most = _most_rows(hidden, width)
    padded = round_up(positions, SUBLANES)
    if padded <= most:
        steps = -(-batch // (most // padded))
        return Blocks(-(-batch // steps), positions, padded, steps, 1)
    if most < 2 * SUBLANES:
        return None
    parts = -(-positions // most)
    part = round_up(-(-positions // parts), 2 * SUBLANES)
    return Blocks(1, part, part, batch * parts, parts)


def place_of(blocks: Blocks) -> Callable[[Any], tuple[Any, Any, int]]:
    """Returns a function that maps a step to its block of `(batch, positions, hidden)`."""
    if blocks.of_an_example == 1:
        return lambda i: (i, 0, 0)
    return lambda i: (jax.lax.div(i, blocks.of_an_example), jax.lax.rem(i, blocks.of_an_example), 0)


def rows_of(blocks: Blocks, step: Any, ref: Any, rows_ref: Any, shape: tuple[int, ...]) -> Float[Array, "rows hidden"]:
    """Returns the block in `ref` by way of `rows_ref`, every example from a multiple of 8 on, with zeros behind it.

    Examples and positions outside of `shape`, which have any content, are zeros as well.
    """
    batch, positions, hidden = shape
    for example in range(blocks.examples):
        values = ref[example].astype(jnp.float32)
        if batch % blocks.examples:  # the last block is larger than the remaining examples
            values = jnp.where(step * blocks.examples + example < batch, values, 0.0)
        if positions % blocks.positions:  # the last block of an example is larger than its remaining positions
            first = jax.lax.rem(step, blocks.of_an_example) * blocks.positions
            place = jax.lax.broadcasted_iota(jnp.int32, (blocks.positions, 1), 0) + first
            values = jnp.where(place < positions, values, 0.0)
        start = example * blocks.padded
        rows_ref[start : start + blocks.positions, :] = values
        if blocks.padded > blocks.positions:
            behind = jnp.zeros((blocks.padded - blocks.positions, hidden), jnp.float32)
            rows_ref[start + blocks.positions : start + blocks.padded, :] = behind
    return rows_ref[...]


def write_rows(blocks: Blocks, rows: Array, ref: Any) -> None:
    """Writes the rows of every example into `ref`."""
    for example in range(blocks.examples):
        start = example * blocks.padded
        ref[example] = rows[start : start + blocks.positions].astype(ref.dtype)


def chunk_of(width: int) -> int:
    """Returns how many hidden activations of a row the forward pass computes at a time."""
    return next(size for size in (512, 256, LANES) if width % size == 0)


def _most_rows(hidden: int, width: int) -> int:
    """Returns how many rows of a step fit into the vector memory in both passes."""
    weights = 3 * hidden * width * 2
    row = 2 * 2 * (2 * hidden + 2 * width + 2 * LANES) + _temporaries(hidden, chunk_of(width))
    half = width // 2
    weights_of_half = 3 * hidden * half * (2 + 4)
    row_of_half = 2 * 2 * (4 * hidden + 2 * half + 2 * LANES) + _temporaries(3 * hidden, LANES)
    return min(424, (VECTOR_MEMORY - weights) // row, (VECTOR_MEMORY - weights_of_half) // row_of_half)


def _temporaries(hidden: int, chunk: int) -> int:
    """Returns the bytes of a row that are neither an argument nor a result, as measured with the compiler."""
    return 4 * (3 * hidden // 2 + 4 * chunk)


def once(shape: tuple[int, ...], at: tuple[int, ...] | Callable[..., tuple[Any, ...]]) -> Any:
    """Returns a block with one buffer that stays in the vector memory; `at` is its place, or maps a step to it."""
    from jax.experimental import pallas as pl

    return pl.BlockSpec(shape, at if callable(at) else lambda *_: at, pipeline_mode=pl.Buffered(1))


def dot(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """Returns the product of bfloat16 arrays that contracts an axis of each, with a float32 result.

    Mosaic refuses them with a higher precision, which the bridge asks for as PyTorch does for float32.
    """
    axes = (((of_a,), (of_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)


def sigmoid(x: Array) -> Array:
    """Returns the sigmoid, computed by `tanh`, which is one instruction of a TPU; `jax.nn.sigmoid` also divides."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


def gated(gate: Array, up: Array) -> Array:
    """Returns `silu(gate) * up`."""
    return gate * sigmoid(gate) * up


def gated_gradients(gate: Array, up: Array, by_gated: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """Returns the gradients of `silu(gate) * up` by `up` and by `gate` in `dtype`, and `silu(gate)`."""
    of_gate = sigmoid(gate)
    silu = gate * of_gate
    by_up = (by_gated * silu).astype(dtype)
    by_gate = (by_gated * up * (of_gate + silu * (1 - of_gate))).astype(dtype)
    return by_up, by_gate, silu
