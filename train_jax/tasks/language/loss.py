"""Sums of the losses of a batch, on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from models_torch.gpt import IGNORED_TARGET


def token_sums(losses: jax.Array, targets: Int[Array, "batch seq"], token_bytes: np.ndarray) -> dict[str, jax.Array]:
    """Returns `loss` and `tokens`, over targets that count, and `nats` and `bytes`, also without special tokens.

    `losses` are flat, one for each target. `token_bytes` is the number of bytes of each token, 0 for special ones. All
    sums are float32; the bytes of a batch are exact up to 2**24.
    """
    flat = targets.reshape(-1)
    counts = flat != IGNORED_TARGET
    sizes = jnp.where(counts, jnp.asarray(token_bytes)[jnp.where(counts, flat, 0)], 0)
    return {
        "loss": jnp.where(counts, losses, 0).sum(),
        "tokens": counts.sum().astype(jnp.float32),
        "nats": jnp.where(sizes > 0, losses, 0).sum(),
        "bytes": sizes.sum().astype(jnp.float32),
    }
