"""A decoder-only language model with the parameter names of nanochat, as of July 2026.

Beyond `gpt.py`: attention in sliding windows, value embeddings in every second layer, a learned scale of the residual
stream and of the embedding in every layer, a share of the embedding of the token before ("smear"), a share of the
middle layer that is subtracted before the head ("backout"), and a vocabulary padded to a multiple of 64. State dicts
are interchangeable with the published module, in both directions.

Weights are float32. There is no autocast: every layer casts its weights to the dtype of its input, which is
`forward_dtype` from the embedding to the logits; the logits and the loss are float32.

References:
  nanochat/gpt.py at 92d63d4, https://github.com/karpathy/nanochat
  Zhou et al., "Value Residual Learning", 2024, https://arxiv.org/abs/2410.17897 (value embeddings)
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from models_torch.cached_attention import KVCache, attention_with_cache, windowed_attention
from models_torch.config import SeqLen, VocabSize
from models_torch.gpt import IGNORED_TARGET, CosSin, GPTConfig, norm, rotate

_ROTARY_BASE = 100_000
_LOGIT_CAP = 15
_SPARE_POSITIONS = 10
"""The rotary tables have this many times `seq_len` positions, for generation beyond the training length."""
_WINDOW_MULTIPLE = 128
_QK_SCALE = 1.2
_SMEAR_CHANNELS = 24
_VALUE_CHANNELS = 12
"""Number of input channels that determine a gate."""


@dataclass(frozen=True, kw_only=True)
class GPT2026Config(GPTConfig):
    """The configuration of a language model; names and defaults are the published ones, except `seq_len`, which is
    `sequence_len` there, and `forward_dtype`, which is an environment variable there."""

    seq_len: SeqLen = 2048  # tokens of a training sequence; set by the task
    vocab_size: VocabSize = 32768  # number of tokens, including special ones; set by the data set
    window_pattern: str = "SSSL"  # repeated over the layers: S a window of seq_len / 4, L of seq_len; the last is L

    def __post_init__(self):
        super().__post_init__()
        if not self.window_pattern or set(self.window_pattern.upper()) - set("SL"):
            raise ValueError(f"window_pattern is {self.window_pattern!r}; use letters S and L, such as SSSL")
        if self.n_embd < _SMEAR_CHANNELS:
            raise ValueError(f"n_embd is {self.n_embd}; use at least {_SMEAR_CHANNELS}")


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return F.linear(x, self.weight.to(x.dtype))


def has_value_embedding(layer: int, n_layer: int) -> bool:
    """Returns True if a layer has a value embedding: the last one and every second one before it."""
    return (n_layer - 1 - layer) % 2 == 0


def windows(pattern: str, seq_len: int, n_layer: int) -> list[int]:
    """Returns the number of positions before its own that each layer attends to."""
    short = -(-seq_len // (4 * _WINDOW_MULTIPLE)) * _WINDOW_MULTIPLE
    kinds = {"S": short, "L": seq_len}
    repeated = [kinds[pattern.upper()[layer % len(pattern)]] for layer in range(n_layer)]
    return [*repeated[:-1], seq_len]


def rotary_tables(positions: int, head_dim: int, dtype: torch.dtype) -> CosSin:
    """Returns cosines and sines in a dtype."""
    frequencies = 1.0 / _ROTARY_BASE ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = (table.to(dtype)[None, :, None, :] for table in (angles.cos(), angles.sin()))
    return cos, sin


class CausalSelfAttention(nn.Module):
    """Causal attention in a window; a layer with a value embedding adds it to the values, by a gate of each head."""

    def __init__(self, config: Any, layer: int, window: int):
        super().__init__()
        self.layer = layer
        self.window = window
        self.head_dim = config.n_embd // config.n_head
        self.c_q = Linear(config.n_embd, config.n_head * self.head_dim)
        self.c_k = Linear(config.n_embd, config.n_kv_head * self.head_dim)
        self.c_v = Linear(config.n_embd, config.n_kv_head * self.head_dim)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        gated = has_value_embedding(layer, config.n_layer)
        self.ve_gate = Linear(_VALUE_CHANNELS, config.n_kv_head) if gated else None

    def forward(
        self,
        x: Float[Tensor, "batch seq n_embd"],
        values: Float[Tensor, "batch seq kv_embd"] | None,
        cos_sin: CosSin,
        kv_cache: KVCache | None,
    ) -> Float[Tensor, "batch seq n_embd"]:
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.c_q, self.c_k, self.c_v))
        if self.ve_gate is not None and values is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :_VALUE_CHANNELS]))
            value = value + gate.unsqueeze(-1) * values.unflatten(-1, (-1, self.head_dim))
        query, key = (norm(rotate(heads, cos_sin)) * _QK_SCALE for heads in (query, key))
        if kv_cache is None:
            attended = windowed_attention(query, key, value, self.window)
        else:
            attended = attention_with_cache(
                query,
                *kv_cache.get_layer_cache(self.layer),
                key,
                value,
                cache_seqlens=kv_cache.cache_seqlens,
                causal=True,
                window_size=(self.window, 0),
            )
            if self.layer == kv_cache.n_layers - 1:
                kv_cache.advance(x.shape[1])
        return self.c_proj(attended.flatten(2))


class MLP(nn.Module):
    """Two linear layers with a squared ReLU between them."""

    def __init__(self, config: Any):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Float[Tensor, "batch seq n_embd"]) -> Float[Tensor, "batch seq n_embd"]:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, config: Any, layer: int, window: int):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer, window)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Float[Tensor, "batch seq n_embd"],
        values: Float[Tensor, "batch seq kv_embd"] | None,
        cos_sin: CosSin,
        kv_cache: KVCache | None,
    ) -> Float[Tensor, "batch seq n_embd"]:
        x = x + self.attn(norm(x), values, cos_sin, kv_cache)
        return x + self.mlp(norm(x))


class GPT2026(nn.Module):
    """The language model, with the signature of the published module; `config` may be a published `GPTConfig`."""

    reads_previous_of_many = True
    """The first of several tokens after a cache also gets a share of the token before it; in the published module, a
    single token alone does."""
    transformer: nn.ModuleDict
    cos: Tensor
    sin: Tensor

    def __init__(self, config: Any, pad_vocab_size_to: int = 64):
        super().__init__()
        self.config = config
        self.dtype = getattr(config, "torch_dtype", torch.float32)
        head_dim = config.n_embd // config.n_head
        layers = range(config.n_layer)
        padded = -(-config.vocab_size // pad_vocab_size_to) * pad_vocab_size_to
        sizes = windows(config.window_pattern, config.sequence_len, config.n_layer)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(padded, config.n_embd),
                "h": nn.ModuleList([Block(config, layer, sizes[layer]) for layer in layers]),
            }
        )
        self.lm_head = Linear(config.n_embd, padded)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        self.smear_gate = Linear(_SMEAR_CHANNELS, 1)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.full((1,), 0.2))
        with_values = [layer for layer in layers if has_value_embedding(layer, config.n_layer)]
        self.value_embeds = nn.ModuleDict(
            {str(layer): nn.Embedding(padded, config.n_kv_head * head_dim) for layer in with_values}
        )
        cos, sin = rotary_tables(_SPARE_POSITIONS * config.sequence_len, head_dim, self.dtype)
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

        The last layer of each branch is zero, and so is the share of the token before.
        """
        bound = 3**0.5 * self.config.n_embd**-0.5
        nn.init.normal_(self.transformer["wte"].weight, std=0.8)  # pyright: ignore[reportArgumentType]
        nn.init.normal_(self.lm_head.weight, std=0.001)
        for block in self._blocks():
            for layer in (block.attn.c_q, block.attn.c_k, block.attn.c_v):
                nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.uniform_(block.mlp.c_fc.weight, -0.4 * bound, 0.4 * bound)
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.zeros_(block.mlp.c_proj.weight)
        last = max(self.config.n_layer - 1, 1)
        for layer in range(self.config.n_layer):
            self.resid_lambdas[layer] = 1.15 - 0.10 * layer / last
            self.x0_lambdas[layer] = 0.20 - 0.15 * layer / last
        nn.init.zeros_(self.smear_lambda)
        nn.init.constant_(self.backout_lambda, 0.2)
        nn.init.uniform_(self.smear_gate.weight, 0.0, 0.02)
        for table in self.value_embeds.values():
            nn.init.uniform_(table.weight, -bound, bound)  # pyright: ignore[reportArgumentType]
        for block in self._blocks():
            if block.attn.ve_gate is not None:
                nn.init.uniform_(block.attn.ve_gate.weight, 0.0, 0.02)

    def _blocks(self) -> list[Block]:
        return list(self.transformer["h"])  # pyright: ignore[reportArgumentType, reportReturnType]

    def forward(
        self,
        idx: Int[Tensor, "batch seq"],
        targets: Int[Tensor, "batch seq"] | None = None,
        kv_cache: KVCache | None = None,
        loss_reduction: str = "mean",
    ) -> Tensor:
        """Returns logits (batch, seq, vocab_size), or with `targets` the cross-entropy, both in float32.

        `loss_reduction` is that of `F.cross_entropy`; "none" returns batch * seq losses, 0 where a target is -1.
        """
        first = 0 if kv_cache is None else kv_cache.get_pos()
        last = first + idx.shape[1]
        if last > self.cos.shape[1]:
            raise ValueError(f"position {last} is beyond the {self.cos.shape[1]} positions of the rotary tables")
        cos_sin = self.cos[:, first:last], self.sin[:, first:last]
        embedded = self._smeared(norm(self.transformer["wte"](idx).to(self.dtype)), kv_cache)
        x = middle = embedded
        for layer, block in enumerate(self._blocks()):
            x = self.resid_lambdas[layer] * x + self.x0_lambdas[layer] * embedded
            values = self.value_embeds[str(layer)](idx).to(x.dtype) if str(layer) in self.value_embeds else None
            x = block(x, values, cos_sin, kv_cache)
            if layer == self.config.n_layer // 2:
                middle = x
        x = norm(x - self.backout_lambda.to(x.dtype) * middle)
        logits = self.lm_head(x)[..., : self.config.vocab_size].float()
        logits = _LOGIT_CAP * torch.tanh(logits / _LOGIT_CAP)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORED_TARGET, reduction=loss_reduction
        )

    def _smeared(
        self, x: Float[Tensor, "batch seq n_embd"], kv_cache: KVCache | None
    ) -> Float[Tensor, "batch seq n_embd"]:
        """Adds to each token a share of the previous one, also if that is in the cache, which stores the last one."""
        before = None
        if kv_cache is not None:
            before = kv_cache.prev_embedding
            kv_cache.prev_embedding = x[:, -1:]
        if before is not None:
            return x + self._share(x) * torch.cat([before, x[:, :-1]], dim=1)
        if x.shape[1] == 1:
            return x
        share = self._share(x[:, 1:])
        return torch.cat([x[:, :1], x[:, 1:] + share * x[:, :-1]], dim=1)

    def _share(self, x: Float[Tensor, "batch seq n_embd"]) -> Float[Tensor, "batch seq 1"]:
        return self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[..., :_SMEAR_CHANNELS]))
