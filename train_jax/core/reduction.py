"""Sums over all devices, with one collective or one per leaf."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

AXIS = "devices"
"""The mesh axis over which the batch is sharded."""

Reduction = Literal["flat", "leaves"]
"""`flat` sums all leaves as one vector in one collective, which is fastest for small models but copies every gradient.
`leaves` uses one collective per leaf, without the copy, which XLA may combine and overlap; for large models."""


def sum_over_devices(tree: Any, reduction: Reduction = "flat") -> Any:
    """Sums every leaf over all devices. `flat` casts counts to float, which is exact up to 2^24."""
    if reduction == "leaves":
        return jax.tree.map(lambda leaf: jax.lax.psum(_countable(leaf), AXIS), tree)
    leaves, structure = jax.tree.flatten(tree)
    dtype = jnp.result_type(float, *(leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)))
    flat = jax.lax.psum(jnp.concatenate([leaf.astype(dtype).ravel() for leaf in leaves]), AXIS)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = [
        flat[end - leaf.size : end].reshape(leaf.shape).astype(_countable(leaf).dtype)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def _countable(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.int32) if leaf.dtype == bool else leaf
