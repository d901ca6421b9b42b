"""Chooses the next token of every row, by traced settings of each row.

The noise belongs to a row's stream, a position and a token, so a row's tokens do not depend on the rows beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

_GENERATOR = "threefry2x32"
MOST_PROBABLE = 20
"""The largest number of most probable tokens that are returned with a chosen one."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Rules for the choice of a token. The limits apply in this order: temperature, `top_k`, `top_p`."""

    temperature: float = 1.0
    """Divides the logits; 0 chooses the most probable token."""
    top_k: int = 0
    """Draw from this many of the most probable tokens, and from those as probable as the last; 0 for all."""
    top_p: float = 1.0
    """Draw from the most probable tokens that together have this probability."""


GREEDY = Sampling(temperature=0.0)


class Settings(NamedTuple):
    """The arrays of `Sampling`, and the stream, of each row."""

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    stream: UInt32[Array, "rows 2"]


class Choice(NamedTuple):
    """A token of each row with two log-probabilities of it."""

    token: Int[Array, " rows"]
    log_prob: Float[Array, " rows"]
    """Log-probability under the softmax of the logits."""
    sampling_log_prob: Float[Array, " rows"]
    """Log-probability under the distribution of the draw: after temperature, `top_k` and `top_p`; 0 if greedy."""


def stream_key(seed: int, prompt: Sequence[int], sample: int) -> UInt32[np.ndarray, " 2"]:
    """Returns the key data of a sample of a prompt.

    It depends on the tokens of the prompt and not on its place among others, so that a sample does not depend on the
    batch. Equal prompts have equal samples.
    """
    content = b"".join(number.to_bytes(8, "little") for number in (seed, sample, *prompt))
    return np.frombuffer(hashlib.sha256(content).digest()[:8], "<u4").astype(np.uint32)


def choose_tokens(
    logits: Float[Array, "rows vocab_size"],
    settings: Settings,
    positions: Int[Array, " rows"],
    forced: Int[Array, " rows"],
    biased: Float[Array, "rows vocab_size"] | None = None,
) -> Choice:
    """Returns the token at each row's position, counted from the beginning of the prompt.

    That is `forced` where it is not negative. It is chosen by `biased`, by default by the logits. Limits are computed
    if any row has `top_k` or `top_p`, and random numbers if any row has a temperature.
    """
    logits = logits.astype(jnp.float32)
    limited = (settings.top_k > 0) | (settings.top_p < 1)
    drawn = settings.temperature > 0
    case = jnp.where(jnp.any(drawn & limited), 2, jnp.where(jnp.any(drawn), 1, 0))
    chosen_by = logits if biased is None else biased
    kept, noise = jax.lax.switch(case, (_greedy, _unlimited, _limited), chosen_by, settings, positions)
    token = jnp.where(forced >= 0, forced, jnp.argmax(kept + noise, axis=-1).astype(jnp.int32))
    sampled = _log_prob(kept, token)
    return Choice(token, _log_prob(logits, token), jnp.where(drawn, sampled, jnp.where(forced >= 0, sampled, 0.0)))


def most_probable(
    logits: Float[Array, "rows vocab_size"], wanted: Bool[Array, " rows"]
) -> tuple[Int[Array, "rows most"], Float[Array, "rows most"]]:
    """Returns the most probable tokens of each row, up to `MOST_PROBABLE`, and their log-probabilities.

    They are computed if any row wants them, and are 0 otherwise.
    """
    count = min(MOST_PROBABLE, logits.shape[-1])

    def largest(logits: Array) -> tuple[Array, Array]:
        values, tokens = jax.lax.top_k(logits, count)
        return tokens.astype(jnp.int32), values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def nothing(logits: Array) -> tuple[Array, Array]:
        shape = len(logits), count
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return jax.lax.cond(jnp.any(wanted), largest, nothing, logits.astype(jnp.float32))


def _log_prob(logits: Float[Array, "rows vocab_size"], token: Int[Array, " rows"]) -> Float[Array, " rows"]:
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _greedy(logits: Array, settings: Settings, positions: Array) -> tuple[Array, Array]:
    return logits, jnp.zeros_like(logits)


def _unlimited(logits: Array, settings: Settings, positions: Array) -> tuple[Array, Array]:
    def noise_of(stream: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(stream, impl=_GENERATOR), position)
        return jax.random.gumbel(key, logits.shape[1:])

    drawn = (settings.temperature > 0)[:, None]
    divided = logits / jnp.where(drawn, settings.temperature[:, None], 1.0)
    return divided, jnp.where(drawn, jax.vmap(noise_of)(settings.stream, positions), 0.0)


def _limited(logits: Array, settings: Settings, positions: Array) -> tuple[Array, Array]:
    divided, noise = _unlimited(logits, settings, positions)
    order = _ordered(divided)
    top_k = jnp.where(settings.top_k > 0, settings.top_k, logits.shape[-1])[:, None]
    kept = order >= _largest(lambda bound: jnp.sum(order >= bound, axis=-1, keepdims=True) >= top_k, len(logits))
    shares = jax.nn.softmax(jnp.where(kept, divided, -jnp.inf))
    top_p = jnp.where(settings.top_p < 1, settings.top_p, jnp.inf)[:, None]
    kept &= order >= _largest(
        lambda bound: jnp.sum(jnp.where(order >= bound, shares, 0.0), axis=-1, keepdims=True) >= top_p, len(logits)
    )
    return jnp.where(kept, divided, -jnp.inf), noise


def _ordered(x: Float[Array, "rows vocab_size"]) -> UInt32[Array, "rows vocab_size"]:
    """Returns integers in the order of the floats, equal ones for equal floats."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # maps -0.0 to 0.0
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(holds: Callable[[Array], Array], rows: int) -> UInt32[Array, "rows 1"]:
    """Returns the largest integer of each row for which `holds`, as for all smaller ones; 0 if it holds for none.

    Finding a threshold takes 32 sums over the vocabulary, which is faster than a sort.
    """

    def set_bit(number: Array, bound: Array) -> Array:
        higher = bound | (jnp.uint32(1 << 31) >> number.astype(jnp.uint32))
        return jnp.where(holds(higher), higher, bound)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros((rows, 1), jnp.uint32))
