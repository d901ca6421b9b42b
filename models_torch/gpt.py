"""A decoder-only language model with the parameter names of nanochat, as of November 2025.

Rotary positions, queries and keys normalized after the rotation, RMS norms without weights (also after the embedding),
a squared ReLU, no biases, a head of its own with logits capped at +-15, and fewer key/value heads if `n_kv_head` is
smaller. State dicts are interchangeable with the published module, in both directions.

Weights are float32. With `forward_dtype` bfloat16 the forward pass runs under autocast, as in the published scripts.

References:
  nanochat/gpt.py at 4a87a0d, https://github.com/karpathy/nanochat
  Yang et al., "A Spectral Condition for Feature Learning", 2023, https://arxiv.org/abs/2310.17813 (initialization)
"""

from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from models_torch.config import Channels, Heads, Layers, ModelConfig, SeqLen, VocabSize
from models_torch.ranges import Choices

IGNORED_TARGET = -1
"""Targets with this value have no loss."""
_ROTARY_BASE = 10_000
_LOGIT_CAP = 15
_SPARE_POSITIONS = 10
"""The rotary tables have this many times `seq_len` positions, for generation beyond the training length."""

CosSin = tuple[Float[Tensor, "1 seq 1 half"], Float[Tensor, "1 seq 1 half"]]


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """The configuration of a language model; names and defaults are the published ones, except `seq_len`, which is
    `sequence_len` there, and `forward_dtype`, which is an argument of the published scripts."""

    seq_len: SeqLen = 1024  # tokens of a training sequence; set by the task
    vocab_size: VocabSize = 50304  # number of tokens, including special ones; set by the data set
    forward_dtype: Annotated[str, Choices(("float32", "bfloat16"))] = "bfloat16"  # float32, or bfloat16 by autocast
    n_layer: Layers = 12  # blocks
    n_head: Heads = 6  # query heads
    n_kv_head: Heads = 6  # key/value heads; a divisor of n_head
    n_embd: Channels = 768  # channels

    def __post_init__(self):
        super().__post_init__()
        if self.n_embd % (2 * self.n_head):
            step = 2 * self.n_head
            raise ValueError(
                f"n_embd {self.n_embd} does not divide into {self.n_head} heads of an even number of channels; "
                f"use a multiple of {step}, such as {max(step, round(self.n_embd / step) * step)}"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head {self.n_kv_head} does not divide n_head {self.n_head}; use a divisor of it")

    @property
    def sequence_len(self) -> int:
        """The published name of `seq_len`."""
        return self.seq_len


class KVCache(Protocol):
    """Keys and values of earlier positions, with the methods of the published cache."""

    def get_pos(self) -> int:
        """Returns the number of positions in the cache."""
        ...

    def insert_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends (batch, heads, positions, head_dim) to a layer; returns all keys and values of the layer."""
        ...


def norm(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Divides by the root mean square over the last axis."""
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x: Float[Tensor, "batch seq heads head_dim"], cos_sin: CosSin) -> Float[Tensor, "batch seq heads head_dim"]:
    """Rotates channel pairs by their position; a pair is channel i of the first half and channel i of the second."""
    cos, sin = cos_sin
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(x.dtype)


def rotary_tables(positions: int, head_dim: int) -> CosSin:
    """Returns cosines and sines in bfloat16, as the published module stores them."""
    frequencies = _ROTARY_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = (table.to(torch.bfloat16)[None, :, None, :] for table in (angles.cos(), angles.sin()))
    return cos, sin


class CausalSelfAttention(nn.Module):
    """Causal attention; several query heads share a key/value head if there are fewer of them."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.n_embd // config.n_head
        self.shares_heads = config.n_kv_head != config.n_head
        self.c_q = nn.Linear(config.n_embd, config.n_head * self.head_dim, bias=False)
        self.c_k = nn.Linear(config.n_embd, config.n_kv_head * self.head_dim, bias=False)
        self.c_v = nn.Linear(config.n_embd, config.n_kv_head * self.head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(
        self, x: Float[Tensor, "batch seq n_embd"], cos_sin: CosSin, kv_cache: KVCache | None
    ) -> Float[Tensor, "batch seq n_embd"]:
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.c_q, self.c_k, self.c_v))
        query = norm(rotate(query, cos_sin))
        key = norm(rotate(key, cos_sin))
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        if kv_cache is not None:
            key, value = kv_cache.insert_kv(self.layer, key, value)
        queries = query.shape[2]
        keys = key.shape[2]
        mask = None
        if queries != keys:  # the queries are the last positions
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.shares_heads
        )
        return self.c_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a squared ReLU between them."""

    def __init__(self, config: Any):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Float[Tensor, "batch seq n_embd"]) -> Float[Tensor, "batch seq n_embd"]:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)

    def forward(
        self, x: Float[Tensor, "batch seq n_embd"], cos_sin: CosSin, kv_cache: KVCache | None
    ) -> Float[Tensor, "batch seq n_embd"]:
        x = x + self.attn(norm(x), cos_sin, kv_cache)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The language model, with the signature of the published module; `config` may be a published `GPTConfig`."""

    transformer: nn.ModuleDict
    cos: Tensor
    sin: Tensor

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.autocast_dtype = getattr(config, "torch_dtype", torch.float32)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "h": nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)]),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        cos, sin = rotary_tables(_SPARE_POSITIONS * config.sequence_len, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    @property
    def max_positions(self) -> int:
        """The number of positions of the rotary tables."""
        return self.cos.shape[1]

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws the weights as the published method of this name does, in the same order.

        The head and the last layer of each branch are zero, so that only the head has a gradient at the first step.
        """
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, nn.Linear):
                fan_out, fan_in = module.weight.shape
                nn.init.normal_(module.weight, std=fan_in**-0.5 * min(1.0, (fan_out / fan_in) ** 0.5))
        for name, weight in self.named_parameters():
            if name == "lm_head.weight" or name.endswith("c_proj.weight"):
                nn.init.zeros_(weight)

    def forward(
        self,
        idx: Int[Tensor, "batch seq"],
        targets: Int[Tensor, "batch seq"] | None = None,
        kv_cache: KVCache | None = None,
        loss_reduction: str = "mean",
    ) -> Tensor:
        """Returns logits (batch, seq, vocab_size), or with `targets` the cross-entropy in float32.

        `loss_reduction` is that of `F.cross_entropy`; "none" returns batch * seq losses, 0 where a target is -1.
        """
        first = 0 if kv_cache is None else kv_cache.get_pos()
        last = first + idx.shape[1]
        if last > self.cos.shape[1]:
            raise ValueError(f"position {last} is beyond the {self.cos.shape[1]} positions of the rotary tables")
        cos_sin = self.cos[:, first:last], self.sin[:, first:last]
        mixed = self.autocast_dtype != torch.float32
        with torch.autocast(idx.device.type, self.autocast_dtype if mixed else None, enabled=mixed):
            x = norm(self.transformer["wte"](idx))
            for block in self.transformer["h"]:  # pyright: ignore[reportGeneralTypeIssues]
                x = block(x, cos_sin, kv_cache)
            logits = self.lm_head(norm(x))
            logits = _LOGIT_CAP * torch.tanh(logits / _LOGIT_CAP)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.float().flatten(0, 1),
            targets.flatten().long(),
            ignore_index=IGNORED_TARGET,
            reduction=loss_reduction,
        )
