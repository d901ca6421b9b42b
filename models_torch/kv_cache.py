"""Keys and values of earlier tokens in buffers of fixed size, and a language model that returns them with its logits.

The caches have the methods of nanochat's, which a model calls. Buffers do not grow, so that all calls after the first
one have the same shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

Logits = Float[Tensor, "batch seq vocab_size"]
Buffers = Sequence[Float[Tensor, "batch heads capacity head_dim"]]
"""One buffer for each layer."""


@dataclass
class PromptCache:
    """An empty cache, for one call: the keys and values that it is given, by layer."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def get_pos(self) -> int:
        """Returns 0."""
        return 0

    def insert_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps (batch, heads, tokens, head_dim) of a layer and returns them."""
        self.layers[layer] = key, value
        return key, value


@dataclass
class StaticCache:
    """Keys and values in buffers of fixed size, by layer; `position` tokens are in them, as many in every row."""

    keys: list[Tensor]
    values: list[Tensor]
    position: Int[Tensor, ""]

    def get_pos(self) -> Tensor:
        """Returns the number of tokens in the cache."""
        return self.position

    def insert_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes (batch, heads, tokens, head_dim) after the tokens of a layer; returns all keys and values of it.

        The tokens count once the last layer has them.
        """
        first, last = self.position, self.position + key.shape[2]
        self.keys[layer][:, :, first:last] = key
        self.values[layer][:, :, first:last] = value
        if layer == len(self.keys) - 1:
            self.position = last
        return self.keys[layer][:, :, :last], self.values[layer][:, :, :last]


class CachedModel(nn.Module):
    """A language model whose cache is an argument and a result: `prefill` for a prompt, `decode` for one more token."""

    def __init__(self, model: nn.Module):
        """`model` takes `(idx, kv_cache=…)`, as nanochat's."""
        super().__init__()
        self.model = model

    def prefill(self, idx: Int[Tensor, "batch seq"], capacity: int) -> tuple[Logits, list[Tensor], list[Tensor]]:
        """Returns the logits of prompts, and buffers for `capacity` tokens with their keys and values."""
        cache = PromptCache()
        logits = self.model(idx, kv_cache=cache)
        padding = (0, 0, 0, capacity - idx.shape[1])
        pairs = [cache.layers[layer] for layer in sorted(cache.layers)]
        return logits, [F.pad(key, padding) for key, _ in pairs], [F.pad(value, padding) for _, value in pairs]

    def decode(
        self, idx: Int[Tensor, "batch 1"], keys: Buffers, values: Buffers, position: Int[Tensor, ""]
    ) -> tuple[Logits, list[Tensor], list[Tensor]]:
        """Returns the logits of a token after `position` others, and the buffers with its key and value.

        At least one token is before it and the buffers have a place for it; other positions are clamped to that.
        """
        cache = StaticCache(list(keys), list(values), torch.clamp(position, 1, keys[0].shape[2] - 1))
        return self.model(idx, kv_cache=cache), cache.keys, cache.values
