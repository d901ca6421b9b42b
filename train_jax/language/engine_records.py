"""The records in which the engine exchanges rows with `decode`: 32-bit words, so that each is one transfer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from train_jax.language.sampling import Settings

MOST_STOP_TOKENS = 8


class Control(NamedTuple):
    """The input of `decode` for each row of a device; on the host, a row is one record of `control_fields`."""

    position: Int[Array, " slots"]
    """The number of tokens of the row, in the cache."""
    remaining: Int[Array, " slots"]
    """The largest number of further tokens; 0 for a slot without a row."""
    most_probable: Int[Array, " slots"]
    """The number of most probable tokens that are returned; the program computes all or none."""
    biased: Int[Array, " slots"]
    """1 if a bias is added to the logits of the row before a token is chosen; otherwise 0."""
    settings: Settings
    stop: Int[Array, "slots stop_tokens"]
    forced: Int[Array, "slots dispatch"]
    """The next tokens, if they are known; -1 otherwise."""


class Decoded(NamedTuple):
    """The next token of each row; on the host, several tokens of one row."""

    token: Int[Array, " slots"]
    log_prob: Float[Array, " slots"]
    sampling_log_prob: Float[Array, " slots"]
    valid: Bool[Array, " slots"]
    """True if the row had not ended before the token."""
    top_token: Int[Array, "slots most"]
    top_log_prob: Float[Array, "slots most"]
    """The most probable tokens."""


@lru_cache
def control_fields(dispatch: int) -> np.dtype:
    """Returns the type of a record of 32-bit words for each row, which is one transfer to the device."""
    return np.dtype(
        [
            ("position", np.int32),
            ("remaining", np.int32),
            ("most_probable", np.int32),
            ("biased", np.int32),
            ("temperature", np.float32),
            ("top_k", np.int32),
            ("top_p", np.float32),
            ("stream", np.uint32, 2),
            ("stop", np.int32, MOST_STOP_TOKENS),
            ("forced", np.int32, dispatch),
        ]
    )


def control_of(words: Int[Array, "slots words"], dispatch: int) -> Control:
    """Returns the fields of the records of `control_fields`."""
    fields = control_fields(dispatch)
    columns = []
    first = 0
    for each in (fields[name] for name in fields.names or ()):
        last = first + each.itemsize // 4
        column = jax.lax.bitcast_convert_type(words[:, first:last], each.base)
        columns.append(column.reshape(len(words), *each.shape))
        first = last
    position, remaining, most, biased, *settings, stop, forced = columns
    return Control(position, remaining, most, biased, Settings(*settings), stop, forced)


def words_of(decoded: Decoded) -> Int[Array, "fields slots"]:
    """Returns the words of all fields."""
    token, log_prob, sampling_log_prob, valid, top_token, top_log_prob = decoded
    log_probs = jnp.concatenate([jnp.stack([log_prob, sampling_log_prob]), top_log_prob.T])
    words = jnp.stack([token, valid.astype(jnp.int32)]), top_token.T, jax.lax.bitcast_convert_type(log_probs, jnp.int32)
    return jnp.concatenate(words)


def columns_of(words: Int[np.ndarray, "devices dispatch fields slots"]) -> Decoded:
    """Returns the fields of `Decoded`, each as an array (slots of all devices, dispatch), most probable tokens last."""
    columns: Any = words.transpose(0, 3, 1, 2).reshape(-1, words.shape[1], words.shape[2])
    most = columns.shape[-1] // 2 - 2
    log_probs: Any = np.ascontiguousarray(columns[..., 2 + most :]).view(np.float32)
    valid = columns[..., 1].astype(bool)
    top_token = columns[..., 2 : 2 + most]
    return Decoded(columns[..., 0], log_probs[..., 0], log_probs[..., 1], valid, top_token, log_probs[..., 2:])
