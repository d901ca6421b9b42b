"""Keys and values of earlier tokens in buffers of fixed size, and a language model that returns them with its logits.

The caches have the methods of nanochat's, which a model calls: `insert_kv` of November 2025, or `get_layer_cache` and
`advance` of July 2026. A causal model of Hugging Face gets the caches of its own library. Buffers do not grow, so that
all calls after the first one have the same shapes.
"""

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Logits = Float[Tensor, "batch seq vocab_size"]


class Buffers(NamedTuple):
    """The values that are kept from token to token, for each layer and for the last token."""

    keys: list[Tensor]
    """Keys by layer: (batch, heads, capacity, head_dim), or for models of 2026 (batch, capacity, heads, head_dim)."""
    values: list[Tensor]
    previous: Float[Tensor, "batch 1 n_embd"] | None
    """The embedding of the last token, if the model keeps it."""


def positions_of(model: nn.Module) -> int:
    """Returns the positions of a model: `max_positions`, or the length of its rotary table `cos`.

    Those of a model of Hugging Face are in its configuration. Raises ValueError for a model without the caches here.
    """
    if hasattr(model, "max_positions"):
        return int(model.max_positions)  # pyright: ignore[reportArgumentType]
    if _takes(model, "past_key_values"):
        return int(model.config.max_position_embeddings)  # pyright: ignore
    if not isinstance(tables := getattr(model, "cos", None), Tensor):
        raise ValueError(f"{type(model).__name__} has no cache of keys and values; use a model with that of nanochat")
    return tables.shape[1]


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


@dataclass
class PromptCache:
    """An empty cache, for one call: the keys and values that it is given, by layer."""

    model: Any
    """The model of the call, which determines the sizes and the dtype of the buffers that it requests."""
    cache_seqlens: Int[Tensor, " batch"]
    """Always zero."""
    seq: int
    prev_embedding: Tensor | None = None
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    axis: int = 2
    """The dimension of the tokens."""

    @property
    def n_layers(self) -> int:
        return self.model.config.n_layer

    def get_pos(self) -> int:
        """Returns 0."""
        return 0

    def insert_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of a layer, (batch, heads, tokens, head_dim), and returns them."""
        self.layers[layer] = key, value
        return key, value

    def get_layer_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns buffers (batch, tokens, heads, head_dim) with room for the tokens of the call."""
        self.axis = 1
        config = self.model.config
        tables = self.model.cos
        shape = self.cache_seqlens.shape[0], self.seq, config.n_kv_head, config.n_embd // config.n_head
        self.layers[layer] = tables.new_zeros(shape), tables.new_zeros(shape)
        return self.layers[layer]

    def advance(self, num_tokens: int) -> None:
        """Does nothing: there is no further call."""


@dataclass
class StaticCache:
    """Keys and values in buffers of fixed size, by layer; `position` tokens are in them, as many in every row."""

    keys: list[Tensor]
    values: list[Tensor]
    position: Int[Tensor, ""]
    prev_embedding: Tensor | None = None

    @property
    def n_layers(self) -> int:
        return len(self.keys)

    @property
    def cache_seqlens(self) -> Int[Tensor, " batch"]:
        """The number of tokens in each row."""
        return self.position.int().expand(self.keys[0].shape[0])

    def get_pos(self) -> Tensor:
        """Returns the number of tokens in the cache."""
        return self.position

    def insert_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes keys and values, (batch, heads, tokens, head_dim), after the tokens of a layer; returns all keys and
        values of the layer.

        The tokens count once the last layer has them.
        """
        first = self.position
        last = self.position + key.shape[2]
        self.keys[layer][:, :, first:last] = key
        self.values[layer][:, :, first:last] = value
        if layer == len(self.keys) - 1:
            self.position = last
        return self.keys[layer][:, :, :last], self.values[layer][:, :, :last]

    def get_layer_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the buffers of a layer, (batch, capacity, heads, head_dim), to which the model writes."""
        return self.keys[layer], self.values[layer]

    def advance(self, num_tokens: int) -> None:
        """Counts tokens that were written to the buffers of all layers."""
        self.position = self.position + num_tokens


def cached_model(model: nn.Module) -> "CachedModel":
    """Returns a model with `prefill` and `decode`; `model` takes `kv_cache`, or `past_key_values` of Hugging Face."""
    return CachedCausalLM(model) if _takes(model, "past_key_values") else CachedModel(model)


class CachedModel(nn.Module):
    """A language model whose cache is an argument and a result: `prefill` for a prompt, `decode` for one more token."""

    def __init__(self, model: Any):
        """`model` is called as `model(idx, kv_cache=…)`, like nanochat's."""
        super().__init__()
        self.model = model

    def prefill(
        self,
        idx: Int[Tensor, "batch seq"],
        last: Int[Tensor, "batch 1"],
        capacity: int,
        instruction: Bool[Tensor, "batch seq"] | None = None,
    ) -> tuple[Logits, Buffers]:
        """Returns the logits of prompts, and buffers for `capacity` tokens with their keys and values.

        `last` is the last token of each prompt, after which `idx` may be padded. `instruction` marks prompts for models
        that read prompts in both directions.
        """
        logits, cache = self._call(idx, **({} if instruction is None else {"instruction": instruction}))
        previous = None
        if cache.prev_embedding is not None:  # the padding set it; XLA omits the unused results
            previous = self.previous(last)
        padding = (0, 0) * (3 - cache.axis) + (0, capacity - idx.shape[1])
        pairs = [cache.layers[layer] for layer in sorted(cache.layers)]
        keys, values = ([F.pad(pair[side], padding) for pair in pairs] for side in (0, 1))
        return logits, Buffers(keys, values, previous)

    def _call(self, idx: Int[Tensor, "batch seq"], **options: Tensor) -> tuple[Logits, PromptCache]:
        seqlens = torch.zeros(idx.shape[0], dtype=torch.int32, device=idx.device)
        cache = PromptCache(self.model, seqlens, idx.shape[1])
        return self.model(idx, kv_cache=cache, **options), cache

    def decode(
        self, idx: Int[Tensor, "batch seq"], buffers: Buffers, position: Int[Tensor, ""], capacity: int
    ) -> tuple[Logits, Buffers]:
        """Returns the logits of a token after `position` others, and the buffers with its key and value.

        `extend` gives it several tokens. At least one token is before them and the buffers have places for them; other
        positions are clamped to that.
        """
        keys, values, previous = buffers
        cache = StaticCache(list(keys), list(values), torch.clamp(position, 1, capacity - idx.shape[1]), previous)
        return self.model(idx, kv_cache=cache), Buffers(cache.keys, cache.values, cache.prev_embedding)

    def extend(
        self,
        idx: Int[Tensor, "batch seq"],
        around: Int[Tensor, "batch 2"],
        buffers: Buffers,
        position: Int[Tensor, ""],
        capacity: int,
    ) -> tuple[Logits, Buffers]:
        """Returns the logits of several tokens after `position` others, and the buffers with their keys and values.

        `around` are the token before them and the last of them, after which `idx` may be padded. The buffers have
        places for all of `idx`. `continues` says whether a model computes this.
        """
        keys, values, previous = buffers
        if previous is not None:
            previous = self.previous(around[:, :1])
        logits, buffers = self.decode(idx, Buffers(keys, values, previous), position, capacity)
        if previous is not None:
            buffers = buffers._replace(previous=self.previous(around[:, 1:]))
        return logits, buffers

    def previous(self, last: Int[Tensor, "batch 1"]) -> Tensor | None:
        """Returns what is kept of a last token besides its keys and values."""
        return self._call(last)[1].prev_embedding


def continues(model: nn.Module, buffers: Buffers) -> bool:
    """Returns True if a model computes several tokens after others.

    The published models of 2026 use the embedding that is kept of the last token for a single token only.
    """
    return buffers.previous is None or getattr(model, "reads_previous_of_many", False)


class CachedCausalLM(CachedModel):
    """A causal language model of Hugging Face, whose layers all keep every token."""

    def prefill(
        self,
        idx: Int[Tensor, "batch seq"],
        last: Int[Tensor, "batch 1"],
        capacity: int,
        instruction: Bool[Tensor, "batch seq"] | None = None,
    ) -> tuple[Logits, Buffers]:
        options = {} if instruction is None else {"token_type_ids": instruction.int()}
        cache = importlib.import_module("transformers.cache_utils").DynamicCache()
        logits = self.model(idx, past_key_values=cache, use_cache=True, **options).logits
        padding = 0, 0, 0, capacity - idx.shape[1]
        keys, values = ([F.pad(getattr(layer, side), padding) for layer in cache.layers] for side in ("keys", "values"))
        return logits, Buffers(keys, values, None)

    def decode(
        self, idx: Int[Tensor, "batch 1"], buffers: Buffers, position: Int[Tensor, ""], capacity: int
    ) -> tuple[Logits, Buffers]:
        caches = importlib.import_module("transformers.cache_utils")
        layers = [caches.StaticLayer(capacity) for _ in buffers.keys]
        for layer, layer.keys, layer.values in zip(layers, buffers.keys, buffers.values, strict=True):
            layer.cumulative_length = torch.clamp(position, 1, capacity - idx.shape[1])
            layer.dtype = layer.keys.dtype
            layer.device = layer.keys.device
            layer.is_initialized = True
        logits = self.model(idx, past_key_values=caches.Cache(layers=layers), use_cache=True).logits
        return logits, Buffers([layer.keys for layer in layers], [layer.values for layer in layers], None)
