"""Chooses the next token from logits: greedy, or a draw that belongs to a seed, a prompt, a sample and a position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, UInt32

_GENERATOR = "threefry2x32"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose a token. The limits apply in this order: temperature, `top_k`, `top_p`."""

    temperature: float = 1.0
    """Divides the logits; 0 chooses the most probable token."""
    top_k: int = 0
    """Draw from this many of the most probable tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the most probable tokens that together have this probability."""


def stream_key(seed: int, prompt: Sequence[int], sample: int) -> UInt32[np.ndarray, " 2"]:
    """Returns the key data of a sample of a prompt.

    It depends on the tokens of the prompt and not on its place among others, so that a sample does not depend on the
    batch. Equal prompts have equal samples.
    """
    content = b"".join(number.to_bytes(8, "little") for number in (seed, sample, *prompt))
    return np.frombuffer(hashlib.sha256(content).digest()[:8], "<u4").astype(np.uint32)


def choose_token(
    logits: Float[Array, " vocab_size"],
    stream: UInt32[Array, " 2"],
    position: Integer[Array, ""],
    sampling: Sampling,
) -> Integer[Array, ""]:
    """Returns the token at a position, counted from the beginning of the prompt."""
    logits = logits.astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.wrap_key_data(stream, impl=_GENERATOR), position)
    logits = logits / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    logits, tokens = jax.lax.top_k(logits, min(sampling.top_k or logits.size, logits.size))
    probabilities = jax.nn.softmax(logits)
    before = jnp.cumsum(probabilities) - probabilities
    logits = jnp.where((before < sampling.top_p) | (jnp.arange(logits.size) == 0), logits, -jnp.inf)
    return tokens[jax.random.categorical(key, logits)].astype(jnp.int32)
