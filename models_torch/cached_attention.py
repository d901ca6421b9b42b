"""Causal attention with a sliding window, without and with a buffer of earlier keys and values.

`attention_with_cache` takes what `flash_attn_with_kvcache` of FlashAttention takes, and can be traced: no shape depends
on how much of the buffer is filled.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

Heads = Float[Tensor, "batch seq heads head_dim"]


class KVCache(Protocol):
    """Keys and values of earlier positions, with the methods and attributes of the published cache."""

    n_layers: int
    cache_seqlens: Int[Tensor, " batch"]
    """Number of positions in the cache for each row."""
    prev_embedding: Float[Tensor, "batch 1 n_embd"] | None
    """The normalized embedding of the last token in the cache."""

    def get_pos(self) -> int:
        """Returns the number of positions in the cache, the same in every row."""
        ...

    def get_layer_cache(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Returns the buffers of a layer, (batch, capacity, heads, head_dim), to which it writes."""
        ...

    def advance(self, num_tokens: int) -> None:
        """Counts tokens that were written to the buffers of all layers."""
        ...


def windowed_attention(query: Heads, key: Heads, value: Heads, window: int) -> Heads:
    """Attends to the position itself and to at most `window` positions before it; -1 for all positions before it.

    Several query heads share a key/value head if there are fewer of them.
    """
    seq = query.shape[1]
    mask = None
    if 0 <= window < seq:
        mask = torch.ones(seq, seq, dtype=torch.bool, device=query.device).tril().triu(-window)
    return _attention(query, key, value, mask)


def attention_with_cache(
    q: Heads,
    k_cache: Float[Tensor, "batch capacity kv_heads head_dim"],
    v_cache: Float[Tensor, "batch capacity kv_heads head_dim"],
    k: Float[Tensor, "batch seq kv_heads head_dim"],
    v: Float[Tensor, "batch seq kv_heads head_dim"],
    *,
    cache_seqlens: Int[Tensor, " batch"],
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Heads:
    """Writes `k` and `v` after the first `cache_seqlens` positions of each row, and attends to all filled positions.

    The buffers are changed in place and must be finite. `window_size[0]` is the number of positions before its own that
    a query attends to, -1 for all. Raises ValueError without `causal`.

    References:
      flash_attn_with_kvcache in https://github.com/Dao-AILab/flash-attention
    """
    if not causal:
        raise ValueError("attention_with_cache has causal False; use causal=True")
    seq = q.shape[1]
    capacity = k_cache.shape[1]
    window = window_size[0]
    if seq == capacity:  # then nothing was in the buffers
        k_cache.copy_(k)
        v_cache.copy_(v)
        return windowed_attention(q, k, v, window)
    places = cache_seqlens[:, None].long() + torch.arange(seq, device=q.device)
    rows = torch.arange(q.shape[0], device=q.device)[:, None]
    k_cache[rows, places] = k
    v_cache[rows, places] = v
    distances = places[:, :, None] - torch.arange(capacity, device=q.device)
    mask = distances >= 0
    if window >= 0:
        mask = mask & (distances <= window)
    return _attention(q, k_cache, v_cache, mask[:, None])


def _attention(query: Heads, key: Heads, value: Heads, mask: Tensor | None) -> Heads:
    attended = F.scaled_dot_product_attention(
        *(heads.transpose(1, 2) for heads in (query, key, value)),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.transpose(1, 2)
