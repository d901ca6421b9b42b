"""What the Pallas kernels share: sizes of a TPU, products, the gate of an MLP."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Latent = Float[Array, "batch positions hidden"]

LANES, SUBLANES = 128, 8
"""A vector register of a TPU holds 8 rows of 128 numbers of 32 bits."""
VECTOR_MEMORY = 15 * 2**20
"""Bytes of a TPU v4's vector memory that a kernel may plan with; it has 16 MiB."""


def once(shape: tuple[int, ...], at: tuple[int, ...] | Callable[..., tuple[Any, ...]]) -> Any:
    """A block with one buffer, for what stays in the vector memory; `at` is its place or a function of the step."""
    from jax.experimental import pallas as pl

    return pl.BlockSpec(shape, at if callable(at) else lambda *_: at, pipeline_mode=pl.Buffered(1))


def dot(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """The product of bfloat16 arrays that contracts an axis of each, with a float32 result.

    Mosaic refuses them with a higher precision, which the bridge asks for as PyTorch does for float32.
    """
    axes = (((of_a,), (of_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)


def sigmoid(x: Array) -> Array:
    """By `tanh`, which a TPU computes in one instruction; `jax.nn.sigmoid` also divides."""
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
