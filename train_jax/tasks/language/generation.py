"""Continues prompts with a language model: one compiled program for the prompts, one for each further token.

The module itself runs in both, with a cache of fixed size. Prompts of different lengths form one batch: their tokens
are padded on the right, where causal attention does not see them, and each row decodes at its own position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Integer

import bridge
from models_torch.cached_attention import attention_with_cache
from models_torch.kv_cache import Buffers, CachedModel
from train_jax.core.state import Arrays
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.sampling import Sampling, choose_token, stream_key

# The published modules of 2026 call it; without FlashAttention, it asks a tensor for the position.
bridge.register_function("nanochat.flash_attention:flash_attn.flash_attn_with_kvcache", attention_with_cache)


@dataclasses.dataclass(frozen=True)
class Row:
    """One sample of one prompt."""

    prompt: tuple[int, ...]
    """Its tokens, at least one."""
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The shapes of both programs."""

    rows: int
    """Rows of a batch on all devices together."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    new_tokens: int
    """Tokens after each prompt, at most."""
    capacity: int
    """Tokens in the cache, at least `prompt_tokens`, and at least all of a row but its last one."""


class Generator:
    """A language model that continues prompts; its programs are compiled at the first batch."""

    def __init__(
        self,
        module: Any,
        params: Arrays,
        buffers: Arrays,
        devices: Devices,
        sizes: Sizes,
        *,
        sampling: Sampling,
        seed: int = 0,
        stop: int | None = None,
    ):
        """`module` takes `(idx, kv_cache=…)`; `params` and `buffers` have its names. A row ends before a token `stop`.

        Raises `UserError` if the rows do not divide over the devices.
        """
        devices.local_batch_size(sizes.rows)
        self._fn = bridge.export(CachedModel(module))
        self._devices, self._sizes, self._sampling, self._seed, self._stop = devices, sizes, sampling, seed, stop
        self._state = devices.replicate((_prefixed(params), _prefixed(buffers)))

    @cached_property
    def _prefill(self) -> Any:
        """Maps prompts to their next tokens and to the state of `_decode`."""

        def prefill(params: Arrays, buffers: Arrays, batch: dict[str, jax.Array]) -> dict[str, Any]:
            last = batch["lengths"][:, None] - 1
            (logits, cache), _ = self._fn(
                params,
                buffers,
                batch["prompts"],
                jnp.take_along_axis(batch["prompts"], last, axis=1),
                self._sizes.capacity,
                method="prefill",
                train=False,
            )
            token = self._choose(
                jnp.take_along_axis(logits, last[:, :, None], axis=1)[:, 0], batch["streams"], batch["lengths"]
            )
            state = {"token": token, "position": batch["lengths"], "streams": batch["streams"], "cache": cache}
            return {"token": token, "state": state}

        return self._devices.parallel_map(prefill)

    @cached_property
    def _decode(self) -> Any:
        """Maps the state with the token of every row to the next tokens and to the next state; donates the state."""

        def decode(params: Arrays, buffers: Arrays, state: dict[str, Any]) -> dict[str, Any]:
            def row(token: jax.Array, cache: Buffers, position: jax.Array) -> tuple[jax.Array, Buffers]:
                cache = jax.tree.map(lambda x: x[None], cache)
                (logits, cache), _ = self._fn(
                    params,
                    buffers,
                    token[None, None],
                    cache,
                    position,
                    self._sizes.capacity,
                    method="decode",
                    train=False,
                )
                return logits[0, 0], jax.tree.map(lambda x: x[0], cache)

            logits, cache = jax.vmap(row)(state["token"], state["cache"], state["position"])
            position = state["position"] + 1
            token = self._choose(logits, state["streams"], position)
            next_state = {"token": token, "position": position, "streams": state["streams"], "cache": cache}
            return {"token": token, "state": next_state}

        return self._devices.parallel_map(decode, donate=True)

    def _choose(self, logits: jax.Array, streams: jax.Array, positions: jax.Array) -> jax.Array:
        def choose(logits: jax.Array, stream: jax.Array, position: jax.Array) -> jax.Array:
            return choose_token(logits, stream, position, self._sampling)

        return jax.vmap(choose)(logits, streams, positions)

    def tokens(self, rows: Sequence[Row]) -> Iterator[Integer[np.ndarray, " rows"]]:
        """Yields the next token of every row, until the largest number of tokens.

        Raises `ValueError` for more rows or longer prompts than the generator was made for.
        """
        batch = self._devices.shard(self._devices.split_batch(self._batch(rows)))
        result = self._prefill(*self._state, batch)
        for remaining in reversed(range(self._sizes.new_tokens)):
            token = result["token"]
            if remaining:  # dispatched before the host waits for the token
                result = self._decode(*self._state, result["state"])
            yield self._devices.to_host(token).reshape(-1)[: len(rows)]

    def stream(self, row: Row) -> Iterator[int]:
        """Yields the tokens after one prompt, without the token `stop`."""
        for (token,) in self.tokens([row]):
            if token == self._stop:
                return
            yield int(token)

    def complete(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        """Yields the tokens after each prompt, without the token `stop`; any number of rows, in batches."""
        for first in range(0, len(rows), self._sizes.rows):
            part = rows[first : first + self._sizes.rows]
            completions, ended = [[] for _ in part], np.zeros(len(part), bool)
            for column in self.tokens(part):
                ended |= column == self._stop
                for completion, token, end in zip(completions, column, ended, strict=True):
                    completion += [] if end else [int(token)]
                if ended.all():
                    break
            yield from completions

    def _batch(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """The prompts, padded; rows that are missing repeat the first one."""
        sizes, longest = self._sizes, max(len(row.prompt) for row in rows)
        if len(rows) > sizes.rows or longest > sizes.prompt_tokens:
            raise ValueError(
                f"{len(rows)} prompts of up to {longest} tokens; use at most {sizes.rows} of {sizes.prompt_tokens}"
            )
        filled = [*rows, *[rows[0]] * (sizes.rows - len(rows))]
        prompts = np.zeros((sizes.rows, sizes.prompt_tokens), np.int32)
        for number, row in enumerate(filled):
            prompts[number, : len(row.prompt)] = row.prompt
        return {
            "prompts": prompts,
            "lengths": np.array([len(row.prompt) for row in filled], np.int32),
            "streams": np.stack([stream_key(self._seed, row.prompt, row.sample) for row in filled]),
        }


def _prefixed(arrays: Mapping[str, jax.Array]) -> Arrays:
    """The names that a module has as a part of `CachedModel`."""
    return {f"model.{name}": array for name, array in arrays.items()}
