"""HRM-Text: language models that apply the same blocks several times, with gradients through the last times only.

The Hierarchical Reasoning Model as a language model (`design` hrm) and the designs that it is compared with: trm (one
stack for both levels), ut (one stack, repeated), rins (a repeated stack, then another one) and a plain transformer.
Parameters have the names of the published repository, and state dicts are interchangeable with it in both directions;
`to_transformers` and `from_transformers` convert those of design hrm.

Several samples may share a row. A position attends to those before it in its own sample, and inside an instruction also
to those after it (PrefixLM). Weights are float32 and cast to `forward_dtype`; logits and loss are float32.

References:
  https://github.com/sapientinc/HRM-Text at da566c9; arXiv 2605.20613
  Dehghani et al., "Universal Transformers", 2019, https://arxiv.org/abs/1807.03819 (ut)
  Alabdulmohsin and Zhai, "Recursive Inference Scaling", 2025, https://arxiv.org/abs/2502.07503 (rins)
"""

# ruff: noqa: N815 (H_cycles is the field's name)

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models_torch.config import Channels, Cycles, Expansion, Heads, Layers, ModelConfig, SeqLen, VocabSize
from models_torch.gpt import IGNORED_TARGET
from models_torch.layers import (
    CastEmbedding,
    CastLinear,
    CosSin,
    Latent,
    RotaryEmbedding,
    SwiGLU,
    at_least_float32,
    rms_norm,
    rotate,
    truncated_normal_,
)
from models_torch.ranges import Choices, Range

TWO_STACKS = ("hrm", "rins")


@dataclass(frozen=True, kw_only=True)
class HRMTextConfig(ModelConfig):
    """The configuration of an HRM-Text model; the defaults are those of the published size B."""

    seq_len: SeqLen = 2048  # tokens of a row; set by the task
    vocab_size: VocabSize = 65536  # number of tokens, including special ones; set by the data set
    design: Annotated[str, Choices(("hrm", "trm", "ut", "rins", "transformer"))] = "hrm"  # how the stacks are applied
    n_layers: Layers = 12  # blocks, of both stacks together
    hidden_size: Channels = 1024  # channels
    num_heads: Heads = 8  # attention heads
    expansion: Expansion = 4.0  # MLP width in multiples of hidden_size, before the factor 2/3 of SwiGLU
    mlp_multiple_of: Channels = 256  # MLP widths are rounded up to a multiple of this number
    H_cycles: Cycles = 2  # updates of z_H; of hrm and trm
    L_cycles: Cycles = 3  # updates of z_L for one of z_H; of ut and rins all updates
    bp_steps: Cycles = 5  # last updates with gradients: as many of z_H as there are, and at least one of z_L
    rope_theta: Annotated[float, Range(1, 1e9)] = 10000.0  # longest rotary wavelength, in positions over 2 pi
    rms_norm_eps: Annotated[float, Range(0, 1)] = 1e-6  # added to a mean square

    def __post_init__(self):
        super().__post_init__()
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_heads} heads of an even number of "
                f"channels; use a multiple of {2 * self.num_heads}"
            )
        if self.design in TWO_STACKS and self.n_layers % 2:
            raise ValueError(f"n_layers is {self.n_layers}; {self.design} has two equal stacks, use an even number")
        if self.design in ("hrm", "trm") and self.bp_steps < 2:
            raise ValueError(f"bp_steps is {self.bp_steps}; use at least 2, one update of z_H and one of z_L")

    @property
    def layers_per_stack(self) -> int:
        return self.n_layers // (2 if self.design in TWO_STACKS else 1)

    def with_cycles(self, cycles: int) -> "HRMTextConfig":
        """Returns the configuration with another number of cycles, for the same weights.

        Raises ValueError for design transformer, which has no cycles.
        """
        if self.design == "transformer":
            raise ValueError("a transformer has no cycles; omit the option")
        field = "H_cycles" if self.design in ("hrm", "trm") else "L_cycles"
        return replace(self, **{field: cycles})


class Context(NamedTuple):
    """The inputs that every block of a call needs."""

    cos_sin: CosSin
    attends: Bool[Tensor, "batch 1 seq seq"] | None
    """Mask of the positions that each position attends to; None for causal attention."""
    cache: Any = None
    """Keys and values of earlier calls, with the method `insert_kv` of nanochat's cache."""
    slots: Iterator[int] = iter(())
    """Numbers of the cache's layers: each application of a layer has its own, in the order of computation."""


class Attention(nn.Module):
    """Attention whose heads are multiplied by a gate; gate, queries, keys and values have one matrix."""

    def __init__(self, config: HRMTextConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.gqkv_proj = CastLinear(config.hidden_size, 4 * config.hidden_size)
        self.o_proj = CastLinear(config.hidden_size, config.hidden_size)

    def forward(self, x: Latent, context: Context) -> Latent:
        heads = self.gqkv_proj(x).unflatten(-1, (4, self.num_heads, -1))
        gate, query, key, value = heads.unbind(-3)
        query, key = (rotate(each.chunk(2, dim=-1), context.cos_sin) for each in (query, key))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if context.cache is not None:
            key, value = context.cache.insert_kv(next(context.slots), key, value)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=context.attends,
            is_causal=context.attends is None and query.shape[2] > 1,  # one position sees all that there are
        )
        return self.o_proj((torch.sigmoid(gate) * attended.transpose(1, 2)).flatten(-2))


class Block(nn.Module):
    """Attention and a gated MLP, each with a norm before it and a residual connection."""

    def __init__(self, config: HRMTextConfig):
        super().__init__()
        self.epsilon = config.rms_norm_eps
        self.attn = Attention(config)
        self.mlp = SwiGLU(config.hidden_size, config.expansion, config.mlp_multiple_of)

    def forward(self, x: Latent, context: Context) -> Latent:
        x = x + self.attn(rms_norm(x, self.epsilon), context)
        return x + self.mlp(rms_norm(x, self.epsilon))


class Stack(nn.Module):
    """Blocks and a norm."""

    def __init__(self, config: HRMTextConfig):
        super().__init__()
        self.epsilon = config.rms_norm_eps
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers_per_stack))

    def forward(self, x: Latent, context: Context) -> Latent:
        for layer in self.layers:
            x = layer(x, context)
        return rms_norm(x, self.epsilon)


class NamedStack(nn.Module):
    """A stack below the name that published checkpoints have for it."""

    def __init__(self, config: HRMTextConfig):
        super().__init__()
        self.core = Stack(config)

    def forward(self, x: Latent, context: Context) -> Latent:
        return self.core(x, context)


class Hierarchical(nn.Module):
    """`z_L` is updated `L_cycles` times from itself and `z_H`, then `z_H` from both, and this `H_cycles` times.

    Design trm has one stack for both. The last `bp_steps` updates have gradients: those of `z_H` first, up to one less
    than `bp_steps`, the others are of `z_L`.
    """

    zL_init: Tensor

    def __init__(self, config: HRMTextConfig):
        super().__init__()
        self.config = config
        if config.design == "hrm":
            self.H_level = NamedStack(config)
        self.L_level = NamedStack(config)
        self.register_buffer("zL_init", _initial_latent(config))

    def forward(self, x: Latent, context: Context) -> Latent:
        config = self.config
        enabled = torch.is_grad_enabled()
        high = self.H_level if config.design == "hrm" else self.L_level
        high_with_gradients = min(config.H_cycles, config.bp_steps - 1)
        first_high = config.H_cycles - high_with_gradients
        first_low = config.H_cycles * config.L_cycles - (config.bp_steps - high_with_gradients)
        z_H = x
        z_L = self.zL_init
        for cycle in range(config.H_cycles):
            for update in range(cycle * config.L_cycles, (cycle + 1) * config.L_cycles):
                with torch.set_grad_enabled(enabled and update >= first_low):
                    z_L = self.L_level(z_L + z_H, context)
            with torch.set_grad_enabled(enabled and cycle >= first_high):
                z_H = high(z_H + z_L, context)
        return z_H


class Repeated(nn.Module):
    """`z` is updated `L_cycles` times from itself and the input, the last `bp_steps` times with gradients.

    Design rins applies a second stack to the result.
    """

    zL_init: Tensor

    def __init__(self, config: HRMTextConfig):
        super().__init__()
        self.config = config
        kind = Stack if config.design == "rins" else NamedStack
        if config.design == "rins":
            self.H_level = kind(config)
        self.L_level = kind(config)
        self.register_buffer("zL_init", _initial_latent(config))

    def forward(self, x: Latent, context: Context) -> Latent:
        config = self.config
        enabled = torch.is_grad_enabled()
        z = self.zL_init
        for update in range(config.L_cycles):
            with torch.set_grad_enabled(enabled and update >= config.L_cycles - config.bp_steps):
                z = self.L_level(z + x, context)
        return self.H_level(z, context) if config.design == "rins" else z


def _initial_latent(config: HRMTextConfig) -> Float[Tensor, "hidden"]:
    """Returns the initial `z_L`, which is not trained; bfloat16, as in published checkpoints."""
    return truncated_normal_(torch.empty(config.hidden_size), 1.0).to(torch.bfloat16)


MODELS: dict[str, type[nn.Module]] = {
    "hrm": Hierarchical,
    "trm": Hierarchical,
    "ut": Repeated,
    "rins": Repeated,
    "transformer": Stack,
}


class HRMText(nn.Module):
    """The language model: embedding, stacks, head, and the loss of each target."""

    def __init__(self, config: HRMTextConfig):
        super().__init__()
        self.config = config
        std = config.hidden_size**-0.5
        self.model = MODELS[config.design](config)
        self.embed_tokens = CastEmbedding(config.vocab_size, config.hidden_size, std, config.torch_dtype)
        self.lm_head = CastLinear(config.hidden_size, config.vocab_size)
        self.rotary_emb = RotaryEmbedding(config.hidden_size // config.num_heads, config.seq_len, config.rope_theta)

    @property
    def max_positions(self) -> int:
        return self.config.seq_len

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        targets: Int[Tensor, "batch seq"] | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        samples: Int[Tensor, "batch seq"] | None = None,
        instruction: Bool[Tensor, "batch seq"] | None = None,
        kv_cache: Any = None,
        loss_reduction: str = "mean",
    ) -> Tensor:
        """Returns logits (batch, seq, vocab_size), or with `targets` the cross-entropy, both in float32.

        `positions` are those inside a sample, by default those in the row. `samples` numbers the samples of a row.
        Positions where `instruction` holds attend to each other in both directions. `kv_cache` is empty, or `tokens`
        is one more token of a row. `loss_reduction` is that of `F.cross_entropy`; "none" returns batch * seq losses, 0
        where a target is -1.
        """
        cos, sin = self.rotary_emb()
        first = 0 if kv_cache is None else kv_cache.get_pos()
        chosen = slice(first, first + tokens.shape[1]) if positions is None else positions.long()
        attends = _attends(samples, instruction)
        context = Context((cos[chosen], sin[chosen]), attends, kv_cache, itertools.count())
        x = self.config.hidden_size**0.5 * self.embed_tokens(tokens)
        logits = at_least_float32(self.lm_head(self.model(x, context)))
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORED_TARGET, reduction=loss_reduction
        )


def _attends(
    samples: Int[Tensor, "batch seq"] | None, instruction: Bool[Tensor, "batch seq"] | None
) -> Bool[Tensor, "batch 1 seq seq"] | None:
    """Returns the mask of the positions (last axis) that each position attends to; None for causal attention."""
    known = samples if samples is not None else instruction
    if known is None:
        return None
    place = torch.arange(known.shape[1], device=known.device)
    attends = (place[:, None] >= place).expand(known.shape[0], -1, -1)
    if instruction is not None:
        attends = attends | (instruction[:, :, None] & instruction[:, None, :])
    if samples is not None:
        attends = attends & (samples[:, :, None] == samples[:, None, :])
    return attends[:, None]


# ---- checkpoints of transformers

_NAMES = {
    "embed_tokens.embedding_weight": "model.embed_tokens.weight",
    "model.zL_init": "model.z_L_init",
    "model.H_level.core.": "model.H_module.",
    "model.L_level.core.": "model.L_module.",
    ".attn.o_proj.": ".self_attn.o_proj.",
}
_JOINED = {
    ".attn.gqkv_proj.": (".self_attn.gate_proj.", ".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."),
    ".mlp.gate_up_proj.": (".mlp.gate_proj.", ".mlp.up_proj."),
}
"""Matrices that are one here and several in transformers."""


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of `HrmTextForCausalLM` of transformers from that of an `HRMText` of design hrm."""
    converted = {}
    for name, tensor in state.items():
        joined = next((each for each in _JOINED if each in name), None)
        parts = _JOINED[joined] if joined else ("",)
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
            converted[_renamed(name.replace(joined, part) if joined else name, _NAMES)] = rows.clone()
    return converted


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of an `HRMText` from that of transformers' `HrmTextForCausalLM`."""
    back = {new: old for old, new in _NAMES.items()}
    converted = {}
    for name, tensor in state.items():
        joined = next(((one, parts) for one, parts in _JOINED.items() if any(each in name for each in parts)), None)
        if joined is None:
            new = _renamed(name, back)
            converted[new] = tensor.to(torch.bfloat16) if new == "model.zL_init" else tensor
        elif joined[1][0] in name:
            parts = [state[name.replace(joined[1][0], part)] for part in joined[1]]
            converted[_renamed(name.replace(joined[1][0], joined[0]), back)] = torch.cat(parts)
    return converted


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name
